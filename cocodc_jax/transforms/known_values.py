"""Evaluate the outputs of a traced function that follow from its known arguments.

An output is known if it follows from known arguments alone. Calls are entered, and of a
`lax.cond` with a known predicate the branch that is taken.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def evaluate(
    jaxpr: jex_core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]
) -> list[Any]:
    """Evaluate the outputs that follow from known arguments; None is unknown."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, jex_core.Literal) else known.get(x)

    for eqn in jaxpr.eqns:
        values = [read(x) for x in eqn.invars]
        outputs = _outputs(eqn, values)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _outputs(eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the outputs of an equation, None for unknown ones."""
    name = eqn.primitive.name
    options = eqn.params

    unknown = [None] * len(eqn.outvars)
    if name == "cond":
        if values[0] is None:
            return unknown
        branches = options["branches"]
        index = min(max(int(values[0]), 0), len(branches) - 1)
        return evaluate(branches[index].jaxpr, branches[index].consts, values[1:])
    if name in _CALLS or name in _CUSTOM:
        inner = options.get("jaxpr", options.get("call_jaxpr"))
        if inner is None:
            return unknown
        consts = getattr(inner, "consts", ())
        return evaluate(getattr(inner, "jaxpr", inner), consts, values)
    if eqn.effects or any(value is None for value in values):
        return unknown

    outputs = eqn.primitive.bind(*values, **options)
    return [*outputs] if eqn.primitive.multiple_results else [outputs]
