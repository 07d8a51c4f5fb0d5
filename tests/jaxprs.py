"""The equations of a traced program, and a hash of them."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params


def equations(jaxpr):
    """Every equation of a jaxpr, and of the jaxprs inside."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


# Parameters of an equation without meaning: names, and the place in the source.
_IGNORED_PARAMS = frozenset(
    {"name", "debug_info", "fwd_name", "bwd_name", "name_stack"}
)


def digest(jaxpr: ClosedJaxpr) -> str:
    """Return a hash of a jaxpr that renaming a Python function does not change."""
    text = "\n".join(_lines_of_closed(jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines_of_closed(closed: ClosedJaxpr) -> Iterator[str]:
    for const in closed.consts:
        yield f"const {_text_of_value(const)}"
    yield from _lines(closed.jaxpr)


def _lines(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield one line an equation, its variables numbered in their order."""
    numbers: dict[Any, int] = {}

    def define(variable: Any) -> str:
        numbers[variable] = len(numbers)
        return f"{numbers[variable]}:{variable.aval.str_short(short_dtypes=True)}"

    def use(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{_text_of_value(atom.val)}:{atom.aval.str_short()}"
        return str(numbers[atom])

    yield "in " + " ".join(define(v) for v in (*jaxpr.constvars, *jaxpr.invars))

    for equation in jaxpr.eqns:
        params = [
            f"{key}={_text_of_param(value)}"
            for key, value in sorted(equation.params.items())
            if key not in _IGNORED_PARAMS
        ]
        inputs = " ".join(use(v) for v in equation.invars)
        outputs = " ".join(define(v) for v in equation.outvars)
        yield f"{outputs} = {equation.primitive.name}[{' '.join(params)}] {inputs}"

    yield "out " + " ".join(use(v) for v in jaxpr.outvars)


def _text_of_param(value: Any) -> str:
    if isinstance(value, ClosedJaxpr):
        return digest(value)
    if isinstance(value, Jaxpr):
        text = "\n".join(_lines(value))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    if isinstance(value, tuple | list):
        return f"({' '.join(_text_of_param(x) for x in value)})"
    if isinstance(value, set | frozenset):  # Printed in another order every time.
        return f"{{{' '.join(sorted(_text_of_param(x) for x in value))}}}"
    if isinstance(value, dict):
        return str({key: _text_of_param(x) for key, x in value.items()})
    if isinstance(value, np.ndarray | jax.Array):
        return _text_of_value(value)
    if callable(value) and not isinstance(value, type):
        return "function"  # Derivative rules, which are traced when they are used.

    text = str(value)
    assert " at 0x" not in text, f"{type(value)} prints its address: {text}"
    return text


def _text_of_value(value: Any) -> str:
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    content = hashlib.sha256(array.tobytes()).hexdigest()[:16]
    return f"{array.dtype}{list(array.shape)}{content}"
