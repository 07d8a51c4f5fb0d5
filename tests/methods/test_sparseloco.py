"""SparseLoCo: the senders that count in a mean, and clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.transforms import compression
from tests.program.tiny import follow


def test_a_region_of_weight_zero_is_no_sender():
    compressor = compression.parse("ef+topk:0.5")
    regions = np.float32([[9, 9, 0, 0], [4, 0, 2, 0], [6, 0, 0, 3]])
    states = jax.vmap(compressor.init)(regions)
    messages, _ = jax.vmap(compressor.encode)(regions, states)
    weights = jnp.array([0, 0.25, 0.75])

    combine = jax.jit(Compressed(compressor, "senders").combine)
    np.testing.assert_allclose(combine(messages, weights), [5.5, 0, 2, 3], rtol=1e-6)

    everyone = Compressed(compressor, "all").combine(messages, weights)
    np.testing.assert_allclose(everyone, [5.5, 0, 0.5, 2.25], rtol=1e-6)


def test_absent_regions_do_not_count_with_either_exchange():
    """The fourth of four sends nothing, keeps its memory, and spreads no NaN."""
    method = methods.get("sparseloco", compress="ef+topk:0.5")
    rounds = dataclasses.replace(staggered(2), participating=(0, 1, 2))
    method = method.with_sync(schedule=rounds)
    params = {"w": jnp.zeros(2)}
    gradients = np.float32([[4, 1], [2, 1], [1, 3], [np.nan, 80]])

    ends = []
    for exchange in ("program", "outer"):
        program = RegionProgram(
            lambda p, g, key: (p["w"] @ g, {}),
            optax.sgd(1.0),
            method,
            params,
            4,
            transport=Transport(exchange),
        )
        state = program.init(params, jax.random.key(0))
        state, _ = follow(program, state, [gradients] * 3, 3)
        ends.append(program.outer_params(state)["w"])
        assert np.asarray(state.sync.compressors[0].residual["w"])[3].tolist() == [0, 0]

    # Two steps each: 8 and 4 at 0, 6 at 1.
    np.testing.assert_allclose(ends[0], [-6, -6], rtol=1e-6)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("exchange", "mean", "options"),
    [
        ("program", "senders", {"clip": True}),
        ("program", "all", {"clip": True}),
        ("outer", "senders", {"clip": True}),
        ("outer", "all", {"robust_mean": "clip"}),
    ],
)
def test_each_tensor_is_clipped_at_the_median_norm(exchange, mean, options):
    """Half of each tensor is sent; one region is long in one of them only."""
    rng = np.random.default_rng(0)
    gradients = {name: rng.normal(size=(3, 8)).astype(np.float32) for name in "ab"}
    gradients["a"][2] *= 50

    method = methods.get(
        "sparseloco",
        sync_interval=1,
        sparse_mean=mean,
        compress="ef+topk:0.5",
        **options,
    )
    params = {name: jnp.zeros(8) for name in "ab"}
    program = RegionProgram(
        lambda p, g, key: (p["a"] @ g["a"] + p["b"] @ g["b"], {}),
        optax.sgd(1.0),
        method,
        params,
        3,
        transport=Transport(exchange),
    )
    state = program.init(params, jax.random.key(0))
    state, _ = follow(program, state, [gradients], 1)

    for name, of_regions in gradients.items():
        smallest = np.argsort(abs(of_regions), axis=1)[:, :4]
        sent = of_regions.copy()
        np.put_along_axis(sent, smallest, np.nan, axis=1)
        norms = np.sqrt(np.nansum(sent**2, axis=1))
        sent *= np.minimum(1, np.median(norms) / norms)[:, None]
        counts = np.maximum((~np.isnan(sent)).sum(0), 1) if mean == "senders" else 3
        np.testing.assert_allclose(
            program.outer_params(state)[name], -np.nansum(sent, 0) / counts, rtol=1e-5
        )
