"""Operations and memory traffic of a compiled program, loops counted as they run.

XLA's own cost analysis counts a loop's body once, and these programs are loops in
loops: of steps, of layers, of chunks of the loss. Here every instruction counts as
often as it runs. Only matrix products count as operations, as in a model's own count.
"""

from __future__ import annotations

import math
import re

import numpy as np

from cocodc_jax.aot.hlo import Computation, Instruction, Module, arrays
from cocodc_jax.aot.kernels import kernel_flops

# What moves nothing by itself: names for parts, or what its own callees are counted by.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call "
    "after-all partition-id replica-id opt-barrier optimization-barrier".split()
)


def flops(module: Module) -> float:
    """Return the floating-point operations of all matrix products, 2 a product.

    Args:
      module: TPUs' products are convolutions, GPUs' dots or calls of cuBLAS; what
        other calls compute is seen of attention alone (`kernels.py`).
    """
    total = 0.0
    for computation in module:
        times = module.executions[computation.name]
        if times:
            total += times * sum(
                _flops_of(each, computation) for each in computation.instructions
            )
    return total


def _flops_of(each: Instruction, inside: Computation) -> float:
    if each.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
        return _dot_flops(each, inside, contracted[1] if contracted else "")
    if each.opcode == "convolution":
        return _convolution_flops(each, inside)
    if each.opcode == "custom-call" and "__cublas" in each.attributes:
        contracted = re.search(
            r'"lhs_contracting_dimensions":\[([^\]]*)\]', each.attributes
        )
        numbers = contracted[1].replace('"', "") if contracted else ""
        return _dot_flops(each, inside, numbers)
    return kernel_flops(each, inside) if each.opcode == "custom-call" else 0.0


def _dot_flops(each: Instruction, inside: Computation, contracted: str) -> float:
    left = _dims(inside, each.operands[0])
    size = math.prod(left[int(axis)] for axis in contracted.split(",") if axis)
    return 2.0 * math.prod(each.arrays[0].dims) * size


def _convolution_flops(each: Instruction, inside: Computation) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    assert labels, each.attributes
    left, right = (_dims(inside, name) for name in each.operands[:2])
    out = each.arrays[0].dims
    window = dict(re.findall(r"(\w+)=([\w-]+)", _window(each.attributes)))
    num_spatial = sum(label.isdigit() for label in labels[1])

    def numbers(name: str, default: str) -> list[str]:
        text = window.get(name)
        return text.split("x") if text else [default] * num_spatial

    products = 1.0
    for i in range(num_spatial):
        low = numbers("pad", "0_0")[i].split("_")[0]
        products *= _num_valid(
            size=left[labels[1].index(str(i))],
            kernel=int(numbers("size", "1")[i]),
            out=out[labels[3].index(str(i))],
            stride=int(numbers("stride", "1")[i]),
            low=int(low),
            size_dilation=int(numbers("lhs_dilate", "1")[i]),
            kernel_dilation=int(numbers("rhs_dilate", "1")[i]),
        )
    outputs = out[labels[3].index("b")] * out[labels[3].index("f")]
    return 2.0 * outputs * right[labels[2].index("i")] * products


def _num_valid(
    size: int,
    kernel: int,
    out: int,
    stride: int,
    low: int,
    size_dilation: int,
    kernel_dilation: int,
) -> int:
    """Count pairs of output and kernel places that meet an element, not a padding.

    A batch of products is written as a convolution over places of which each output
    meets one: only these are computed.
    """
    place = (
        np.arange(out)[:, None] * stride
        + np.arange(kernel)[None] * kernel_dilation
        - low
    )
    within = (place >= 0) & (place <= (size - 1) * size_dilation)
    return int((within & (place % size_dilation == 0)).sum())


def _window(attributes: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    return found[1] if found else ""


def _dims(inside: Computation, name: str) -> tuple[int, ...]:
    return inside.by_name[name].arrays[0].dims


def hbm_bytes(module: Module) -> float:
    """Estimate the bytes that a program reads from and writes to main memory.

    Every instruction reads its operands and writes its result, as far as they are in
    main memory. A slice of an array reads the slice, and an update in place writes the
    update, also where a fusion does it.
    """
    total = 0.0
    for computation in module:
        times = module.executions[computation.name]
        if times and computation.name not in module.fused:
            total += times * sum(
                _moved(each, computation, module) for each in computation.instructions
            )
    return total


def _moved(each: Instruction, inside: Computation, module: Module) -> float:
    if each.opcode in _FREE or each.opcode.endswith("-done"):
        return 0
    if each.opcode == "fusion":
        return _moved_by_fusion(each, inside, module)
    if each.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _in_hbm(each.shape)
    if each.opcode == "dynamic-update-slice":
        return 2 * _in_hbm(inside.by_name[each.operands[1]].shape)
    read = sum(_in_hbm(inside.by_name[name].shape) for name in each.operands)
    if each.opcode.endswith("-start"):  # Its shape names the operands again.
        return 2 * read
    return read + _in_hbm(each.shape)


def _moved_by_fusion(each: Instruction, inside: Computation, module: Module) -> float:
    (name,) = each.called["calls"]
    fused = module.computations[name]
    total = 0.0
    for number, line in _parameters(fused).items():
        operand = inside.by_name[each.operands[number]]
        part = _part_read(line.name, fused, module)
        if any(array.is_in_hbm for array in operand.arrays):
            whole = operand.num_bytes
            total += whole if part is None else min(part, whole)
    return total + _written(each, fused)


def _parameters(fused: Computation) -> dict[int, Instruction]:
    return {
        int(line.operands[0]): line
        for line in fused.instructions
        if line.opcode == "parameter"
    }


def _part_read(name: str, fused: Computation, module: Module) -> float | None:
    """Return the bytes that a fused computation reads of a value; None is all."""
    part = 0.0
    for user in fused.instructions:
        for place, operand in enumerate(user.operands):
            if operand != name or user.opcode == "parameter":
                continue
            if user.opcode == "bitcast":
                read = _part_read(user.name, fused, module)
            elif user.opcode == "dynamic-slice" and place == 0:
                read = user.num_bytes
            elif user.opcode == "dynamic-update-slice" and place == 0:
                read = 0
            elif user.opcode == "fusion":
                inner = module.computations[user.called["calls"][0]]
                read = _part_read(_parameters(inner)[place].name, inner, module)
            else:
                read = None
            if read is None:
                return None
            part += read
    return part


def _written(each: Instruction, fused: Computation) -> float:
    root = fused.root
    results = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0
    for name, array in zip(results, arrays(each.shape), strict=False):
        line = fused.by_name[name]
        while line.opcode == "bitcast":
            line = fused.by_name[line.operands[0]]
        if array.is_in_hbm:
            is_update = line.opcode == "dynamic-update-slice"
            update = fused.by_name[line.operands[1]].num_bytes if is_update else None
            total += array.num_bytes if update is None else update
    return total


def _in_hbm(shape: str) -> int:
    return sum(array.num_bytes for array in arrays(shape) if array.is_in_hbm)
