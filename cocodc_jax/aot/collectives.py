"""Collectives of a compiled program: over which axes, how many bytes, and when.

Bytes are those that a device receives, with the algorithms that move least. For an
array of n bytes, the full one before or after it, in a group of g devices:

    all-gather, reduce-scatter, all-to-all     n (g - 1) / g
    all-reduce                                 2 n (g - 1) / g
    collective-permute, send                   n

Between slices of a TPU a collective is a pair of send and receive that the host carries
out ("megascale"); its attributes name the collective. An asynchronous collective spans
the instructions between its start and its end in the schedule.
"""

import dataclasses
import itertools
import math
import re

import numpy as np

from cocodc_jax.aot import hlo
from cocodc_jax.aot.costs import flops
from cocodc_jax.aot.hlo import Array, Computation, Instruction, Module

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# The axis of collectives that the hosts carry out, in a mesh over several slices.
BETWEEN_SLICES = "slice"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # One of `KINDS`, or send.
    # Mesh axes that its groups span; `BETWEEN_SLICES` if hosts carry it out.
    axes: tuple[str, ...]
    num_bytes: float  # That a device receives in one execution.
    times: int  # How often it runs in one call of the program.
    is_async: bool  # Whether other work can run between its start and its end.
    spans: bool  # Whether a loop that multiplies matrices runs in between.
    array: Array  # Its largest result.
    name: str  # Of its instruction.


def collectives(module: Module, mesh_shape: dict[str, int]) -> list[Collective]:
    """Find the collectives of a program, in no order.

    A TPU's compiler may cut one collective into steps and fuse them with instructions
    that run meanwhile. All steps have the number of its channel, and count once. The
    number 1 does not count: JAX gives it to all collectives of a `shard_map`.

    Args:
      module: the compiled program. If hosts carry out collectives, it is the module of
        one slice, and numbers only that slice's devices.
      mesh_shape: size of each mesh axis, in the order of devices.
    """
    busy = _busy_loops(module)
    by_channel: dict[tuple, Collective] = {}
    for computation in module:
        times = module.executions[computation.name]
        if not times:
            continue

        for instruction in computation.instructions:
            collective = _read(
                instruction=instruction,
                computation=computation,
                module=module,
                mesh_shape=mesh_shape,
                busy=busy,
            )
            if collective is None:
                continue

            channel = re.search(r"channel_id=(\d+)", instruction.attributes)
            # Hosts' transfers are numbered for themselves.
            number = channel[1] if channel and instruction.opcode != "send" else "1"
            key = (collective.kind, instruction.name if number == "1" else number)
            collective = dataclasses.replace(collective, times=times)
            parts = (collective, by_channel.get(key, collective))
            by_channel[key] = dataclasses.replace(
                max(parts, key=lambda part: part.num_bytes),
                times=max(part.times for part in parts),
                is_async=any(part.is_async for part in parts),
                spans=any(part.spans for part in parts),
            )

    return list(by_channel.values())


def _read(
    instruction: Instruction,
    computation: Computation,
    module: Module,
    mesh_shape: dict[str, int],
    busy: frozenset[str],
) -> Collective | None:
    """Return the collective that an instruction is or starts, if any."""
    if instruction.opcode == "send":
        return _read_send(instruction, computation, busy)

    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None

    groups = replica_groups(instruction.attributes)
    size = math.prod(mesh_shape.values()) if groups is None else len(groups[0])
    result = instruction.shape

    # A start's result is a tuple of operands, results and contexts; but for this one.
    is_start = instruction.opcode.endswith("-start")
    if is_start and instruction.opcode != "all-reduce-start":
        _, result, *_ = hlo.elements(result)
    all_arrays = hlo.arrays(result)

    num_bytes = float(sum(array.num_bytes for array in all_arrays))
    if kind == "reduce-scatter":
        num_bytes *= size  # Whole before it.
    # A TPU's reduce-scatter is an all-reduce and a slice, fused.
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"

    wrappers = [
        (other, caller)
        for caller in module
        for other in caller.instructions
        if other.opcode == "async-start"
        and computation.name in other.called.get("calls", ())
    ]
    starts = [(instruction, computation), *wrappers]
    is_async = is_start or "async" in computation.name
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh_shape),
        num_bytes=_received(kind, num_bytes, size),
        times=1,
        is_async=is_async or bool(wrappers),
        spans=any(_spans(start, caller, busy) for start, caller in starts),
        array=max(all_arrays, key=lambda array: array.num_bytes),
        name=instruction.name,
    )


