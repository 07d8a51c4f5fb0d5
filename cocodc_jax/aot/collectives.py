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

import dataclasses
import itertools
import math
import re

import numpy as np

from cocodc_jax.aot import hlo
from cocodc_jax.aot.costs import flops
from cocodc_jax.aot.hlo import Array, Computation, Instruction, Module

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
# Of a mesh over several slices: what the hosts carry.
BETWEEN_SLICES = "slice"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program."""

    kind: str  # One of `KINDS`, or send.
    # Of the mesh, over which its groups lie; `BETWEEN_SLICES` where hosts carry it.
    axes: tuple[str, ...]
    num_bytes: float  # That a device receives in one execution.
    times: int  # How often it runs in one call of the program.
    is_async: bool  # Whether other work can run between its start and its end.
    spans: bool  # Whether a loop that multiplies matrices does.
    array: Array  # Its largest result.
    name: str  # Of its instruction.


def collectives(module: Module, mesh_shape: dict[str, int]) -> list[Collective]:
    """Find the collectives of a program, in no order.

    A TPU's compiler may cut one collective into steps and fuse them with what runs
    meanwhile; all steps carry its channel's number, and count once. 1 is no such
    number: JAX gives it to all that a `shard_map` names.

    `mesh_shape` has the axes in the order of devices. Where the hosts carry
    collectives, the module is one slice's, and numbers its devices alone.
    """
    busy = _busy_loops(module)
    found: dict[tuple, Collective] = {}
    for computation in module:
        times = module.executions[computation.name]
        for each in computation.instructions if times else ():
            if (one := _read(each, computation, module, mesh_shape, busy)) is None:
                continue
            channel = re.search(r"channel_id=(\d+)", each.attributes)
            # Hosts' transfers are numbered for themselves.
            number = channel[1] if channel and each.opcode != "send" else "1"
            key = (one.kind, each.name if number == "1" else number)
            one = dataclasses.replace(one, times=times)
            parts = (one, found.get(key, one))
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
    size = math.prod(mesh_shape.values()) if groups is None else len(groups[0])
    result = each.shape
    # A start's result is a tuple of operands, results and contexts; but for this one.
    if each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        result = hlo.elements(result)[1]
    all_arrays = hlo.arrays(result)
    num_bytes = float(sum(array.num_bytes for array in all_arrays))
    if kind == "reduce-scatter":
        num_bytes *= size  # Whole before it.
    # A TPU's reduce-scatter is an all-reduce and a slice, fused.
    if kind == "all-reduce" and inside.name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    wrappers = [
        (other, computation)
        for computation in module
        for other in computation.instructions
        if other.opcode == "async-start"
        and inside.name in other.called.get("calls", ())
    ]
    starts = [(each, inside), *wrappers]
    is_async = each.opcode.endswith("-start") or "async" in inside.name
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh_shape),
        num_bytes=_received(kind, num_bytes, size),
        times=1,
        is_async=is_async or bool(wrappers),
        spans=any(_spans(start, there, busy) for start, there in starts),
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

    It spans what is before the end of receiving: sending ends once the host has taken
    the bytes, before the network has carried them.
    """
    named = dict(re.findall(r'(_xla_\w+)="([^"]*)"', each.attributes))
    kind = named.get("_xla_megascale_transfer_type", "send").lower().replace("_", "-")
    array = each.arrays[0]
    halves = []
    if rendezvous := named.get("_xla_host_transfer_rendezvous"):
        said = f'_xla_host_transfer_rendezvous="{rendezvous}"'
        recvs = (x for x in inside.instructions if x.opcode == "recv")
        halves = [x for x in recvs if said in x.attributes]
    # What is gathered arrives whole; of a sum each device has its own share only.
    received = [half.arrays[0].num_bytes for half in halves]
    return Collective(
        kind=kind,
        axes=(BETWEEN_SLICES,),
        num_bytes=float(max(received, default=array.num_bytes)),
        times=1,
        is_async=True,
        spans=all(_spans(half, inside, busy) for half in halves or (each,)),
        array=array,
        name=each.name,
    )


def _spans(start: Instruction, inside: Computation, busy: frozenset[str]) -> bool:
    begin = [*inside.by_name].index(start.name)
    names = []
    for other in inside.instructions[begin:]:
        if other.opcode.endswith("-done") and start.name in other.operands:
            return not busy.isdisjoint(names)
        names.append(other.name)
    return False


def _busy_loops(module: Module) -> frozenset[str]:
    """Loops that multiply matrices, the inner scan among them."""

    def multiplies(loop: Instruction) -> bool:
        bodies = loop.called.get("body", ())
        return any(flops(dataclasses.replace(module, entry=x)) > 0 for x in bodies)

    every = itertools.chain(*(computation.instructions for computation in module))
    loops = (each for each in every if each.opcode == "while")
    return frozenset(each.name for each in loops if multiplies(each))


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


def replica_groups(attributes: str) -> np.ndarray | None:
    """Read which devices take part together, int `[groups, size]`.

    None if all devices do, or nothing is said.

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
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        shape = list(sizes.values())
        ids = np.arange(math.prod(shape)).reshape(_numbers(named[2] or "") or shape)
        ids = ids.transpose(_numbers(named[3])) if named[3] else ids
        together = re.findall(r"'(\w+)'", named[4])
        last = [list(sizes).index(name) for name in together]
        ids = np.moveaxis(ids.reshape(shape), last, range(-len(last), 0))
        return ids.reshape(-1, math.prod(sizes[name] for name in together))
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota:
        shape, source, order = (_numbers(part or "") for part in iota.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape)
    found = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}\s]*\})\}", attributes
    )
    if not found:
        return None
    groups = [_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", found[1])]
    return np.array(groups) if groups else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
