"""Operations of a program as it is written, before any compiler has seen it.

A compiled program computes the model's products, those that a rematerialisation policy
asks for again, and what the compiler adds. The second and third are not distinct in
the compiled program, but in the program as it is written (its jaxpr) there are only the
first two: with a policy, less without one, are the operations computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

from cocodc_jax.aot.costs import cudnn_flops, splash_flops
from cocodc_jax.models.dispatch import FURTHER_ROUND

# Whose body is an attention kernel's, and counted by its name.
_KERNELS = ("pallas_call", "dot_product_attention_fwd_wrapper")
_KERNELS += ("dot_product_attention_bwd_wrapper",)


def flops(jaxpr: Any, even_share: float = 1.0) -> float:
    """Return the operations of all matrix products on all devices, 2 a product.

    Not of those that no result depends on, as a policy leaves where a kernel's outputs
    are kept.

    Loops of `lax.scan` count as often as they run, those of `lax.while_loop` once; of
    the branches of a condition the one that computes most (the one that computes
    least for rounds of rows to experts after the first); what a `jax.shard_map`
    computes on each device, for every device along its axes. `even_share` is as for
    `costs.flops`.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.zeros((2, 3))
    >>> flops(jax.make_jaxpr(lambda x: x @ x.T)(x))
    24.0
    """
    whole = _open(jaxpr)
    used, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    return _sum(used, even_share)


def _sum(jaxpr: Any, even_share: float) -> float:
    return sum(_flops_of(each, even_share) for each in _open(jaxpr).eqns)


def _flops_of(each: Any, even_share: float) -> float:
    name, params = each.primitive.name, each.params
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        left, out = each.invars[0].aval.shape, each.outvars[0].aval.shape
        size = math.prod(left[axis] for axis in contracted)
        return 2.0 * math.prod(out) * size
    if name == "ragged_dot_general":
        return _ragged_flops(each) * even_share
    if name in _KERNELS:
        return _kernel_flops(each)
    inside = [_sum(jaxpr, even_share) for jaxpr in _bodies(params)]
    if name == "cond":
        is_further = FURTHER_ROUND in str(each.source_info.name_stack)
        return min(inside) if is_further else max(inside)
    times = 1
    if name == "scan":
        times = params["length"]
    if name == "shard_map":
        mesh, axes = params["mesh"], params["newly_manual_axes"]
        times = math.prod(mesh.shape[axis] for axis in axes)
    return sum(inside) * times


def _ragged_flops(each: Any) -> float:
    """Count a product of groups: each row is multiplied by one group's matrix."""
    numbers = each.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right, *_ = (x.aval.shape for x in each.invars)
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = [size for axis, size in enumerate(right) if axis not in others]
    return 2.0 * math.prod(left) * math.prod(free)


def _kernel_flops(each: Any) -> float:
    name = each.primitive.name
    avals = [x.aval for x in each.invars]
    if name != "pallas_call":
        return cudnn_flops("_bwd_" in name, avals[0].shape)
    operands = [(str(aval.dtype), aval.shape) for aval in avals]
    return splash_flops(str(each.params.get("name")), operands)


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(_open(one), "eqns"):
                yield one


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