def _received(kind: str, num_bytes: float, group_size: int) -> float:
    share = (group_size - 1) / max(group_size, 1)
    if kind == "all-reduce":
        return 2 * num_bytes * share
    whole = ("collective-permute", "collective-broadcast")
    return num_bytes if kind in whole else num_bytes * share


def _read_send(
    instruction: Instruction, computation: Computation, busy: frozenset[str]
) -> Collective:
    """Return a transfer by the hosts, from its sending end.

    It spans the instructions before the end of the receive: a send ends when the host
    has taken the bytes, before the network has carried them.
    """
    named = dict(re.findall(r'(_xla_\w+)="([^"]*)"', instruction.attributes))
    kind = named.get("_xla_megascale_transfer_type", "send").lower().replace("_", "-")
    array = instruction.arrays[0]

    halves = []
    rendezvous = named.get("_xla_host_transfer_rendezvous")
    if rendezvous:
        mark = f'_xla_host_transfer_rendezvous="{rendezvous}"'
        recvs = (x for x in computation.instructions if x.opcode == "recv")
        halves = [x for x in recvs if mark in x.attributes]

    # A gathered array arrives in full; of a sum each device receives only its share.
    received = [half.arrays[0].num_bytes for half in halves]
    return Collective(
        kind=kind,
        axes=(BETWEEN_SLICES,),
        num_bytes=float(max(received, default=array.num_bytes)),
        times=1,
        is_async=True,
        spans=all(_spans(half, computation, busy) for half in halves or (instruction,)),
        array=array,
        name=instruction.name,
    )


def _spans(start: Instruction, computation: Computation, busy: frozenset[str]) -> bool:
    begin = [*computation.by_name].index(start.name)
    names = []
    for other in computation.instructions[begin:]:
        if other.opcode.endswith("-done") and start.name in other.operands:
            return not busy.isdisjoint(names)
        names.append(other.name)
    return False


def _busy_loops(module: Module) -> frozenset[str]:
    """Return the loops that multiply matrices, one of which is the inner scan."""

    def multiplies(loop: Instruction) -> bool:
        bodies = loop.called.get("body", ())
        return any(flops(dataclasses.replace(module, entry=x)) > 0 for x in bodies)

    instructions = itertools.chain(
        *(computation.instructions for computation in module)
    )
    loops = (
        instruction for instruction in instructions if instruction.opcode == "while"
    )
    return frozenset(
        instruction.name for instruction in loops if multiplies(instruction)
    )


def _axes(groups: np.ndarray | None, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Return the axes along which the members of a group differ."""
    if groups is None:
        return tuple(name for name, size in mesh_shape.items() if size > 1)
    places = np.unravel_index(groups, tuple(mesh_shape.values()))
    return tuple(
        name
        for name, place in zip(mesh_shape, places, strict=True)
        if (place != place[:, :1]).any()
    )


def replica_groups(attributes: str) -> np.ndarray | None:
    """Return the groups of devices that take part together, int `[groups, size]`.

    None if all devices are one group, or if the attributes name no groups.

    >>> replica_groups("replica_groups={{0,1},{2,3}}").tolist()
    [[0, 1], [2, 3]]
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)").tolist()
    [[0, 2], [1, 3]]
    >>> text = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"
    >>> replica_groups(text).tolist()
    [[0, 1], [2, 3]]
    """
    named = re.search(
        r"replica_groups=mesh\[([^]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}:]*)\}",
        attributes,
    )

    if named:
        return _groups_of_axes(named)

    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota:
        shape, source, order = (_numbers(part or "") for part in iota.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        if order:
            ids = ids.transpose(order)
        return ids.reshape(shape)

    listed = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}\s]*\})\}", attributes
    )
    if not listed:
        return None

    groups = [_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", listed[1])]
    return np.array(groups) if groups else None


def _groups_of_axes(named: re.Match) -> np.ndarray:
    """Return groups that are written as axes of a mesh; see `replica_groups`."""
    axes, device_shape, order, group_axes = named.groups()
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    shape = list(sizes.values())

    ids = np.arange(math.prod(shape)).reshape(_numbers(device_shape or "") or shape)
    if order:
        ids = ids.transpose(_numbers(order))

    # The axes that a group spans come last.
    together = re.findall(r"'(\w+)'", group_axes)
    last = [list(sizes).index(name) for name in together]
    ids = np.moveaxis(ids.reshape(shape), last, range(-len(last), 0))
    return ids.reshape(-1, math.prod(sizes[name] for name in together))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
