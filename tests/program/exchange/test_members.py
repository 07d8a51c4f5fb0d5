"""A region of several processes: each sends its share, then the region joins them.

The processes are played by devices of one; what XLA compiled tells who talks to whom.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.exchange import between_hosts as combining
from cocodc_jax.exchange import flat_buffer
from cocodc_jax.sharding.mesh import INSIDE as AXES
from cocodc_jax.sharding.outer_mesh import PROCESS
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression

NUM_REGIONS, NUM_MEMBERS = 3, 2
ACROSS = [{0, 2, 4}, {1, 3, 5}]
INSIDE = [{0, 1}, {2, 3}, {4, 5}]
WEIGHTS = np.array([0.5, 0.25, 0.25], np.float32)
RNG = np.random.default_rng(0)
# 21 numbers, which two members cannot share evenly.
DELTAS = {
    "w": RNG.normal(size=(NUM_REGIONS, 5, 3)).astype(np.float32),
    "b": RNG.normal(size=(NUM_REGIONS, 6)).astype(np.float32),
}


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[: NUM_REGIONS * NUM_MEMBERS])
    axes = (PROCESS, *AXES)
    grid = devices.reshape(NUM_REGIONS, 1, NUM_MEMBERS, 1, 1, 1)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def groups(line):
    """Who takes part together, from either form in which XLA writes it."""
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        return [
            set(map(int, g.split(","))) for g in re.findall(r"{([\d,]+)}", found[1])
        ]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?), ", line):
        return list(map(set, ordered(found[2]).reshape(numbers(found[1])).tolist()))
    # A mesh by name: its axes, its devices if not in order, and the axes of a group.
    found = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", line
    )
    assert found, line
    names = re.findall(r"'(\w+)'=", found[1])
    sizes = [int(n) for n in re.findall(r"=(\d+)", found[1])]
    ids = ordered(found[2]) if found[2] else np.arange(math.prod(sizes))
    together = [names.index(name) for name in re.findall(r"\w+", found[3])]
    last = range(len(names) - len(together), len(names))
    moved = np.moveaxis(ids.reshape(sizes), together, last)
    size = math.prod(sizes[i] for i in together)
    return list(map(set, moved.reshape(-1, size).tolist()))


def ordered(text):
    """Device ids written as `[3,2]T(1,0)`, perhaps in another order than that."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert found is not None
    shape, turn = found.groups()
    ids = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return (ids.transpose(numbers(turn)) if turn else ids).ravel()


def numbers(text):
    return [int(n) for n in text.split(",")]


def collectives(text):
    """Kind, shape of the result, and groups of each collective, as they are ordered."""
    found = re.findall(
        r" = (\w+\[[\d,]*\])\S* (all-\w+|collective-\w+|reduce-\w+)(?:-start)?\((.*)",
        text,
    )
    return [(kind, shape, sorted(groups(rest), key=min)) for shape, kind, rest in found]


def combine(mesh, compressor, deltas):
    """The mean that every member gets, and the collectives that it took."""
    messages = deltas
    if compressor is not None:
        key = jax.random.key(0)
        messages = jax.vmap(lambda d: compressor.encode(d, compressor.init(d), key)[0])(
            deltas
        )
    shapes = jax.eval_shape(lambda m: jax.tree.map(lambda x: x[0], m), messages)
    rows = flat_buffer.pack(messages)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % mesh.shape["data"])))
    everywhere = NamedSharding(mesh, P())
    rows = jax.device_put(rows, NamedSharding(mesh, P(PROCESS, AXES)))
    weights = jax.device_put(WEIGHTS, everywhere)
    mean_of = Compressed(compressor).combine if compressor else None
    program = jax.jit(
        combining.make_combine(mean_of, everywhere, shapes, all_reduce="ring"),
        out_shardings=everywhere,
    )
    compiled = program.lower(rows, weights).compile()
    mean, _ = compiled(rows, weights)
    return mean, messages, collectives(compiled.as_text())


def test_shares_are_reduced_across_regions_then_gathered_inside(mesh):
    mean, _, found = combine(mesh, None, DELTAS)
    assert found == [
        ("all-reduce", "f32[11]", ACROSS),
        ("all-gather", "f32[22]", INSIDE),
    ]
    for name, delta in DELTAS.items():
        expected = np.tensordot(WEIGHTS.astype(np.float64), delta, axes=1)
        for shard in mean[name].addressable_shards:
            np.testing.assert_allclose(shard.data, expected, rtol=1e-6, atol=1e-7)


def test_shares_of_compressed_messages_cross_as_they_are(mesh):
    compressor = compression.parse("int8")
    mean, messages, found = combine(mesh, compressor, DELTAS)
    num_bytes = flat_buffer.pack(messages).shape[
        1
    ]  # 29: two arrays of codes, two scales.
    assert found == [
        ("all-gather", f"u8[3,{-(-num_bytes // 2)}]", ACROSS),
        ("all-gather", f"u8[3,{-(-num_bytes // 2) * 2}]", INSIDE),
    ]
    decoded = jax.vmap(compressor.decode)(messages)
    for name, each in decoded.items():
        expected = np.tensordot(WEIGHTS.astype(np.float64), each, axes=1)
        np.testing.assert_allclose(mean[name], expected, rtol=1e-6, atol=1e-7)


def test_a_region_of_one_process_gathers_nothing_inside(mesh):
    alone = Mesh(mesh.devices[:, :, :1], mesh.axis_names, axis_types=mesh.axis_types)
    _, _, found = combine(alone, None, DELTAS)
    assert [(kind, shape) for kind, shape, _ in found] == [("all-reduce", "f32[21]")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,2,4},{1,3,5}}, use", ACROSS),
        ("replica_groups=[2,3]<=[3,2]T(1,0), use", ACROSS),
        ("replica_groups=[3,2]<=[6], use", INSIDE),
        ("replica_groups=mesh['a'=3,'b'=2] {'a'}, use", ACROSS),
        ("replica_groups=mesh['a'=3,'b'=2] {'b'}, use", INSIDE),
        ("replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}, u", INSIDE),
    ],
)
def test_groups_are_read_right(text, expected):
    assert sorted(groups(text), key=min) == expected
