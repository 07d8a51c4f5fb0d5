"""Pass extra arguments to an optimizer that names some, or takes none.

Optax passes extra arguments (`value=`, `grad_fn=`) to a transformation that takes any,
and none to others. Some optimizers name the arguments that they use and refuse others
(`optax.contrib.sam`, or a user's own). Here they get those that they name.
"""

import inspect
import re
from typing import Any

import optax

_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"missing \d+ required (?:keyword-only|positional) arguments?: ")
_POSITIONAL = 3  # Updates, state and parameters.


def with_named_extras(
    optimizer: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with an `update` that accepts any extra arguments.

    The optimizer gets all of them if it takes any (`**extra`), else those that its
    signature names. If a part of it, such as a link of `optax.chain`, refuses an
    argument, no part gets it.

    Raises:
      ValueError: by `update`, if the optimizer needs an argument that is not passed.

    >>> def update(updates, state, params=None, *, value):
    ...     return updates * value, state
    >>> tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    >>> with_named_extras(tx).update(2.0, (), None, value=3.0, batch=None)
    (6.0, ())
    """
    names = _named(optimizer.update)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        if names is not None:
            extra = {name: x for name, x in extra.items() if name in names}
        while True:
            try:
                return optimizer.update(updates, state, params, **extra)
            except TypeError as error:
                text = str(error)
                refused = _UNEXPECTED.search(text)
                if refused is None or refused[1] not in extra:
                    _raise_if_missing(text, error)
                    raise

                extra.pop(refused[1])

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _named(update: Any) -> frozenset[str] | None:
    """Return the extra arguments that an update names, None if it takes any."""
    try:
        parameters = [*inspect.signature(update).parameters.values()]
    except (TypeError, ValueError):  # Has no signature, such as a compiled function.
        return None

    if any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters):
        return None
    return frozenset(
        x.name
        for i, x in enumerate(parameters)
        if x.kind is inspect.Parameter.KEYWORD_ONLY or i >= _POSITIONAL
    )


def _raise_if_missing(text: str, error: TypeError) -> None:
    """Raise a ValueError for the TypeError of a missing argument."""
    missing = _MISSING.search(text)
    if missing is None:
        return
    names = text[missing.end() :].replace("'", "")
    raise ValueError(
        f"the inner optimizer needs {names}: pass it to tx.update of cc.synchronized "
        "(RegionProgram passes value alone)"
    ) from error
