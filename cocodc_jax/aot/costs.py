"""Operations and memory traffic of a program, with every iteration of its loops.

XLA's own cost analysis counts a loop's body once, and these programs are nested loops.
Here every instruction counts as often as it runs. Only matrix products count as
operations, as in a model's own count.

Kernels are calls whose operations a compiler cannot count. With P pairs of positions
and heads of d features, every product of attention takes `2 P d`. The forward pass has
two, for the scores and for the values. In the backward pass cuDNN takes five; splash
attention takes seven in two kernels, three for queries and four for keys and values, as
each computes the scores and their derivative again. A grouped product, of rows that are
each multiplied by their expert's matrix, takes one product a row.

A compiled program computes the model's products, those that a rematerialisation policy
recomputes, and what the compiler adds. The program as it is written (its jaxpr) has
only the first two, so `written_flops` with a policy minus `written_flops` without one
are the recomputed operations.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.interpreters import partial_eval

from cocodc_jax.aot.hlo import Computation, Instruction, Module, arrays
from cocodc_jax.models.attention import splash_share
from cocodc_jax.models.dispatch import FURTHER_ROUND

# Primitives of attention by cuDNN.
_CUDNN = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
# Opcodes that move no bytes themselves: names for parts, and calls of what is counted.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call "
    "after-all partition-id replica-id opt-barrier optimization-barrier".split()
)
_SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
_GROUPED = r"%?(ragged-dot|tgmm)"  # names of kernels that multiply groups
_FLOATS = ("bf16", "f32", "bfloat16", "float32")

Operand = tuple[str, tuple[int, ...]]  # Dtype and shape.


def peak_bytes(memory: Any, held_bytes: int = 0) -> int:
    """Return the bytes that a device needs while a compiled program runs.

    Args:
      memory: `memory_analysis()` of the program.
      held_bytes: what the device holds besides its arguments.
    """
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    inside = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return arrays - memory.alias_size_in_bytes + inside + held_bytes


def flops(module: Module, even_share: float = 1.0) -> float:
    """Return the floating-point operations of all matrix products, 2 a product.

    Products are convolutions on TPUs, dots or calls of cuBLAS on GPUs. Of other custom
    calls, only attention and grouped products are counted.

    Args:
      module: the compiled program.
      even_share: the share of the rows of grouped products that are multiplied; the
        rest is padding.
    """

    def cost(instruction: Instruction, computation: Computation) -> float:
        share = even_share if re.match(_GROUPED, instruction.name) else 1.0
        return _flops_of(instruction, computation) * share

    return _summed(cost, module)


def _summed(cost: Callable[[Instruction, Computation], float], module: Module) -> float:
    """Sum the costs of all instructions, each as often as it runs."""
    total = 0.0
    for computation in module:
        if times := module.executions[computation.name]:
            total += times * sum(
                cost(instruction, computation)
                for instruction in computation.instructions
            )
    return total


def _flops_of(instruction: Instruction, computation: Computation) -> float:
    if instruction.opcode == "dot":
        return _dot_flops(
            instruction, computation, r"lhs_contracting_dims=\{([\d,]*)\}"
        )
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    if instruction.opcode != "custom-call":
        return 0.0
    if "__cublas" in instruction.attributes:
        return _dot_flops(
            instruction, computation, r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        )

    operands = [
        (array.dtype, array.dims)
        for name in instruction.operands
        for array in computation.by_name[name].arrays[:1]
    ]
    if "__cudnn$fmha" in instruction.attributes:
        return cudnn_flops("Backward" in instruction.attributes, operands[0][1])
    if re.match(_GROUPED, instruction.name):
        return _grouped_flops(operands)

    return splash_flops(instruction.name + instruction.attributes, operands)


def _dot_flops(
    instruction: Instruction, computation: Computation, contracted: str
) -> float:
    """Count a product; the pattern `contracted` finds its contracted axes."""
    left = _dims(computation, instruction.operands[0])
    dimensions = re.search(contracted, instruction.attributes)
    axes = re.findall(r"\d+", dimensions[1]) if dimensions else ()
    return (
        2.0
        * math.prod(instruction.arrays[0].dims)
        * math.prod(left[int(x)] for x in axes)
    )


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """Count pairs of output and kernel positions that read an element, not padding.

    XLA writes a batch of products as a convolution in which each output position reads
    one element, and the hardware computes only these products.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction.attributes
    left, right = (_dims(computation, name) for name in instruction.operands[:2])
    out = instruction.arrays[0].dims
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    settings = dict(re.findall(r"(\w+)=([\w-]+)", window[1] if window else ""))
    num_spatial = sum(label.isdigit() for label in labels[1])

    def numbers(name: str, default: str = "1") -> list[int]:
        texts = (
            settings[name].split("x") if name in settings else [default] * num_spatial
        )
        return [int(text.split("_")[0]) for text in texts]

    size = numbers("size")
    stride = numbers("stride")
    low = numbers("pad", "0_0")
    left_dilation = numbers("lhs_dilate")
    right_dilation = numbers("rhs_dilate")

    products = 1.0
    for i in range(num_spatial):
        outputs = np.arange(out[labels[3].index(str(i))])[:, None] * stride[i]
        place = outputs + np.arange(size[i])[None] * right_dilation[i] - low[i]
        last = (left[labels[1].index(str(i))] - 1) * left_dilation[i]
        meets = (place >= 0) & (place <= last) & (place % left_dilation[i] == 0)
        products *= int(meets.sum())

    outputs = out[labels[3].index("b")] * out[labels[3].index("f")]
    return 2.0 * outputs * right[labels[2].index("i")] * products


