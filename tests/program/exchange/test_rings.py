"""Rings: a sum to rounding, the same bits at every shard, and what it costs."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.in_program import make_ring_sum
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import make_mesh
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.summed import ByRings
from tests.numerics import assert_all_close
from tests.program import tiny

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


def by_hand(tree, num_shards, num_rings):
    """Every chunk summed in its ring's order, by a loop over shards and numbers."""
    flat = np.stack(
        [
            np.concatenate([tree[n][p].ravel() for n in SHAPES])
            for p in range(num_shards)
        ]
    )
    chunk = math.ceil(SIZE / (num_rings * num_shards))
    orders = [
        [q * s % num_shards for q in range(num_shards)]
        for s in ByRings(num_rings).strides(num_shards)
    ]
    out = np.zeros(SIZE, np.float32)
    for i in range(SIZE):
        ring, within = divmod(i // chunk, num_shards)
        order = orders[ring][within:] + orders[ring][:within]
        total = flat[order[0], i]
        for shard in order[1:]:
            total = total + flat[shard, i]
        out[i] = total
    return out


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_rings", [1, 2, 3])
def test_each_chunk_is_summed_in_the_order_of_its_ring(num_shards, num_rings):
    tree = make_tree(num_shards)
    out = summed(tree, num_shards, num_rings)
    assert {name: x.shape for name, x in out.items()} == SHAPES
    flat = np.concatenate([np.asarray(out[name]).ravel() for name in SHAPES])
    # Additions alone round alike on every processor.
    np.testing.assert_array_equal(flat, by_hand(tree, num_shards, num_rings))


@pytest.mark.parametrize("num_rings", [1, 2, 4])
def test_every_shard_has_the_same_bits(num_rings):
    """Nothing checks it but this: the program is typed without `check_vma`."""
    for x in jax.tree.leaves(summed(make_tree(5), 5, num_rings)):
        each = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(each) == 5
        for other in each[1:]:
            np.testing.assert_array_equal(other, each[0])


def test_the_order_changes_roundings_alone():
    tree = make_tree(8)
    one, two = (summed(tree, 8, n) for n in (1, 4))
    assert any((np.asarray(one[n]) != np.asarray(two[n])).any() for n in SHAPES)
    for name, x in tree.items():
        exact = x.astype(np.float64).sum(0)
        for out in (one, two):  # Seven roundings of numbers of order 1.
            np.testing.assert_allclose(out[name], exact, rtol=0, atol=3e-6)


def test_a_sum_is_nothing_but_permutations_of_chunks():
    """As many messages and numbers as `num_sent` says, counted in the program."""
    ring_sum = make_ring_sum(make_mesh(5), ByRings(3))
    text = str(jax.make_jaxpr(ring_sum)(make_tree(5)))
    sent = re.findall(r"f32\[(\d+)\]\s*=\s*ppermute", text)
    assert len(sent) == 2 * 3  # In the bodies of two loops of 4 turns.
    assert not re.search(r"psum|all_gather|all_to_all", text)
    assert 4 * sum(map(int, sent)) == ByRings(3).num_sent(SIZE, 5)


# --- The method ---------------------------------------------------------------


def loss_fn(params, target, key):
    gaps = jax.tree.map(lambda p: jnp.sum((p - target) ** 2), params)
    return sum(jax.tree.leaves(gaps)), {}


def train(method, num_regions, num_shards, step_times=None, dtype=np.float32):
    params = jax.tree.map(lambda x: x[0].astype(dtype), make_tree(1))
    regions = step_times and Regions(step_times, (1,) * num_regions)
    mesh = make_mesh(num_regions, devices=jax.devices()[:num_shards])
    program = RegionProgram(
        loss_fn, optax.sgd(0.1), method, params, regions or num_regions, mesh=mesh
    )
    state = program.init(params, jax.random.key(0))
    targets = np.random.default_rng(1).normal(size=(8, num_regions)).astype(dtype)
    for half in np.split(targets, 2):
        state, _ = program.advance(state, half)
    return jax.device_get(program.outer_params(state)), state


# Regions alone, two in a shard, three in a shard, an odd number, one.
@pytest.mark.parametrize(
    ("num_regions", "shards"), [(4, 4), (4, 2), (3, 1), (5, 5), (1, 1)]
)
def test_the_parameters_are_averaged(num_regions, shards):
    """In float64: p <- p - 0.2 (p - target), and every four steps the mean."""
    with jax.enable_x64(True):
        method = methods.get("multi_ring", sync_interval=4)
        outer, state = train(method, num_regions, shards, dtype=np.float64)
    assert (state.bytes_sent == 0) == (num_regions == 1)
    targets = np.random.default_rng(1).normal(size=(8, num_regions))
    for name, x in make_tree(1).items():
        each = [x[0].astype(np.float64)] * num_regions
        for step, row in enumerate(targets):
            each = [p - 0.2 * (p - t) for p, t in zip(each, row, strict=True)]
            if step % 4 == 3:
                each = [np.mean(each, axis=0)] * num_regions
        np.testing.assert_allclose(outer[name], each[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_shards", [4, 2])
def test_rings_are_an_all_reduce_to_rounding(num_shards):
    """Also weighted by tokens, where the regions are of unequal speed."""
    options = {"sync_interval": 4, "outer_lr": 0.7, "region_weights": "tokens"}
    step_times = (1.0, 2.0, 4.0, 1.0)
    (ring, ring_state), (plain, state) = (
        train(methods.get(name, **more, **options), 4, num_shards, step_times)
        for name, more in (
            ("multi_ring", {"num_rings": 3}),
            ("diloco", {"outer_momentum": 0.0}),
        )
    )
    for name in SHAPES:
        np.testing.assert_allclose(ring[name], plain[name], rtol=0, atol=1e-6)
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
