"""Sums over shards, direct, by the backend's ring and by several; packed means."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import collectives as read
from cocodc_jax.aot import hlo
from cocodc_jax.engine import between_hosts as combining
from cocodc_jax.engine import collectives, flat_buffer
from cocodc_jax.engine.crossing import make_ring_sum
from cocodc_jax.engine.mesh import INSIDE, PROCESS, REGION, make_mesh
from cocodc_jax.engine.region_map import (
    LocalRegions,
    for_all_regions,
    region_shard_map,
)
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms import compression
from tests.numerics import assert_all_close
from tests.program import tiny

RNG = np.random.default_rng(3)
KEY = jax.random.key(0)


def combined(shards, members, compressor, kind):
    """Means of regions of several processes, which are devices of one process here.

    21 numbers a region, which two members cannot share evenly.

    Returns:
      The mean that each member has, what it must be, the size of a message in its
      elements, and the collectives: kind, dtype, sizes and axes.
    """
    grid = np.reshape(jax.devices()[: shards * members], (shards, 1, members, 1, 1, 1))
    mesh = Mesh(grid, (PROCESS, *INSIDE), axis_types=(AxisType.Auto,) * 6)
    messages = {
        "w": RNG.normal(size=(shards, 5, 3)).astype(np.float32),
        "b": RNG.normal(size=(shards, 6)).astype(np.float32),
    }
    decode = lambda x: x  # noqa: E731
    if compressor is not None:
        encode = lambda d: compressor.encode(d, compressor.init(d), KEY)[0]  # noqa: E731
        messages = jax.vmap(encode)(messages)
        decode = jax.vmap(compressor.decode)

    weights = RNG.dirichlet(np.ones(shards)).astype(np.float32)
    expected = jax.tree.map(
        lambda x: np.tensordot(weights.astype(float), x, axes=1), decode(messages)
    )
    shapes = jax.eval_shape(lambda m: jax.tree.map(lambda x: x[0], m), messages)

    rows = flat_buffer.pack(messages)
    size = rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, -size % members)))

    everywhere = NamedSharding(mesh, P())
    rows = jax.device_put(rows, NamedSharding(mesh, P(PROCESS, INSIDE)))
    weights = jax.device_put(weights, everywhere)

    mean_of = Compressed(compressor).combine if compressor else None
    combine = combining.make_combine(mean_of, everywhere, shapes, all_reduce=kind)
    program = jax.jit(combine, out_shardings=everywhere).lower(rows, weights).compile()

    mean, _ = program(rows, weights)
    listed = read.collectives(hlo.parse(program.as_text()), dict(mesh.shape))
    seen = [(x.kind, x.array.dtype, x.array.dims, x.axes) for x in listed]
    return mean, expected, size, sorted(seen, key=lambda x: x[-1] != (PROCESS,))


def on_regions(fn, mesh):
    mapped = region_shard_map(fn, mesh, in_specs=P(REGION), out_specs=P(REGION))
    return jax.jit(mapped)


@functools.cache
def direct(num):
    sum_of_shard = lambda x: collectives.direct_sum(x[0], REGION)[None]  # noqa: E731
    return on_regions(sum_of_shard, make_mesh(num))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 9))
def test_every_shard_has_the_same_sum_to_the_last_bit(num, size):
    x = RNG.normal(size=(num, size)).astype(np.float32)
    sums = np.asarray(direct(num)(x))
    np.testing.assert_allclose(sums[0], x.sum(0), rtol=1e-5, atol=1e-6)
    assert (sums == sums[0]).all()


@pytest.mark.parametrize("kind", collectives.ALL_REDUCES)
@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize(("shards", "members"), [(4, 1), (3, 2)])
def test_shares_cross_between_regions_and_are_joined_inside(
    shards, members, compress, kind
):
    """Compressed messages arrive unchanged; a direct exchange reduces nothing."""
    compressor = compress and compression.parse(compress)
    mean, expected, size, kinds = combined(shards, members, compressor, kind)
    for name, x in expected.items():
        for shard in mean[name].addressable_shards:
            np.testing.assert_allclose(shard.data, x, rtol=1e-5, atol=1e-6)

    share = -(-size // members)
    if kind == "ring":
        across, inside = {
            None: (("all-reduce", "f32", (share,)), ("f32", (2 * share,))),
            "int8": (("all-gather", "u8", (shards, share)), ("u8", (3, 2 * share))),
        }[compress]
        gathered = [("all-gather", *inside, ("data",))] if members > 1 else []
        assert kinds == [(*across, (PROCESS,)), *gathered]
        return

    crossed = [x for x in kinds if x[0] == "all-to-all"]
    assert crossed
    assert not [x for x in kinds if x[0] == "all-reduce"]

    if compress:
        ((_, dtype, sizes, axes),) = crossed
        assert (dtype, sizes[-1], axes) == ("u8", share, (PROCESS,))


@pytest.mark.parametrize("kind", ["direct", "ring", None])
def test_packed_means_are_the_means(kind):
    """Two regions a shard and mixed dtypes give the mean of one device."""
    mesh = make_mesh(8, devices=jax.devices()[:4])
    block = LocalRegions.of(mesh, 8)
    tree = {
        "w": RNG.normal(size=(8, 3, 2)).astype(np.float32),
        "b": jnp.asarray(RNG.normal(size=(8, 5)), jnp.bfloat16),
    }

    out = on_regions(
        lambda x: for_all_regions(collectives.mean_for_all(x, kind), block.size), mesh
    )(tree)

    for name, x in tree.items():
        assert out[name].dtype == x.dtype
        expected = np.broadcast_to(np.asarray(x, np.float64).mean(0), x.shape)
        mean = np.asarray(out[name], float)
        tolerance = 1e-6 if name == "w" else 1e-2
        np.testing.assert_allclose(mean, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [None, *collectives.ALL_REDUCES])
def test_packed_messages_of_all_are_the_messages(kind):
    mesh = make_mesh(4, devices=jax.devices()[:4])
    tree = {"q": np.arange(12, dtype=np.int8).reshape(4, 3), "s": np.ones((4, 2), "f4")}

    gather = functools.partial(collectives.gather_all, all_reduce=kind)
    out = on_regions(gather, mesh)(tree)

    for name, x in tree.items():
        np.testing.assert_array_equal(out[name], np.tile(x, (4, 1)))


# --- Rings: the same bits at every shard, and the number of messages ---

SHAPES = {"a": (7,), "b": (3, 5), "c": ()}
SIZE = 23


def make_tree(num_shards, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(num_shards, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def summed(tree, num_shards, num_rings):
    ring_sum = make_ring_sum(make_mesh(num_shards), ByRings(num_rings))
    return jax.jit(ring_sum)(tree)


def flat(tree, *lead):
    return np.concatenate([np.reshape(tree[n], (*lead, -1)) for n in SHAPES], axis=-1)


def by_hand(tree, num_shards, num_rings):
    """Every chunk summed in its ring's order, by a loop over shards and numbers."""
    values = flat(tree, num_shards)
    chunk = math.ceil(SIZE / (num_rings * num_shards))
    orders = [
        [q * s % num_shards for q in range(num_shards)]
        for s in ByRings(num_rings).strides(num_shards)
    ]

    out = np.zeros(SIZE, np.float32)
    for i in range(SIZE):
        ring, within = divmod(i // chunk, num_shards)
        order = orders[ring][within:] + orders[ring][:within]
        for shard in order:  # Adding the first to 0 rounds nothing.
            out[i] += values[shard, i]

    return out


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_rings", [1, 2, 3])
def test_each_chunk_is_summed_in_the_order_of_its_ring(num_shards, num_rings):
    tree = make_tree(num_shards)
    out = summed(tree, num_shards, num_rings)
    assert {name: x.shape for name, x in out.items()} == SHAPES
    # Additions alone are rounded the same on every processor.
    np.testing.assert_array_equal(flat(out), by_hand(tree, num_shards, num_rings))


@pytest.mark.parametrize("num_rings", [1, 2, 4])
def test_every_shard_has_the_same_bits(num_rings):
    """Only this test checks it: the program is traced without `check_vma`."""
    for x in jax.tree.leaves(summed(make_tree(5), 5, num_rings)):
        shards = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(shards) == 5
        for other in shards[1:]:
            np.testing.assert_array_equal(other, shards[0])


def test_a_ring_sum_has_no_collective_but_permutations_of_chunks():
    """The messages and numbers in the program are those of `num_sent`."""
    ring_sum = make_ring_sum(make_mesh(5), ByRings(3))
    text = str(jax.make_jaxpr(ring_sum)(make_tree(5)))
    sent = re.findall(r"f32\[(\d+)\]\s*=\s*ppermute", text)
    assert len(sent) == 2 * 3  # In the bodies of two loops of 4 turns.
    assert not re.search(r"psum|all_gather|all_to_all", text)
    assert 4 * sum(map(int, sent)) == ByRings(3).num_sent(SIZE, 5)


# --- The method of rings ---


def loss_fn(params, target, key):
    gaps = jax.tree.map(lambda p: jnp.sum((p - target) ** 2), params)
    return sum(jax.tree.leaves(gaps)), {}


def train(name, num_shards, **options):
    params = jax.tree.map(lambda x: x[0], make_tree(1))
    method = methods.get(
        name, sync_interval=4, outer_lr=0.7, region_weights="tokens", **options
    )

    regions = Regions((1.0, 2.0, 4.0, 1.0), (1,) * 4)
    mesh = make_mesh(4, devices=jax.devices()[:num_shards])
    program = RegionProgram(loss_fn, optax.sgd(0.1), method, params, regions, mesh=mesh)

    state = program.init(params, jax.random.key(0))
    targets = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    state, _ = tiny.follow(program, state, targets, 8)

    return jax.device_get(program.outer_params(state)), state


@pytest.mark.parametrize("num_shards", [4, 2])
def test_rings_are_an_all_reduce_to_rounding(num_shards):
    """Also weighted by tokens, where the regions are of unequal speed."""
    ring, ring_state = train("multi_ring", num_shards, num_rings=3)
    plain, state = train("diloco", num_shards, outer_momentum=0.0)
    assert_all_close(ring, plain, rtol=0, atol=1e-6)
    # 23 numbers in 12 chunks of 2; each of two syncs sends 6 of 8 twice over.
    assert ring_state.bytes_sent == 2 * 4 * 2 * (3 * 3 * 2)
    assert state.bytes_sent == 2 * 4 * 23


def test_rings_go_around_regions_that_are_divided():
    """Over the data and model axes inside of each region."""
    ends = []
    for name, options in (("multi_ring", {}), ("diloco", {"outer_momentum": 0.0})):
        method = methods.get(name, sync_interval=2, outer_lr=1.0, **options)
        mesh = make_mesh(tiny.NUM_REGIONS, 2, 2, jax.devices()[:8])
        program = tiny.program_of(
            method, mesh, optimizer=optax.sgd(0.05), param_specs=tiny.SPECS
        )

        state, _ = tiny.finish(program, tiny.start(program), 4)
        ends.append(jax.device_get(program.outer_params(state)))

    assert_all_close(*ends, rtol=0, atol=2e-6)