def _dims(computation: Computation, name: str) -> tuple[int, ...]:
    return computation.by_name[name].arrays[0].dims


def _grouped_flops(operands: Sequence[Operand]) -> float:
    """Return the operations of a grouped product.

    The last two operands are rows `[m, k]`, and matrices `[E, k, n]` or, for their
    gradient, rows `[m, n]`. A kernel without such operands only finds where groups
    begin.

    >>> _grouped_flops([("bf16", (8, 2)), ("bf16", (4, 2, 3))])
    96.0
    >>> _grouped_flops([("s32", (5,)), ("bf16", (8, 2)), ("bf16", (8, 3))])
    96.0
    """
    float_shapes = [dims for dtype, dims in operands if dtype in _FLOATS]
    if len(float_shapes) < 2:
        return 0.0

    (rows, width), (*num_experts, first, last) = float_shapes[-2:]
    contracted = first if num_experts else width
    return 2.0 * rows * contracted * last


def splash_flops(name: str, operands: Sequence[Operand]) -> float:
    """Return the operations of a splash attention kernel; 0 if `name` has none."""
    kernel = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", name)
    if kernel is None:
        return 0.0
    # Of the operands with heads, queries [..., L, d] come first, then keys. The others
    # select blocks.
    (*batch, num_local, width), (*_, length, _) = [
        dims for dtype, dims in operands if len(dims) >= 3 and dtype in _FLOATS
    ][:2]
    pairs = math.prod(batch) * num_local * length * splash_share(length, num_local)
    return 2.0 * _SPLASH[kernel[1]] * pairs * width


def cudnn_flops(is_backward: bool, query: tuple[int, ...]) -> float:
    """Return the operations of cuDNN's attention; `query` is the shape [B, L, H, d]."""
    batch, length, heads, width = query
    pairs = batch * heads * length * (length + 1) / 2  # A half, and the diagonal.
    return 2.0 * (5 if is_backward else 2) * pairs * width


def hbm_bytes(module: Module) -> float:
    """Estimate the bytes that a program reads from and writes to main memory.

    Every instruction reads those of its operands that are in main memory, and writes
    its result if it is there. A slice of an array reads only the slice, and an update
    in place writes only the update, also inside a fusion.
    """

    def moved(instruction: Instruction, computation: Computation) -> float:
        return (
            0
            if computation.name in module.fused
            else _moved(instruction, computation, module)
        )

    return _summed(moved, module)


