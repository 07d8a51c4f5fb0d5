"""Parsed scheduled HLO, the text of `jax.stages.Compiled.as_text`.

It has what measuring needs: instructions in the order in which they run, the
computations that they call, how often each computation runs, and bytes of shapes.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

from cocodc_jax.models.dispatch import FURTHER_ROUND

_DTYPE = r"pred|token|opaque|[a-z]+\d+(?:e\d+m\d+\w*)?"
_ARRAY = re.compile(rf"\b({_DTYPE})\[([\d,]*)\](?:\{{([^}}]*)\}})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.<>-]+) \(.*\{$")
# Of what the host computes a thread is named; after a kernel's notes more follows.
_END = re.compile(r'^\}(, execution_thread="\w+")?\s*$')
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.<>-]+) = ")
_CALLED = re.compile(
    r"\b(calls|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.<>-]+)"
)
# Of a call the computation that it runs, of others what is done to single elements.
_APPLIED = re.compile(r"\bto_apply=%?([\w.<>-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OPENS = "({["
_CLOSES = ")}]"


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a shape."""

    dtype: str  # As HLO writes it, such as bf16.
    dims: tuple[int, ...]
    is_in_hbm: bool = True  # In the device's main memory, not in a TPU's VMEM.

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, without padding."""
        return math.ceil(math.prod(self.dims) * dtype_bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction, one line of the text."""

    name: str  # Of its result, unique in the module.
    shape: str  # Of its result, as written.
    opcode: str  # Such as fusion.
    operands: tuple[str, ...]  # Names, or for a constant its value.
    attributes: str = ""  # The rest of the line, as written.
    is_root: bool = False  # Whether it is the computation's result.

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result; for a tuple those of all parts."""
        return arrays(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of computations that it calls, by role: calls, body, condition."""
        called = {
            kind: tuple(re.findall(r"[\w.<>-]+", names))
            for kind, names in _CALLED.findall(self.attributes)
        }
        applied = _APPLIED.search(self.attributes) if self.opcode == "call" else None
        return called | {"calls": (applied[1],)} if applied else called


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str  # Unique in the module.
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names, in order."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction that is the computation's result."""
        return next((x for x in self.instructions if x.is_root), self.instructions[-1])


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]  # By name.
    entry: str  # Name of the computation that is the program.

    def __iter__(self) -> Iterator[Computation]:
        """Iterate over the computations."""
        return iter(self.computations.values())

    def trip_count(self, loop: Instruction) -> int:
        """Return how often the body of a while loop runs.

        It is the compiler's annotation; else the constant that the condition compares
        with, because a scan counts from 0 in steps of 1; else 1.
        """
        if known := _TRIPS.search(loop.attributes):
            return int(known[1])
        constants = [
            int(instruction.operands[0])
            for name in loop.called.get("condition", ())
            for instruction in self._with_callees(self.computations[name])
            if instruction.opcode == "constant"
            and re.fullmatch(r"\d+", instruction.operands[0])
        ]
        return max(constants, default=1)

    def _with_callees(self, computation: Computation) -> Iterator[Instruction]:
        for instruction in computation.instructions:
            yield instruction
            for name in instruction.called.get("calls", ()):
                yield from self._with_callees(self.computations[name])

    @functools.cached_property
    def executions(self) -> dict[str, int]:
        """How often each computation runs; every branch of a conditional counts.

        Rounds of rows to experts after the first, which an even router does not need,
        count 0 times, and so do computations on single elements (a reduction's sum).
        """
        times = dict.fromkeys(self.computations, 0)

        def visit(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations[name].instructions:
                if (
                    instruction.opcode == "conditional"
                    and FURTHER_ROUND in instruction.attributes
                ):
                    continue
                for kind, callees in instruction.called.items():
                    trips = self.trip_count(instruction) if kind == "body" else 1
                    for callee in callees:
                        visit(callee, count * trips)

        visit(self.entry, 1)
        return times

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """Computations inside fusions, whose inner values are never in memory."""
        fused: set[str] = set()
        callers = [
            instruction
            for computation in self
            for instruction in computation.instructions
            if instruction.opcode == "fusion"
        ]

        while callers:
            called = {
                name
                for caller in callers
                for callees in caller.called.values()
                for name in callees
            }
            new = called - fused
            fused |= new
            callers = [
                caller
                for name in new
                for caller in self.computations[name].instructions
            ]

        return frozenset(fused)


def parse(text: str) -> Module:
    """Read a module from the text that `as_text` gives."""
    computations: dict[str, Computation] = {}
    entry = ""
    name = ""  # Of the computation that is being read.
    instructions: list[Instruction] = []
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw)
        if header := _HEADER.match(line):
            name = header[2]
            instructions = []
            entry = name if header[1] else entry
        elif name and _END.match(line):
            computations[name] = Computation(name, tuple(instructions))
            name = ""
        elif name and (match := _NAME.match(line)):
            rest = line[match.end() :]
            instructions.append(_instruction(match[2], rest, bool(match[1])))

    if entry not in computations:
        raise ValueError("the text has no ENTRY computation: it is no HLO module")
    return Module(computations, entry)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()

    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 2
    operands = tuple(
        part.split()[-1].lstrip("%") for part in split(rest[:end]) if part.split()
    )

    return Instruction(
        name=name,
        shape=shape,
        opcode=opcode,
        operands=operands,
        attributes=rest[end + 1 :],
        is_root=is_root,
    )


def _depths(text: str) -> Iterator[int]:
    """Yield the number of open brackets after each character."""
    return itertools.accumulate((c in _OPENS) - (c in _CLOSES) for c in text)


def _closing(text: str) -> int:
    """Return the position after the bracket that closes the first one."""
    return next((i for i, depth in enumerate(_depths(text), 1) if not depth), len(text))


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets.

    >>> split("f32[2,3]{1,0} %a, (b, c)")
    ['f32[2,3]{1,0} %a', '(b, c)']
    """
    depths = enumerate(_depths(text))
    commas = [i for i, depth in depths if text[i] == "," and not depth]
    ends = itertools.pairwise([-1, *commas, len(text)])
    return [text[i + 1 : j].strip() for i, j in ends]


def elements(shape: str) -> list[str]:
    """Return the parts of a tuple's shape; an array's shape is its only part."""
    return split(shape[1:-1]) if shape.startswith("(") else [shape]


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape.

    >>> arrays("(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, u32[], token[])")[0]
    Array(dtype='bf16', dims=(2, 8), is_in_hbm=False)
    """
    result = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        if dtype not in ("token", "opaque"):
            sizes = tuple(int(size) for size in dims.split(",") if size)
            result.append(Array(dtype, sizes, "S(" not in layout or "S(0)" in layout))
    return tuple(result)


def dtype_bits(dtype: str) -> int:
    """Return the bits of an element.

    >>> [dtype_bits(name) for name in ("pred", "s4", "f8e4m3fn", "bf16", "c64")]
    [8, 4, 8, 16, 64]
    """
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) if bits else 8
