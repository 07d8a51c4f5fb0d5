"""Runs over stages, positions or experts, as their configuration makes them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import models
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.run.build import build_program, check_model, init_params, mesh_of
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.train.run_steps import run_steps as run
from tests.numerics import assert_all_close

STEPS = 3
BATCH = 4
LENGTH = 8
REGIONS = PRESETS["smoke"].replace(
    method="diloco",
    sync_interval=STEPS,
    steps=100,
    warmup_steps=1,
    eval_batches=2,
    regions=2,
)
CONFIG = REGIONS.replace(
    stages=2,
    microbatches=2,
    scan_layers=True,
    stage_subspace=4,
)
SUBSPACE = models.Subspace(CONFIG.model.width, 4)


def test_regions_report_stage_bytes_and_stay_in_their_subspace():
    program = build_program(CONFIG, CONFIG.model, make_mesh(2, stage=2))
    params = init_params(CONFIG.run, CONFIG.model, jax.random.key(3))
    state = program.init(params, jax.random.key(4))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (STEPS, 2, BATCH, LENGTH + 1)).astype(np.int32)
    ((state, output),) = run(program, state, iter(tokens), STEPS)
    whole = models.stage_bytes(CONFIG.model, 2, BATCH, LENGTH, SUBSPACE)

    assert np.all(np.asarray(output.aux["stage_bytes"]) == whole)
    u = SUBSPACE.basis
    for tree in (program.outer_params(state), program.mean_params(state)):
        tree = jax.device_get(tree)
        for kind, name in (("attention", "output"), ("mlp", "down")):
            matrix = tree["blocks"][kind][name]
            np.testing.assert_allclose(matrix @ u @ u.T, matrix, atol=2e-6)
        moved = tree["embedding"] - params["embedding"]
        np.testing.assert_allclose(moved @ u @ u.T, moved, atol=2e-6)
        assert np.abs(moved).max() > 1e-3


def test_a_codec_reaches_the_loss():
    tokens = jax.ShapeDtypeStruct((1, 2, BATCH, LENGTH + 1), np.int32)
    shared_out = []
    for config in (CONFIG, CONFIG.replace(stage_compress="int8")):
        program = build_program(config, config.model, make_mesh(2, stage=2))
        steps = program._steps.trace(program.abstract().region, tokens, None, None, ())
        jaxpr = str(steps.jaxpr)
        assert "ppermute" in jaxpr
        shared_out.append("all_to_all" in jaxpr)

    # Messages without a codec are not sharded.
    assert shared_out == [True, False]


# --- Devices that share the positions of sequences ---

SHARED = REGIONS.replace(num_layers=1, sequence_length=LENGTH)


def make(config):
    num_devices = config.run.regions * config.run.devices_per_region
    mesh = mesh_of(config.run, jax.devices()[:num_devices])
    return build_program(config, config.model, mesh)


def trained(num_steps=STEPS, **axes):
    config = SHARED.replace(**axes)
    program = make(config)
    params = init_params(config.run, config.model, jax.random.key(3))
    state = program.init(params, jax.random.key(4))

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (num_steps, 2, BATCH, LENGTH + 1)).astype(np.int32)

    losses = []
    num_tokens = []
    for new, output in run(program, state, iter(tokens), num_steps):
        state = new
        losses += np.asarray(output.losses).tolist()
        num_tokens += np.asarray(output.aux["num_tokens"]).tolist()

    return state, losses, num_tokens


def test_devices_that_share_positions_train_as_one_does():
    state, losses, num_tokens = trained(data_axis=2, sequence_axis=2)
    _, expected, alone = trained()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(num_tokens, alone)
    # Weights are sharded over both axes, as if these were one.
    gate = state.region.params["blocks"][0]["mlp"]["gate"].sharding
    assert gate.spec == P("region", ("data", "sequence"), "model")


# Three dense fragments, and of the experts 0, 1, and 2 and 3.
MOE = {
    "num_experts": 4,
    "expert_width": 16,
    "scan_layers": True,
    "method": "streaming_diloco",
    "fragment_strategy": "experts",
    "num_fragments": 6,
    "delay_steps": 0,
    "sync_interval": 6,
    "expert_weights": "tokens",
}


@pytest.mark.parametrize(
    ("num_fragments", "of_gate"),
    [
        (6, P(None, None, ("data", "expert"), "model")),
        (2, P(None, "expert", "data", "model")),
    ],
)
def test_experts_of_a_range_are_sharded_over_their_width(num_fragments, of_gate):
    """A fragment of all experts is sharded over experts, as the parameters are."""
    config = SHARED.replace(data_axis=2, expert_axis=2, **MOE)
    program = make(config.replace(num_fragments=num_fragments))
    for shardings in program.shardings.fragments[num_fragments // 2 :]:
        assert shardings["blocks/moe/experts/gate"].spec == of_gate


# Losses and gradients: `test_experts.py`. Runs, by commands: `test_changed_runs.py`.
@pytest.mark.slow
def test_devices_that_share_experts_train_as_one_does():
    state, losses, num_tokens = trained(6, data_axis=2, expert_axis=2, **MOE)
    one, expected, alone = trained(6, **MOE)
    assert state.sync.schedule == one.sync.schedule
    assert_all_close(state.region.params, one.region.params, atol=2e-4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(num_tokens, alone)

    block = state.region.params["blocks"]
    gate = block["moe"]["experts"]["gate"].sharding
    assert gate.spec == P("region", None, "expert", "data", "model")

    query = block["attention"]["query"].sharding
    assert query.spec == P("region", None, ("data", "expert"), "model")


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"expert_axis": 2}, "expert_axis=2 has no meaning for a model without exp"),
        (
            {"expert_axis": 4, "num_experts": 6, "expert_width": 8},
            "num_experts=6 is not a multiple of the mesh's expert_axis=4; use num_",
        ),
        (
            {"expert_axis": 3, "batch_per_region": 4},
            r"data_axis=1 \* expert_axis=3, whi",
        ),
        ({"expert_axis": 2, "stages": 2}, "expert_axis=2 is not for pipelines"),
        (
            {"batch_per_region": 32, "data_axis": 32, "sequence_axis": 2},
            r"width=32 .* data_axis \* sequence_axis=64; use width=64",
        ),
    ],
)
def test_models_that_devices_cannot_share_are_refused(leaves, message):
    def configure():
        config = SHARED.replace(**leaves)
        check_model(config, config.model)

    with pytest.raises(ValueError, match=message):
        configure()
