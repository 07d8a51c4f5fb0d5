"""Operations of attention kernels, which a compiler sees as calls and cannot count.

With P pairs of positions and heads of d features every product takes `2 P d`. Forward
there are two, of scores and of values. Backward, cuDNN takes five; splash attention
seven in two kernels, three for queries and four for keys and values, as each computes
the scores and their derivative again.
"""

from __future__ import annotations

import math
import re

from cocodc_jax.aot.hlo import Computation, Instruction
from cocodc_jax.models import splash

_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}


def kernel_flops(each: Instruction, inside: Computation) -> float:
    """Return the operations of a kernel for causal attention; 0 if it is none.

    Args:
      each: a custom call.
      inside: where it stands.
    """
    operands = [
        (array.dtype, array.dims)
        for name in each.operands
        for array in inside.by_name[name].arrays[:1]
    ]
    if "__cudnn$fmha" in each.attributes:
        return cudnn_flops("Backward" in each.attributes, operands[0][1])
    return splash_flops(each.name + each.attributes, operands)


def splash_flops(name: str, operands: list[tuple[str, tuple[int, ...]]]) -> float:
    """Return the operations of a kernel of splash attention; 0 if it is none.

    Args:
      name: that holds the kernel's own.
      operands: dtype and shape of each, queries `[..., L, d]`.
    """
    kernel = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", name)
    if kernel is None:
        return 0.0
    # Queries come first of all that has heads, then keys; the rest says which blocks.
    (*batch, num_own, width), (*_, length, _) = [
        dims
        for dtype, dims in operands
        if len(dims) >= 3 and dtype in ("bf16", "f32", "bfloat16", "float32")
    ][:2]
    pairs = math.prod(batch) * num_own * length * splash.share(length, num_own)
    return 2.0 * _SPLASH[kernel[1]] * pairs * width


def cudnn_flops(is_backward: bool, query: tuple[int, ...]) -> float:
    """Return the operations of cuDNN's attention.

    Args:
      is_backward: whether it is the derivative.
      query: shape, `[B, L, H, d]`, as JAX hands it over.
    """
    batch, length, heads, width = query
    pairs = batch * heads * length * (length + 1) / 2  # A half, and the diagonal.
    return 2.0 * (5 if is_backward else 2) * pairs * width