def _moved(instruction: Instruction, computation: Computation, module: Module) -> float:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode == "fusion":
        return _moved_by_fusion(instruction, computation, module)
    if instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _in_hbm(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _in_hbm(computation.by_name[instruction.operands[1]].shape)

    read = sum(
        _in_hbm(computation.by_name[name].shape) for name in instruction.operands
    )
    if instruction.opcode.endswith("-start"):  # Its shape names the operands again.
        return 2 * read
    return read + _in_hbm(instruction.shape)


def _moved_by_fusion(
    instruction: Instruction, computation: Computation, module: Module
) -> float:
    fused = module.computations[instruction.called["calls"][0]]
    total = 0.0
    for number, line in _parameters(fused).items():
        operand = computation.by_name[instruction.operands[number]]
        if any(array.is_in_hbm for array in operand.arrays):
            total += min(_part_read(line.name, fused, module), operand.num_bytes)
    return total + _written(instruction, fused)


def _parameters(fused: Computation) -> dict[int, Instruction]:
    lines = (line for line in fused.instructions if line.opcode == "parameter")
    return {int(line.operands[0]): line for line in lines}


def _part_read(name: str, fused: Computation, module: Module) -> float:
    """Return the bytes that a fused computation reads of a value; infinity is all."""
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
                read = math.inf

            part += read

    return part


def _written(instruction: Instruction, fused: Computation) -> float:
    root = fused.root
    total = 0

    results = root.operands if root.opcode == "tuple" else (root.name,)
    for name, array in zip(results, instruction.arrays, strict=False):
        line = fused.by_name[name]
        written = array
        while line.opcode == "bitcast":
            line = fused.by_name[line.operands[0]]
        if line.opcode == "dynamic-update-slice":
            written = fused.by_name[line.operands[1]]
        total += written.num_bytes if array.is_in_hbm else 0

    return total


def _in_hbm(shape: str) -> int:
    return sum(array.num_bytes for array in arrays(shape) if array.is_in_hbm)


def written_flops(jaxpr: Any, even_share: float = 1.0) -> float:
    """Return the operations of all products of a jaxpr on all devices, 2 a product.

    Products that no result depends on are left out; a rematerialisation policy leaves
    some in the jaxpr if it keeps a kernel's outputs. A `lax.scan` counts as often as it
    runs, a `lax.while_loop` once. Of the branches of a condition the one with the most
    operations counts, but for rounds of rows to experts after the first the one with
    the least. A `jax.shard_map` counts for every device along its axes.

    Args:
      jaxpr: the program.
      even_share: as of `flops`.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.zeros((2, 3))
    >>> written_flops(jax.make_jaxpr(lambda x: x @ x.T)(x))
    24.0
    """
    whole = _open(jaxpr)
    used, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    return _summed_over(used, even_share)


def _summed_over(jaxpr: Any, even_share: float) -> float:
    return sum(
        _written_flops_of(equation, even_share) for equation in _open(jaxpr).eqns
    )


def _written_flops_of(equation: Any, even_share: float) -> float:
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        left = equation.invars[0].aval.shape
        out = equation.outvars[0].aval.shape
        size = math.prod(left[axis] for axis in contracted)
        return 2.0 * math.prod(out) * size
    if name == "ragged_dot_general":
        return _ragged_flops(equation) * even_share

    avals = [x.aval for x in equation.invars]
    if name in _CUDNN:
        return cudnn_flops("_bwd_" in name, avals[0].shape)
    if name == "pallas_call":
        operands = [(str(aval.dtype), aval.shape) for aval in avals]
        return splash_flops(str(params.get("name")), operands)

    inside = [_summed_over(jaxpr, even_share) for jaxpr in _bodies(params)]
    if name == "cond":
        is_further = FURTHER_ROUND in str(equation.source_info.name_stack)
        return min(inside) if is_further else max(inside)

    times = 1
    if name == "scan":
        times = params["length"]
    if name == "shard_map":
        mesh = params["mesh"]
        axes = params["newly_manual_axes"]
        times = math.prod(mesh.shape[axis] for axis in axes)

    return sum(inside) * times


def _ragged_flops(equation: Any) -> float:
    """Count a product of groups: each row is multiplied by one group's matrix."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right, *_ = (x.aval.shape for x in equation.invars)
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = [size for axis, size in enumerate(right) if axis not in others]
    return 2.0 * math.prod(left) * math.prod(free)


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(_open(item), "eqns"):
                yield item


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
