"""Collectives of a compiled program: over which axes, how many bytes, and when.

Bytes are those that a device receives, with the algorithms that move least. Of an array
of n bytes, whole after it or before it, in a group of g:

    all-gather, reduce-scatter, all-to-all     n (g - 1) / g
    all-reduce                                 2 n (g - 1) / g
    collective-permute, send                   n

Between slices of a TPU a collective is a pair of send and receive that the host
carries out ("megascale"); which one it is stands in its attributes. What an
asynchronous collective spans lies between its start and its end in the schedule.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from cocodc_jax.aot.costs import flops
from cocodc_jax.aot.groups import replica_groups
from cocodc_jax.aot.hlo import (
    Array,
    Computation,
    Instruction,
    Module,
    arrays,
    elements,
)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Of a mesh over several slices: what the hosts carry.
BETWEEN_SLICES = "slice"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`, or send.
      axes: of the mesh, over which its groups lie; `BETWEEN_SLICES` where hosts carry
        it.
      num_bytes: that a device receives in one execution.
      times: how often it runs in one call of the program.
      is_async: whether other work can run between its start and its end.
      spans: whether a loop that multiplies matrices does.
      array: its largest result.
      name: of its instruction.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    times: int
    is_async: bool
    spans: bool
    array: Array
    name: str


def collectives(module: Module, mesh_shape: dict[str, int]) -> list[Collective]:
    """Find the collectives of a program, in no order.

    A TPU's compiler may cut one collective into steps and fuse them with what runs
    meanwhile; all steps carry its channel's number, and count once. 1 is no such
    number: JAX gives it to all that a `shard_map` names.

    Args:
      module: scheduled.
      mesh_shape: sizes of the mesh's axes, in the order of its devices. Where the hosts
        carry collectives, the module is one slice's, and numbers its devices alone.
    """
    busy = _busy_loops(module)
    found: dict[tuple, Collective] = {}
    for computation in module:
        times = module.executions[computation.name]
        for each in computation.instructions if times else ():
            one = _read(each, computation, module, mesh_shape, busy)
            if one is None:
                continue
            channel = re.search(r"channel_id=(\d+)", each.attributes)
            number = channel[1] if channel else "1"
            key = (one.kind, each.name if number == "1" else number)
            one = dataclasses.replace(one, times=times)
            first = found.get(key)
            parts = (one, first) if first else (one,)
            found[key] = dataclasses.replace(
                max(parts, key=lambda part: part.num_bytes),
                times=max(part.times for part in parts),
                is_async=any(part.is_async for part in parts),
                spans=any(part.spans for part in parts),
            )
    return list(found.values())


def _read(
    each: Instruction,
    inside: Computation,
    module: Module,
    mesh_shape: dict[str, int],
    busy: frozenset[str],
) -> Collective | None:
    """Read the collective that an instruction starts or is, if it is one."""
    if each.opcode == "send":
        return _read_send(each, inside, busy)
    kind = each.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = replica_groups(each.attributes)
    size = _group_size(groups, mesh_shape)
    result = each.shape
    # A start's result is a tuple of operands, results and contexts; but for this one.
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        result = elements(result)[1]
    all_arrays = arrays(result)
    num_bytes = float(sum(array.num_bytes for array in all_arrays))
    if kind == "reduce-scatter":
        num_bytes *= size  # Whole before it.
    # A TPU's reduce-scatter is an all-reduce and a slice, fused.
    if kind == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh_shape),
        num_bytes=_received(kind, num_bytes, size),
        times=1,
        is_async=_is_async(each, inside, module),
        spans=_spans(each, inside, busy) or _caller_spans(inside, module, busy),
        array=max(all_arrays, key=lambda array: array.num_bytes),
        name=each.name,
    )


def _received(kind: str, num_bytes: float, group_size: int) -> float:
    share = (group_size - 1) / max(group_size, 1)
    if kind == "all-reduce":
        return 2 * num_bytes * share
    whole = ("collective-permute", "collective-broadcast")
    return num_bytes if kind in whole else num_bytes * share


def _read_send(
    each: Instruction, inside: Computation, busy: frozenset[str]
) -> Collective:
    """Read a transfer by the hosts, from the end that sends.

    It spans what lies before the end of receiving: sending ends as soon as the host has
    taken the bytes, which may be before the network has carried them.
    """
    named = dict(re.findall(r'(_xla_\w+)="([^"]*)"', each.attributes))
    kind = named.get("_xla_megascale_transfer_type", "send").lower().replace("_", "-")
    array = each.arrays[0]
    rendezvous = named.get("_xla_host_transfer_rendezvous")
    halves = [
        other
        for other in inside.instructions
        if other.opcode == "recv"
        and rendezvous
        and f'_xla_host_transfer_rendezvous="{rendezvous}"' in other.attributes
    ]
    # What is gathered arrives whole; of a sum each device has its own share only.
    num_bytes = max(
        (other.arrays[0].num_bytes for other in halves), default=array.num_bytes
    )
    return Collective(
        kind=kind,
        axes=(BETWEEN_SLICES,),
        num_bytes=float(num_bytes),
        times=1,
        is_async=True,
        spans=all(_spans(half, inside, busy) for half in halves or (each,)),
        array=array,
        name=each.name,
    )


def _is_async(each: Instruction, inside: Computation, module: Module) -> bool:
    if each.opcode.endswith("-start") or "async" in inside.name:
        return True
    return any(
        other.opcode == "async-start" and inside.name in other.called.get("calls", ())
        for computation in module
        for other in computation.instructions
    )


def _caller_spans(inside: Computation, module: Module, busy: frozenset[str]) -> bool:
    """Whether the `async-start` that wraps a computation spans a loop."""
    return any(
        other.opcode == "async-start"
        and inside.name in other.called.get("calls", ())
        and _spans(other, computation, busy)
        for computation in module
        for other in computation.instructions
    )


def _spans(start: Instruction, inside: Computation, busy: frozenset[str]) -> bool:
    begin = inside.position[start.name]
    ends = [
        i
        for i, other in enumerate(inside.instructions)
        if other.opcode.endswith("-done") and start.name in other.operands
    ]
    return bool(ends) and any(
        other.name in busy for other in inside.instructions[begin : min(ends)]
    )


def _busy_loops(module: Module) -> frozenset[str]:
    """Loops that multiply matrices, the inner scan among them."""
    return frozenset(
        each.name
        for computation in module
        for each in computation.instructions
        if each.opcode == "while"
        and any(
            flops(dataclasses.replace(module, entry=body)) > 0
            for body in each.called.get("body", ())
        )
    )


def _group_size(groups: np.ndarray | None, mesh_shape: dict[str, int]) -> int:
    return int(np.prod(list(mesh_shape.values()))) if groups is None else len(groups[0])


def _axes(groups: np.ndarray | None, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Name the axes along which the members of a group differ."""
    if groups is None:
        return tuple(name for name, size in mesh_shape.items() if size > 1)
    places = np.unravel_index(groups, tuple(mesh_shape.values()))
    return tuple(
        name
        for name, place in zip(mesh_shape, places, strict=True)
        if (place != place[:, :1]).any()
    )
