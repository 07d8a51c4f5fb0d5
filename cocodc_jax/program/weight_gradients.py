"""Gradients of weights in the order of operands that is fast on CPUs.

In a product y = x W of tokens, the weight's gradient is x' g. JAX writes it as (g' x)'.
XLA folds the outer transpose into the product, for which its CPU backend has no fast
kernel. `in_quick_order` rewrites it as x' g, for which there is one;
`models/backward.py` writes it so from the start. With several regions in one batch
(`jax.vmap`), XLA folds nothing, and no rewrite is needed.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

PyTree = Any

# The least entries of a weight for which the order matters; other products stay.
_LEAST_SIZE = 1 << 14


def in_quick_order(fn: Callable) -> Callable:
    """Return `fn` with the products of its trace reordered.

    Values differ by rounding. `fn` is traced once, with all of its arguments.
    """

    def reordered(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        run = jaxpr_as_fun(closed.replace(jaxpr=_reordered(closed.jaxpr)))
        results = run(*jax.tree.leaves(args))
        like, treedef = jax.tree.flatten(shapes)
        # Results that are constants of the trace are Python numbers.
        arrays = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, shape.dtype)
            for x, shape in zip(results, like, strict=True)
        ]
        return treedef.unflatten(arrays)

    return reordered


def _reordered(jaxpr: Jaxpr) -> Jaxpr:
    """Replace each transposed product by the product in the other order."""
    inputs = [x for equation in jaxpr.eqns for x in equation.invars]
    uses = collections.Counter(
        x for x in (*inputs, *jaxpr.outvars) if isinstance(x, Var)
    )
    # What reads a value that is read once, if it is a transpose.
    transposes = {
        equation.invars[0]: equation
        for equation in jaxpr.eqns
        if equation.primitive.name == "transpose"
        and isinstance(equation.invars[0], Var)
        and uses[equation.invars[0]] == 1
    }

    equations = []
    replaced = set()
    for equation in jaxpr.eqns:
        result = equation.outvars[0] if equation.outvars else None
        if result in replaced:
            continue

        transpose = None if result is None else transposes.get(result)
        if transpose is None or not _is_weight_gradient(equation, transpose):
            equations.append(_with_inner_reordered(equation))
        elif transpose.outvars[0] in transposes:
            # The second transpose undoes the first, which XLA sees by itself.
            equations.append(equation)
        else:
            equations.append(_in_other_order(equation, transpose))
            replaced.add(transpose.outvars[0])
    return jaxpr.replace(eqns=equations)


def _is_weight_gradient(equation: JaxprEqn, transpose: JaxprEqn) -> bool:
    """Return whether it is a product whose two operands a transpose exchanges."""
    if equation.primitive.name != "dot_general":
        return False
    (of_lhs, _), batch = equation.params["dimension_numbers"]
    sharding = equation.params["out_sharding"]
    if batch != ((), ()) or (sharding is not None and any(sharding.spec)):
        return False

    lhs: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    num_lhs = lhs.ndim - len(of_lhs)
    exchanged = (*range(num_lhs, result.ndim), *range(num_lhs))
    return transpose.params["permutation"] == exchanged and result.size >= _LEAST_SIZE


def _in_other_order(equation: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn:
    """Return the product with its operands exchanged, which is the transposed one."""
    lhs, rhs = equation.invars
    (of_lhs, of_rhs), batch = equation.params["dimension_numbers"]
    precision = equation.params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    sharding = equation.params["out_sharding"]
    if sharding is not None:
        result: Any = transpose.outvars[0].aval
        sharding = result.sharding

    params = equation.params | {
        "dimension_numbers": ((of_rhs, of_lhs), batch),
        "precision": precision,
        "out_sharding": sharding,
    }
    return equation.replace(invars=[rhs, lhs], outvars=transpose.outvars, params=params)


def _with_inner_reordered(equation: JaxprEqn) -> JaxprEqn:
    """Reorder inside of a scan over layers, a function under jit, a checkpoint."""
    inner = equation.params.get("jaxpr")
    if isinstance(inner, ClosedJaxpr):
        inner = inner.replace(jaxpr=_reordered(inner.jaxpr))
    elif isinstance(inner, Jaxpr):
        inner = _reordered(inner)
    else:
        return equation
    return equation.replace(params=equation.params | {"jaxpr": inner})
