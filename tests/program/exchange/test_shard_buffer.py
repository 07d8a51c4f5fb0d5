"""Messages in one flat buffer; of several devices, which leave shard by shard."""

import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.engine import between_hosts as outer_mesh
from cocodc_jax.engine import flat_buffer, placement, transfer
from cocodc_jax.engine.flat_buffer import ShardBuffer
from cocodc_jax.engine.mesh import (
    INSIDE,
    PROCESS,
    make_mesh,
    outer_device,
    process_grid,
)
from cocodc_jax.engine.transport import Transport
from cocodc_jax.train.run_steps import run_steps as run
from tests.numerics import assert_within_ulps
from tests.program import tiny

RNG = np.random.default_rng(4)
SPECS = {
    "both": P("model", "data"),
    "one": P(("data", "model")),
    "free": P(None, "model"),
    "odd": P("data"),  # 3 rows, which two devices cannot share.
    "scalar": P(),
}
SHAPES = {"both": (4, 6, 2), "one": (8,), "free": (3, 2), "odd": (3, 5), "scalar": ()}


def tree_of(dtypes):
    return {
        name: (100 * RNG.normal(size=(2, *shape))).astype(dtypes.get(name, "f4"))
        for name, shape in SHAPES.items()
    }


# --- One flat buffer ---


KINDS = {
    "one": {"a": RNG.normal(size=(3, 2, 5)).astype("f"), "b": np.ones((3, 4), "f")},
    "many": {
        "codes": RNG.integers(0, 255, (3, 7)).astype(np.uint8),
        "scales": RNG.normal(size=(3, 2, 1)).astype(np.float32),
        "half": RNG.normal(size=(3, 5)).astype(jnp.bfloat16),
        "places": RNG.integers(-9, 9, (3, 3)).astype(np.int32),
        "signs": RNG.integers(0, 2, (3, 6)).astype(bool),
        "number": np.arange(3, dtype=np.int8),
    },
}


def shapes_of_one(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_flat_buffer_holds_the_bytes_of_its_arrays_and_gives_them_back(kinds):
    tree = KINDS[kinds]
    packed = jax.jit(flat_buffer.pack)(tree)
    assert packed.shape[0] == 3
    assert packed.nbytes == sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))
    back = jax.jit(lambda b: flat_buffer.unpack(b, shapes_of_one(tree)))(packed)
    assert shapes_of_one(back) == shapes_of_one(tree)
    tiny.assert_same(back, tree)


# --- In shards ---


def outer_of(processes):
    """An outer mesh of two regions, played by devices of one process."""
    grid = np.reshape(jax.devices()[: 2 * math.prod(processes)], (2, *processes))
    return Mesh(grid, (PROCESS, *INSIDE), axis_types=(AxisType.Auto,) * grid.ndim)


@pytest.mark.parametrize("dtypes", [{}, {"one": "i1", "odd": "?", "both": "f2"}])
@pytest.mark.parametrize("processes", [None, (1, 2, 1, 1, 1), (1, 2, 1, 1, 2)])
def test_packing_and_unpacking_a_buffer_restores_the_tree(dtypes, processes):
    mesh = make_mesh(2, data=2, model=2)
    tree = tree_of(dtypes)
    layout = ShardBuffer.of(mesh, shapes_of_one(tree), SPECS)
    lying = {
        name: NamedSharding(mesh, P("region", *(SPECS[name] if name != "odd" else P())))
        for name in tree
    }
    pack = jax.jit(layout.pack, out_shardings=layout.sharding)
    buffer = pack(transfer.put(tree, lying))

    # Equal parts of every device: its shards and padding.
    shard = buffer.addressable_shards[0].data
    assert shard.shape == (1, layout.width)

    width = 4 * 6 * 2 // 4 + 8 // 4 + 3 * 1 // 2 + 1 + -(-15 // 4) + 1
    assert dtypes or layout.width == width

    if processes is None:
        where = SingleDeviceSharding(outer_device(mesh))
        rows = transfer.gather_rows(buffer, where)
        everywhere = where
    else:
        outer = outer_of(processes)
        everywhere = NamedSharding(outer, P())
        where = NamedSharding(outer, P(PROCESS, INSIDE))
        rows = transfer.gather_rows(buffer, where)

    unpacked = jax.jit(lambda rows: layout.unpack(rows, everywhere))(rows)
    assert shapes_of_one(unpacked) == shapes_of_one(tree)
    tiny.assert_same(unpacked, tree)

    if processes == (1, 2, 1, 1, 2):  # As on the region's devices.
        assert unpacked["both"].addressable_shards[0].data.shape == (2, 2, 3, 2)


def grid_of(processes, *sizes):
    """The grid of processes on a mesh of two regions."""
    devices = [types.SimpleNamespace(process_index=p) for p in processes]
    placed = np.array(devices).reshape(2, *sizes)
    return process_grid(types.SimpleNamespace(devices=placed))


