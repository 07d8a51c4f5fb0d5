"""The configuration: a flag for each leaf, round trips, and refused values."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.fields import COUNT_OR_WORD, leaves_of
from cocodc_jax.run.config.method_config import ARGUMENTS, MethodConfig
from cocodc_jax.run.config.optimizer_config import (
    OPTIMIZERS,
    OptimizerConfig,
    check_taken,
)
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.run_config import RunConfig
from cocodc_jax.run.config.train_config import LEAVES, SECTIONS, TrainConfig, dumps

SMOKE = PRESETS["smoke"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    config = PRESETS[name]
    assert config.preset == name
    assert TrainConfig.from_json(json.loads(dumps(config.to_json()))) == config


WRITTEN = SMOKE.to_json()
NO_WIDTH = {name: x for name, x in WRITTEN["model"].items() if name != "width"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": WRITTEN["run"] | {"stepz": 3}}, r"section 'run'.*stepz"),
        ({"model": NO_WIDTH}, r"section 'model'.*width"),
        ({"data": None}, "section 'data' is None"),
        ({"more": {}}, "expected"),
    ],
)
def test_from_json_refuses_unknown_keys_and_sections_that_are_missing(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_json(WRITTEN | change)


def test_a_field_that_an_older_file_lacks_takes_its_default():
    value = SMOKE.resolve().to_json()
    del value["run"]["step_seconds"], value["method"]["outer_lr"]
    assert TrainConfig.from_json(value).resolve() == SMOKE.resolve()
    del value["run"]["log_every"]  # A preset's own number is lost with its entry.
    assert TrainConfig.from_json(value).run.log_every == RunConfig().log_every


def test_every_field_is_a_leaf_with_help_but_the_derived_ones():
    fields = {
        field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls)
    }
    assert fields - set(LEAVES) == {"vocab_size", "arguments", "where_taken"}
    assert set(LEAVES) - fields == set(ARGUMENTS)
    assert all(len(leaf.help) > 5 and "\n" not in leaf.help for leaf in LEAVES.values())

    assert LEAVES["sync_interval"].type is int
    assert LEAVES["delay_steps"].type == COUNT_OR_WORD
    assert LEAVES["outer_lr"].type is float
    assert LEAVES["qk_norm"].type is bool
    assert LEAVES["dataset"].type is str


def test_a_field_without_help_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Pace:
        """How fast a run goes."""

        rest_s: float = 0.0

    with pytest.raises(ValueError, match="rest_s of Pace has no help: write an entry"):
        leaves_of("pace", Pace)


def test_replace_finds_the_section_and_seeds_the_data_too():
    config = SMOKE.replace(width=64, outer_lr=0.3, seed=7, method="diloco")
    assert config.model.width == 64
    assert config.method.given["outer_lr"] == 0.3
    assert (config.run.seed, config.data.seed) == (7, 7)

    assert sorted(SMOKE.differences(config).split("; ")) == [
        "method: cocodc, not diloco",
        "outer_lr: None, not 0.3",
        "seed: 0, not 7",
        "width: 32, not 64",
    ]

    with pytest.raises(ValueError, match="'widht' is not a field"):
        SMOKE.replace(widht=3)


WRONG = {
    RunConfig: [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"regions": 3, "eval_batches": 8}, "multiple of regions=3"),
        ({"log_every": 0}, "log_every=0"),
        ({"eval_every": -1}, "eval_every=-1"),
        ({"stage_subspace": -1}, "stage_subspace=-1 must be at least 0"),
        ({"stage_compress": "int8"}, "stage_compress='int8' .* stages=1"),
        ({"stages": 2, "stage_compress": "zip"}, "stage_compress='zip': "),
        ({"local_regions": "batched", "step_seconds": 1.0},
         "step_seconds=1.0 has regions sleep one after another"),
        ({"step_seconds": -0.1}, "step_seconds=-0.1 must be at least 0"),
        ({"step_seconds": math.nan}, "step_seconds=nan must be"),
        ({"step_seconds": 1.0, "data_axis": 2}, "one device per region"),
        ({"step_times": "1,2"}, "step_times='1,2' must be 4 numbers"),
        ({"step_times": "1,1,2,x"}, "step_times='1,1,2,x' must be 4"),
        ({"step_times": "2,2,2,2"}, "1 for the fastest"),
        ({"step_times": "inf,1,1,1"}, "at least 1 and finite for every"),
        ({"sequence_axis": 2, "stages": 2}, "sequence_axis=2 is not for pip"),
        ({"model_axis": 10**12}, "more than 1048576 devices; lower one"),
        ({"batch_sizes": "1,1,1,0"}, "batch_sizes=.* must be at least 1"),
        ({"accumulate_steps": 2, "microbatches": 4},
         "accumulate_steps=2 is not for pipelines, .* microbatches=4; use more"),
    ],
    OptimizerConfig: [
        ({"inner_lr": math.nan}, "inner_lr=nan must be a fin"),
        ({"inner_lr": 0.0}, "inner_lr=0.0 must be positive"),
        ({"grad_clip": math.inf}, "grad_clip=inf must be"),
        ({"sign_lr_fraction": 0}, "sign_lr_fraction=0 must be po"),
        ({"beta2": 1.0}, r"beta2=1.0 must be in \[0, 1\)"),
        ({"final_lr_fraction": 2.0}, "final_lr_fraction=2.0"),
    ],
    MethodConfig: [
        ({"arguments": {"outer_lr": -1.0}}, "outer_lr=-1.0 must be positive"),
    ],
    SMOKE.replace: [
        ({"sequence_axis": 3}, "sequence_length=32 must be a multiple of sequence_ax"),
        ({"data_axis": 3}, "batch_per_region=4 must be a multiple of data_axis=3"),
        ({"num_layers": 999999999999},
         "num_layers=999999999999 is not a size; use 1 to 10000"),
        ({"width": 2**63}, "width=9223372036854775808 is not a size; use 1 to"),
        ({"rope_theta": math.inf}, "rope_theta=inf must be"),
        ({"rope_theta": math.nan}, "rope_theta=nan must be"),
        ({"batch_sizes": "4,4,4,3"}, "divisors of batch_per_region"),
        ({"warmup_steps": 48}, "warmup_steps=48 must be less"),
        ({"init_from": "x", "stage_subspace": 4}, "init_from='x' is no model whose"),
        ({"lora_rank": 4}, "lora_rank=4 adapts a model that is there al"),
        ({"data_axis": 2, "accumulate_steps": 4},
         r"accumulate_steps=4 does not divide the 2 sequences of a .*\[1, 2\]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [(make, *case) for make, cases in WRONG.items() for case in cases],
)
def test_invalid_fields_are_refused(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_a_method_that_steps_by_signs_has_no_moments_and_a_smaller_step():
    """0.1 * 0.2 times -(sign + 0.5 * parameter) at the peak, without clipping."""
    config = OptimizerConfig(
        inner_lr=0.1, sign_lr_fraction=0.2, weight_decay=0.5, warmup_steps=0
    )
    optimizer = config.build(10, cc.methods.get("demo"))
    params = jnp.array([2.0, -2.0])
    step, _ = optimizer.update(jnp.array([1.0, 1.0]), optimizer.init(params), params)
    np.testing.assert_allclose(step, [-0.04, 0.0], atol=1e-7)


def test_muloco_trains_with_muon_and_any_method_does_on_demand():
    params = {"blocks": {"w": jnp.ones((2, 3, 4))}, "head": jnp.ones((4, 2))}

    def step(config, method):
        optimizer = config.build(10, cc.methods.get(method))
        grads = jax.tree.map(lambda x: 2.0**-7 * x, params)
        return optimizer.update(grads, optimizer.init(params), params)[0]["blocks"]["w"]

    plain = OptimizerConfig(warmup_steps=0)
    muon = dataclasses.replace(plain, inner_optimizer="muon")
    np.testing.assert_array_equal(step(plain, "muloco"), step(muon, "diloco"))
    # A matrix of rank one becomes its singular vectors: far from AdamW's equal steps.
    assert not np.allclose(step(plain, "diloco"), step(muon, "diloco"), rtol=0.1)


def test_the_second_moments_decay_is_the_optimizers_own():
    muloco = cc.methods.get("muloco")
    diloco = cc.methods.get("diloco")
    plain = OptimizerConfig()
    assert plain.second_moment_decay(diloco) == plain.second_moment_decay() == 0.999
    assert plain.second_moment_decay(muloco) == 0.99

    muon = OptimizerConfig(inner_optimizer="muon")
    assert muon.second_moment_decay(diloco) == 0.99
    assert OptimizerConfig(beta2=0.9).second_moment_decay(muloco) == 0.9

    # A run is known by the number, not by its absence.
    warmed_up = dataclasses.replace(plain, warmup_steps=5)
    unset = dataclasses.replace(SMOKE, optimizer=warmed_up).replace(method="muloco")
    assert unset.resolve().optimizer.beta2 == 0.99


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta1", 0.5),
        ("beta2", 0.5),
        ("slow_beta", 0.5),
        ("slow_weight", 0.1),
        ("fast_weight", 0.5),
        ("grad_clip", 0.01),
    ],
)
def test_an_argument_is_refused_if_and_only_if_it_changes_nothing(
    optimizer, name, value
):
    params = {"blocks": {"w": jnp.eye(3)}, "bias": jnp.ones(3)}

    def trained(**arguments):
        config = OptimizerConfig(
            inner_optimizer=optimizer, inner_lr=0.1, warmup_steps=0, **arguments
        )

        built = config.build(10)
        now = params
        state = built.init(now)

        for scale in (1.0, 3.0, -2.0):
            grads = optax.tree.scale(scale, jax.tree.map(lambda x: x + 1, now))
            steps, state = built.update(grads, state, now)
            now = optax.apply_updates(now, steps)
        return now

    one = trained()
    other = trained(**{name: value})
    if all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other))):
        with pytest.raises(ValueError, match=f"{name}={value} has no meaning for"):
            check_taken({name: value}, [optimizer], steps_by_sign=False)
    else:
        check_taken({name: value}, [optimizer], steps_by_sign=False)


def test_a_rate_of_signs_is_refused_where_none_steps_by_one():
    check_taken({"sign_lr_fraction": 0.2}, ["adamw"], steps_by_sign=True)
    with pytest.raises(ValueError, match="sign_lr_fraction=0.2 has no meaning for met"):
        check_taken({"sign_lr_fraction": 0.2}, ["adamw"], steps_by_sign=False)


def test_inner_optimizer_is_clipped_adamw_with_warmup_and_cosine():
    config = OptimizerConfig(
        inner_lr=0.1, warmup_steps=2, final_lr_fraction=0.1, grad_clip=1.0
    )
    rate = config.learning_rate(10)
    expected = [0.0, 0.05, 0.1]
    expected += [0.01 + 0.09 * (1 + np.cos(np.pi * k / 8)) / 2 for k in range(1, 9)]
    np.testing.assert_allclose([rate(i) for i in range(11)], expected, rtol=1e-5)

    # A gradient of norm 10 is clipped to 1, so Adam's first moment sees that.
    optimizer = config.build(10)
    state = optimizer.init(jnp.zeros(4))
    _, state = optimizer.update(jnp.full(4, 5.0), state, jnp.zeros(4))
    first_moment = next(x for x in jax.tree.leaves(state) if x.shape == (4,))
    np.testing.assert_allclose(first_moment, 0.1 * np.full(4, 0.5), rtol=1e-5)
