"""Operations of kernels, which a compiler sees as calls and cannot count.

With P pairs of positions and heads of d features every product takes `2 P d`. Forward
there are two, of scores and of values. Backward, cuDNN takes five; splash attention
seven in two kernels, three for queries and four for keys and values, as each computes
the scores and their derivative again. Products of groups of rows, each by its own
expert's matrix, take one product a row.
"""

from __future__ import annotations

import math
import re

from cocodc_jax.aot.hlo import Computation, Instruction
from cocodc_jax.models import splash

_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
_FLOATS = ("bf16", "f32", "bfloat16", "float32")


def kernel_flops(each: Instruction, inside: Computation) -> float:
    """Return the operations of a kernel for attention or experts; 0 if it is none.

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
    if re.match(r"%?(ragged-dot|tgmm)", each.name):
        return grouped_flops(operands)
    return splash_flops(each.name + each.attributes, operands)


def grouped_flops(operands: list[tuple[str, tuple[int, ...]]]) -> float:
    """Return the operations of a product of groups of rows.

    Args:
      operands: dtype and shape of each; the last two are rows `[m, k]`, and matrices
        `[E, k, n]` or, for the gradient of these, rows `[m, n]`. A kernel without any
        only finds where groups begin.

    >>> grouped_flops([("bf16", (8, 2)), ("bf16", (4, 2, 3))])
    96.0
    >>> grouped_flops([("s32", (5,)), ("bf16", (8, 2)), ("bf16", (8, 3))])
    96.0
    """
    found = [dims for dtype, dims in operands if dtype in _FLOATS]
    if len(found) < 2:
        return 0.0
    (rows, inside), (*of_experts, one, other) = found[-2:]
    return 2.0 * rows * (one if of_experts else inside) * other


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
        dims for dtype, dims in operands if len(dims) >= 3 and dtype in _FLOATS
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
