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

from cocodc_jax.aot import collectives as read
from cocodc_jax.aot import hlo
from cocodc_jax.exchange import between_hosts as combining
from cocodc_jax.exchange import collectives, flat_buffer
from cocodc_jax.sharding.mesh import INSIDE, REGION, make_mesh
from cocodc_jax.sharding.outer_mesh import PROCESS
from cocodc_jax.sharding.region_map import (
    LocalRegions,
    for_all_regions,
    region_shard_map,
)
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression

RNG, KEY = np.random.default_rng(3), jax.random.key(0)


def combined(shards, members, compressor, kind):
    """Means of regions of several processes, played by devices of one.

    21 numbers a region, which two members cannot share evenly.

    Returns:
      The mean that each member has, what it must be, the size of a message in its
      elements, and the collectives: kind, dtype, sizes and axes.
    """
    devices = np.array(jax.devices()[: shards * members])
    grid = devices.reshape(shards, 1, members, 1, 1, 1)
    mesh = Mesh(grid, (PROCESS, *INSIDE), axis_types=(AxisType.Auto,) * 6)
    messages = {
        "w": RNG.normal(size=(shards, 5, 3)).astype(np.float32),
        "b": RNG.normal(size=(shards, 6)).astype(np.float32),
    }
    decode = lambda x: x  # noqa: E731
    if compressor is not None:
        encode = lambda d: compressor.encode(d, compressor.init(d), KEY)[0]  # noqa: E731
        messages, decode = jax.vmap(encode)(messages), jax.vmap(compressor.decode)
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
    found = read.collectives(hlo.parse(program.as_text()), dict(mesh.shape))
    seen = [(x.kind, x.array.dtype, x.array.dims, x.axes) for x in found]
    return mean, expected, size, sorted(seen, key=lambda x: x[-1] != (PROCESS,))


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


@pytest.mark.parametrize("kind", collectives.ALL_REDUCES)
@pytest.mark.parametrize("compress", [None, "int8"])
@pytest.mark.parametrize(("shards", "members"), [(4, 1), (3, 2)])
def test_shares_cross_between_regions_and_are_joined_inside(
    shards, members, compress, kind
):
    """Compressed messages as they are; directly nothing is reduced on its way."""
    compressor = compress and compression.parse(compress)
    mean, expected, size, found = combined(shards, members, compressor, kind)
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
        assert found == [(*across, (PROCESS,)), *gathered]
        return
    crossed = [x for x in found if x[0] == "all-to-all"]
    assert crossed
    assert not [x for x in found if x[0] == "all-reduce"]
    if compress:
        ((_, dtype, sizes, axes),) = crossed
        assert (dtype, sizes[-1], axes) == ("u8", share, (PROCESS,))


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