def test_a_process_along_two_axes_has_a_block_of_each():
    two_each = [0, 0, 1, 1, 2, 2, 3, 3]
    assert grid_of(two_each, 1, 2, 1, 2) == (1, 2, 1, 1)
    assert grid_of(two_each, 1, 4, 1, 1) == (1, 2, 1, 1)
    assert grid_of(two_each, 2, 1, 1, 2) == (2, 1, 1, 1)
    assert grid_of(range(8), 1, 2, 1, 2) == (1, 2, 1, 2)
    assert grid_of([0] * 4 + [1] * 4, 1, 2, 1, 2) == (1, 1, 1, 1)


def test_processes_without_a_block_have_no_grid():
    """Half a row and half of the next, blocks apart, and unequal blocks."""
    assert grid_of([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], 1, 2, 1, 3) is None
    assert grid_of([0, 1, 0, 1, 2, 3, 2, 3], 1, 2, 1, 2) is None
    assert grid_of([0, 0, 0, 1, 2, 2, 2, 3], 1, 2, 1, 2) is None


def make_program(mesh, num_regions=4, **options):
    options = {"num_fragments": 2, "sync_interval": 4, "delay_steps": 2} | options
    return tiny.program_of(
        methods.get("streaming_diloco", **options),
        mesh,
        regions=num_regions,
        param_specs=tiny.SPECS,
        transport=Transport("outer"),
    )


def ends(program, num_steps=8):
    state = tiny.start(program)
    losses = []
    batches = jax.tree.map(lambda x: x[: program.num_regions], tiny.make_batch(0))
    for new, output in run(program, state, itertools.repeat(batches), num_steps):
        # One program with collectives after the other, on devices of one CPU.
        state = jax.block_until_ready(new)
        losses.append(output.losses)
    return tiny.host((state.region, state.sync.arrays, losses)), state


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"compress": "int8"}, marks=pytest.mark.slow),
        pytest.param({"compress": "bfloat16"}, marks=pytest.mark.slow),
        {"exclude_above": 3.0},
    ],
    ids=["int8", "bfloat16", "judged"],
)
def test_a_message_in_shards_makes_the_run_that_a_whole_one_makes(monkeypatch, options):
    mesh = make_mesh(4, 2, 2, jax.devices()[:8])
    params, state = ends(make_program(mesh, **options))
    monkeypatch.setattr(outer_mesh, "process_grid", lambda mesh: None)
    expected, whole = ends(make_program(mesh, **options))
    assert_within_ulps(params, expected)
    assert state.bytes_sent == whole.bytes_sent


def sizes_in(text):
    """Numbers in each array of a compiled program, which is that of one device."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def test_no_device_of_a_region_holds_a_full_fragment():
    """Two regions of four devices, each of which has a fourth of every matrix."""
    mesh = make_mesh(2, 2, 2, jax.devices()[:8])
    program = make_program(mesh, 2, num_fragments=1)
    batches = jax.tree.map(lambda x: x[None, :2], tiny.make_batch(0))
    size = sum(x.size for x in jax.tree.leaves(tiny.make_params()))

    listed = [x for x in program.list_programs(batches) if "fragment" in x.name]
    assert {x.name.split()[0] for x in listed} == {"send", "merge"}

    for lowered in listed:
        text = lowered.program.lower(*lowered.arguments).compile().as_text()
        assert max(sizes_in(text)) <= size / 4


@pytest.fixture
def four_processes(monkeypatch):
    """Two regions of two processes, whose outer devices are four of this one."""
    outer = outer_of((1, 2, 1, 1, 1))
    where = placement
    monkeypatch.setattr(where, "outer_sharding", lambda *_: NamedSharding(outer, P()))
    rows = NamedSharding(outer, P(PROCESS, INSIDE))
    monkeypatch.setattr(where, "outer_rows", lambda *_: rows)
    monkeypatch.setattr(placement, "process_grid", lambda _: (1, 2, 1, 1, 1))


def test_processes_of_a_region_divide_the_outer_state(request):
    mesh = make_mesh(2, 2, 1, jax.devices()[4:8])
    alone, _ = ends(make_program(mesh, 2))
    request.getfixturevalue("four_processes")
    params, state = ends(make_program(mesh, 2))
    outer = jax.tree.leaves(state.sync.outer)
    num_params = sum(x.size for x in jax.tree.leaves(tiny.make_params()))

    assert sum(x.nbytes for x in outer) == 8 * num_params
    of_process = [x.addressable_shards[0].data.nbytes for x in outer]
    assert sum(of_process) == 4 * num_params
    assert_within_ulps(params, alone)
    for flight in state.sync.in_flight.values():
        for x in jax.tree.leaves(flight.mean):
            assert x.addressable_shards[0].data.size == x.size / 2
