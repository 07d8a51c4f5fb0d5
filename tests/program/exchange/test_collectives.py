"""Sums over shards, direct and by the backend's ring; packed means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.exchange import between_hosts as combining
from cocodc_jax.exchange import collectives, flat_buffer
from cocodc_jax.sharding.local_regions import LocalRegions, for_all_regions
from cocodc_jax.sharding.mesh import INSIDE, REGION, make_mesh
from cocodc_jax.sharding.outer_mesh import PROCESS
from cocodc_jax.sharding.region_map import region_shard_map
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression
from tests.numerics import assert_within_ulps

RNG = np.random.default_rng(3)


def processes_mesh(shards, members=1):
    devices = np.array(jax.devices()[: shards * members])
    devices = devices.reshape(shards, 1, members, 1, 1, 1)
    return Mesh(devices, (PROCESS, *INSIDE), axis_types=(AxisType.Auto,) * 6)


def either_way(compressor, everywhere, shapes, rows, weights):
    """The mean and the compiled program's text, direct and by the backend's ring."""
    means, found = {}, {}
    for kind in collectives.ALL_REDUCES:
        mean_of = Compressed(compressor).combine if compressor else None
        combine = combining.make_combine(mean_of, everywhere, shapes, all_reduce=kind)
        program = jax.jit(combine, out_shardings=everywhere)
        found[kind] = program.lower(rows, weights).compile().as_text()
        means[kind] = program(rows, weights)[0]
    return means, found


@functools.cache
def direct(num):
    mesh = Mesh(jax.devices()[:num], ("i",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            lambda x: collectives.direct_sum(x[0], "i", num)[None],
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
        )
    )


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 9))
def test_every_shard_has_the_same_sum_to_the_last_bit(num, size):
    x = RNG.normal(size=(num, size)).astype(np.float32)
    sums = np.asarray(direct(num)(x))
    np.testing.assert_allclose(sums[0], x.sum(0), rtol=1e-5, atol=1e-6)
    assert (sums == sums[0]).all()


@pytest.mark.parametrize(("shards", "members"), [(4, 1), (3, 2)])
def test_direct_and_ring_are_one_sum(shards, members):
    mesh = processes_mesh(shards, members)
    everywhere = NamedSharding(mesh, P())
    part = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(4)}
    rows = RNG.normal(size=(shards, 10)).astype(np.float32)
    rows = jax.device_put(rows, NamedSharding(mesh, P(PROCESS, INSIDE)))
    weights = jax.device_put(RNG.uniform(size=shards).astype("f4"), everywhere)
    means, found = either_way(None, everywhere, part, rows, weights)
    for name, x in means["ring"].items():
        np.testing.assert_allclose(means["direct"][name], x, rtol=1e-5, atol=1e-6)
    assert "all-reduce(" in found["ring"]
    assert "all-to-all(" not in found["ring"]
    assert "all-to-all(" in found["direct"]
    assert "all-reduce(" not in found["direct"]


@pytest.mark.parametrize(("shards", "members"), [(4, 1), (3, 2)])
def test_compressed_messages_cross_directly_as_they_are(shards, members):
    """What is sent to all is the packed bytes, and what comes of them the same mean."""
    mesh = processes_mesh(shards, members)
    everywhere = NamedSharding(mesh, P())
    compressor = compression.parse("int8")
    deltas = {"w": RNG.normal(size=(shards, 4, 3)).astype(np.float32)}
    key = jax.random.key(0)
    messages = jax.vmap(lambda d: compressor.encode(d, compressor.init(d), key)[0])(
        deltas
    )
    shapes = jax.eval_shape(lambda m: jax.tree.map(lambda x: x[0], m), messages)
    rows = flat_buffer.pack(messages)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % members)))
    width = rows.shape[1] // members
    rows = jax.device_put(rows, NamedSharding(mesh, P(PROCESS, INSIDE)))
    weights = jax.device_put(RNG.uniform(size=shards).astype("f4"), everywhere)
    means, found = either_way(compressor, everywhere, shapes, rows, weights)
    assert_within_ulps(means["direct"], means["ring"])
    crossed = [line for line in found["direct"].splitlines() if "all-to-all(" in line]
    assert len(crossed) == 1
    assert f"u8[1,1,{width}]" in crossed[0]
    assert "all-to-all(" not in found["ring"]


@pytest.mark.parametrize("kind", ["direct", "ring", None])
def test_packed_means_are_the_means(kind):
    """Two regions a shard, dtypes mixed: what one device's mean says."""
    mesh = make_mesh(8, devices=jax.devices()[:4])
    block = LocalRegions.of(mesh, 8)
    tree = {
        "w": RNG.normal(size=(8, 3, 2)).astype(np.float32),
        "b": jnp.asarray(RNG.normal(size=(8, 5)), jnp.bfloat16),
    }
    mapped = region_shard_map(
        lambda x: for_all_regions(collectives.mean_for_all(x, kind), block.size),
        mesh,
        in_specs=P(REGION),
        out_specs=P(REGION),
    )
    out = jax.jit(mapped)(tree)
    for name, x in tree.items():
        assert out[name].dtype == x.dtype
        expected = np.asarray(x, np.float64).mean(0)
        tolerance = 1e-6 if name == "w" else 1e-2
        np.testing.assert_allclose(
            np.asarray(out[name], np.float64),
            np.broadcast_to(expected, x.shape),
            rtol=tolerance,
            atol=tolerance,
        )


def test_packed_messages_of_all_are_the_messages():
    mesh = make_mesh(4, devices=jax.devices()[:4])
    tree = {"q": np.arange(12, dtype=np.int8).reshape(4, 3), "s": np.ones((4, 2), "f4")}
    for kind in (None, *collectives.ALL_REDUCES):
        mapped = region_shard_map(
            lambda x, kind=kind: collectives.gather_all(x, kind),
            mesh,
            in_specs=P(REGION),
            out_specs=P(REGION),
        )
        out = jax.jit(mapped)(tree)
        for name, x in tree.items():
            np.testing.assert_array_equal(
                out[name], np.tile(x, (4, *[1] * (x.ndim - 1)))
            )
