"""A region of several processes: each sends its share, then the region joins them.

The processes are played by devices of one; what XLA compiled tells who talks to whom.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import collectives
from cocodc_jax.exchange import combine as combining
from cocodc_jax.exchange import flat_buffer
from cocodc_jax.sharding.mesh import INSIDE as AXES
from cocodc_jax.sharding.outer_mesh import PROCESS
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.transforms import compression

NUM_REGIONS, NUM_MEMBERS = 3, 2
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
    grid = devices.reshape(NUM_REGIONS, 1, NUM_MEMBERS, 1, 1)
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


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
    found = collectives(hlo.parse(compiled.as_text()), dict(mesh.shape))
    seen = [(x.kind, x.array.dtype, x.array.dims, x.axes) for x in found]
    return mean, messages, sorted(seen, key=lambda x: x[-1] != (PROCESS,))


def test_shares_are_reduced_across_regions_then_gathered_inside(mesh):
    mean, _, found = combine(mesh, None, DELTAS)
    assert found == [
        ("all-reduce", "f32", (11,), (PROCESS,)),
        ("all-gather", "f32", (22,), ("data",)),
    ]
    for name, delta in DELTAS.items():
        expected = np.tensordot(WEIGHTS.astype(np.float64), delta, axes=1)
        for shard in mean[name].addressable_shards:
            np.testing.assert_allclose(shard.data, expected, rtol=1e-6, atol=1e-7)


def test_shares_of_compressed_messages_cross_as_they_are(mesh):
    compressor = compression.parse("int8")
    mean, messages, found = combine(mesh, compressor, DELTAS)
    # 29 bytes: two arrays of codes, two scales.
    half = -(-flat_buffer.pack(messages).shape[1] // 2)
    assert found == [
        ("all-gather", "u8", (3, half), (PROCESS,)),
        ("all-gather", "u8", (3, 2 * half), ("data",)),
    ]
    decoded = jax.vmap(compressor.decode)(messages)
    for name, each in decoded.items():
        expected = np.tensordot(WEIGHTS.astype(np.float64), each, axes=1)
        np.testing.assert_allclose(mean[name], expected, rtol=1e-6, atol=1e-7)


def test_a_region_of_one_process_gathers_nothing_inside(mesh):
    alone = Mesh(mesh.devices[:, :, :1], mesh.axis_names, axis_types=mesh.axis_types)
    _, _, found = combine(alone, None, DELTAS)
    assert found == [("all-reduce", "f32", (21,), (PROCESS,))]
