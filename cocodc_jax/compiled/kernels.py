"""Operations of attention kernels, which a compiler sees as calls and cannot count.

With P pairs of positions and heads of d features every product takes `2 P d`. Forward
there are two, of scores and of values. Backward, cuDNN takes five; splash attention
seven in two kernels, three for queries and four for keys and values, as each computes
the scores and their derivative again.
"""

from __future__ import annotations

import math
import re

from cocodc_jax.compiled.hlo import Computation, Instruction
from cocodc_jax.models.attention import splash_share

_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}


def kernel_flops(each: Instruction, inside: Computation) -> float:
    """Return the operations of a kernel for causal attention; 0 if it is none.

    Args:
      each: a custom call.
      inside: where it stands.
    """
    if splash := re.search(r"splash_m[hq]a_(fwd|dq|dkv)", each.name + each.attributes):
        # Queries come first of all that has heads; what has not says which blocks.
        *batch, length, width = next(
            array.dims
            for name in each.operands
            for array in inside.by_name[name].arrays[:1]
            if len(array.dims) >= 3 and array.dtype in ("bf16", "f32")
        )
        pairs = math.prod(batch) * length**2 * splash_share(length)
        return 2.0 * _SPLASH[splash[1]] * pairs * width
    if "__cudnn$fmha" in each.attributes:
        # `[B, L, H, d]`, as JAX hands them over; of all pairs a half, and the diagonal.
        batch, length, heads, width = inside.by_name[each.operands[0]].arrays[0].dims
        pairs = batch * heads * length * (length + 1) / 2
        return 2.0 * (5 if "Backward" in each.attributes else 2) * pairs * width
    return 0.0
