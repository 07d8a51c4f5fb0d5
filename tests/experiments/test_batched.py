"""Trials of one program: against the same rows trained alone, and one another."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cocodc_jax as cc
from cocodc_jax.expert_leaves import TOKEN_UNIT
from cocodc_jax.run.config.presets import PRESETS
from experiments import sweep, trials
from experiments.sweeps import batched, rows
from experiments.sweeps.grid import Setting
from experiments.sweeps.runs import Row
from tests.program.tiny import follow
from tests.slow import mostly_slow

REGIONS = 2
STEPS = 9
SMOKE = PRESETS["smoke"].replace(
    regions=REGIONS, steps=STEPS, warmup_steps=2, eval_batches=2
)
WHERE = {"sync_interval": 4, "num_fragments": 2, "delay_steps": 2}


def init_params(trial):
    rng = np.random.default_rng(trial)
    draw = lambda *shape: rng.normal(0, 0.4, shape).astype(np.float32)  # noqa: E731
    return {"embed": draw(3, 6), "blocks": {"w": draw(2, 6, 6)}, "head": draw(6, 2)}


def loss_fn(params, batch, key):
    x = jnp.tanh(batch["x"] @ params["embed"])
    for i in range(2):
        x = x + jnp.tanh(x @ params["blocks"]["w"][i])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2), {}


def config(method, **leaves):
    base = SMOKE.where(**WHERE).replace(method=method)
    return base.replace(**leaves).resolve()


def stream(seed):
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(REGIONS, 5, 3)).astype(np.float32)
        yield {"x": x, "y": np.sin(2 * x[..., :2])}


def make_trials(run_config, in_turn=True, numbers=None):
    if numbers is not None:  # Not inputs of the program, but of its configuration.
        fixed = batched._make(run_config.replace(**numbers), run_config.model, {})
        return trials.Trials(loss_fn, lambda _: fixed, {}, REGIONS, in_turn)

    make = functools.partial(batched._make, run_config, run_config.model)
    example = batched.numbers_of(run_config)
    return trials.Trials(loss_fn, make, example, REGIONS, in_turn)


def outcome_of(program, seeds, numbers, **others):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(init_params, seeds))
    names = numbers[0] if numbers else ()
    return trials.train(
        program,
        stacked,
        {name: [trial[name] for trial in numbers] for name in names},
        [stream(seed) for seed in seeds],
        range(len(seeds)),
        STEPS,
        next(stream(9)),
        4,
        **others,
    )


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
OTHER = {"inner_lr": 9e-3, "outer_lr": 0.2, "outer_momentum": 0.5, "mixing_alpha": 0.2}


SEEDS = (3, 4)


def numbers_of_trials(run_config):
    """Those of the configuration, and others."""
    base = batched.numbers_of(run_config)
    other = base | {name: x for name, x in OTHER.items() if name in base}
    return base, other


@functools.cache
def trained_alone(method):
    """The trials one by one, their numbers those of the configuration."""
    run_config = config(method)
    return [
        outcome_of(make_trials(run_config, True, numbers), [seed], [])
        for seed, numbers in zip(SEEDS, numbers_of_trials(run_config), strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "in_turn"),
    [("cocodc", True), ("cocodc", False), ("data_parallel", False)],
)
def test_a_trial_is_a_run_with_its_numbers(method, in_turn):
    """Beside a trial of other numbers; 9 float32 steps, two programs."""
    run_config = config(method)
    numbers = numbers_of_trials(run_config)
    together = outcome_of(make_trials(run_config, in_turn), SEEDS, numbers)
    assert together.steps == [4, 8, 9]

    for trial, alone in enumerate(trained_alone(method)):
        close(together.losses[trial], alone.losses[0])
        for mine, single in zip(together.evaluations, alone.evaluations, strict=True):
            for x, y in zip(mine, single, strict=True):
                close(x[trial], y[0])

        jax.tree.map(
            lambda x, y, t=trial: close(x[t], y[0]), together.params, alone.params
        )
        close(together.ratios[trial], alone.ratios[0])
        assert together.merges[trial] == alone.merges[0]
        assert together.bytes_sent[-1][trial] == alone.bytes_sent[-1][0]
        assert together.fragment_bytes(trial) == alone.fragment_bytes(0)

    losses = together.evaluations[-1].loss
    assert abs(losses[0] - losses[1]) > 1e-3
    assert (together.merges > 0).all() or method == "data_parallel"


@pytest.mark.parametrize(
    ("method", "delay_steps"), [("cocodc", 2), ("streaming_diloco", 4)]
)
def test_a_trial_is_a_run_of_the_region_program(method, delay_steps):
    """With a delay of H a fragment is in flight at all times, across every cycle."""
    run_config = config(method, compress="ef+int4", delay_steps=delay_steps)
    if method == "streaming_diloco":
        run_config = run_config.replace(merge_feedback=True).resolve()
    numbers = batched.numbers_of(run_config)
    outcome = outcome_of(make_trials(run_config, True), [3], [numbers])
    inner, built, user_inputs = batched._make(run_config, run_config.model, numbers)
    program = cc.RegionProgram(
        loss_fn,
        inner,
        built,
        init_params(3),
        REGIONS,
        mesh=cc.make_mesh(REGIONS, devices=jax.devices()[:1]),
        user_inputs=user_inputs,
    )
    state = program.init(init_params(3), jax.random.key(0))
    state, outputs = follow(program, state, stream(3), STEPS)
    syncs = [sync for output in outputs for sync in output.syncs]
    none = jnp.zeros(REGIONS)
    ratios = [sync.metrics.get("correction_ratio", none) for sync in syncs]
    jax.tree.map(lambda a, b: close(a[0], b), outcome.params, state.region.params)

    close(outcome.ratios[0] / len(syncs), np.mean(ratios))
    assert outcome.merges[0] == len(syncs) > 1
    assert outcome.bytes_sent[-1][0] == state.bytes_sent


ALONE = ("dilocox", "delayed_nesterov", "mla", "heloco")
QUICK = (*ALONE, "eager", "des_loc", "noloco", "dct_threshold")  # A kind each.


@pytest.mark.parametrize(
    "name",
    [*mostly_slow(cc.methods.METHODS, quick=QUICK), "cocodc+secant"],
)
def test_numbers_of_every_method_are_inputs_unless_it_trains_alone(name):
    """Traced only: what needs a number's value, or an axis of trials, would fail."""
    name, _, curvature = name.partition("+")
    more = {"curvature": curvature} if curvature else {}
    run_config = config(
        name, regions=cc.methods.get(name).num_regions or REGIONS, **more
    )
    why = batched.why_alone(run_config)

    assert (why is not None) == (name in ALONE)

    if why is not None:
        assert f"method={name!r} cannot be used with synchronized" in why
        return

    program = make_trials(run_config, False)
    regions = run_config.run.regions
    program = dataclasses.replace(program, num_regions=regions)
    numbers = batched.numbers_of(run_config)
    assert {"inner_lr", "weight_decay", "beta1", "beta2"} <= numbers.keys()

    arrays = {n: jnp.full(2, x, float) for n, x in numbers.items()}
    stacked = jax.tree.map(lambda *x: jnp.stack(x), init_params(0), init_params(1))
    state = jax.eval_shape(program.init, stacked, arrays)
    x = np.zeros((1, 2, regions, 5, 3), np.float32)
    data = {"x": x, "y": x[..., :2]}
    after, losses = jax.eval_shape(program.advance, state, arrays, data, jnp.arange(2))
    kinds = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))

    assert kinds(after) == kinds(state)
    assert losses.shape == (2, 1, regions)

    held_out = {name: values[0, 0] for name, values in data.items()}
    assert jax.eval_shape(program.evaluate, after, held_out).loss.shape == (2,)


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ({"step_times": "1,2"}, "step_times=1,2"),
        ({"exchange": "elastic"}, "exchange='elastic'"),
        ({"method": "mla"}, "its regions come one by one"),
        ({"delay_steps": "auto"}, "its events follow times that the host measures"),
        ({"data_axis": 2}, "data_axis=2"),
        ({"expert_axis": 2}, "expert_axis=2"),
        ({"exclude_above": 3.0}, "robust_mean have the host restore regions"),
    ],
)
def test_the_reason_to_train_a_row_alone_is_named(leaves, why):
    run_config = (
        config("cocodc") if "method" not in leaves else config(leaves["method"])
    )
    assert why in batched.why_alone(run_config.replace(**leaves).resolve())


def row(seed, **leaves):
    return Row(Setting(str(leaves), config("cocodc", **leaves), False), seed, "", ())


def test_rows_of_one_program_are_cut_into_even_batches():
    group = [row(seed, outer_lr=lr) for lr in (0.4, 0.7, 1.0) for seed in (0, 1)]
    group.append(row(0, compensation_strength=0.1, outer_momentum=0.0, beta1=0.8))
    others = [row(0, sync_interval=8), row(0, delay_steps="auto")]
    of_groups, alone = batched.batches([*group, *others], 4)
    assert [(len(b.rows), b.size) for b in of_groups] == [(4, 4), (3, 4), (1, 1)]
    assert of_groups[0].rows + of_groups[1].rows == tuple(group)
    assert list(alone) == [others[1].row_id]
    settings = [member.setting for member in (*group, *others)]
    assert batched.first_of_groups(settings) == [settings[i] for i in (0, 7, 8)]


def test_a_trial_with_experts_counts_their_tokens():
    """As a run does: its optimizer adds counts up."""
    run_config = config("streaming_diloco", num_experts=2, expert_width=8)
    inner, _, _ = batched._make(run_config, run_config.model, {})
    params = {"experts": {"tokens": jnp.zeros(2)}}
    shares = {"experts": {"tokens": jnp.array([-0.25, -0.75])}}
    updates, _ = inner.update(shares, inner.init(params), params)
    counted = updates["experts"]["tokens"] / TOKEN_UNIT
    np.testing.assert_array_equal(counted, [0.25, 0.75])


def test_a_trial_that_diverged_leaves_the_others():
    run_config = config("streaming_diloco")
    base = batched.numbers_of(run_config)
    outcome = outcome_of(
        make_trials(run_config), [0, 0], [base, base | {"inner_lr": 1e30}]
    )

    assert np.isfinite(outcome.losses[0]).all()
    assert batched._why_diverged(outcome, 0) is None

    why = batched._why_diverged(outcome, 1)
    assert why.startswith(("loss is nan at step ", "loss is inf at step "))

    late = outcome._replace(losses=np.zeros((2, STEPS, REGIONS)))
    assert "is nan at step " in batched._why_diverged(late, 1)


def test_trials_stop_when_asked():
    run_config = config("streaming_diloco")
    numbers = [batched.numbers_of(run_config)]
    with pytest.raises(trials.StoppedError, match="1 trials at step 4"):
        outcome_of(make_trials(run_config), [0], numbers, should_stop=lambda: True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_trials=-1"], "--batch_trials=-1 must be at least 0"),
        (["--batch_trials=2", "--keep_runs"], "--keep_runs=True keeps folders"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(words, message, refused, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('[base]\npreset = "smoke"\n[groups.a]\nmethod = "diloco"\n')
    words = [f"--grid={path}", f"--workdir={tmp_path / 'out'}", *words]
    assert refused(sweep, *words).startswith(message)


# Of a row, what rounding reaches.
NEAR = ("loss", "loss_outer", "perplexity", "region_drift", "curve", "curve_outer")


def test_rows_equal_those_that_are_trained_alone(call, corpus, tmp_path):
    """The same command both ways; losses to 1e-4, as XLA orders sums otherwise."""
    (dataset, data_dir) = (flag.partition("=")[2] for flag in corpus)
    path = tmp_path / "grid.toml"
    path.write_text(
        f"""
        seeds = [0, 1]
        tuned = ["mixing_alpha"]
        [base]
        preset = "smoke"
        steps = 16
        eval_every = 8
        log_every = 2  # As far apart as events: another length is another program.
        num_layers = 1
        num_fragments = 1
        sync_interval = 8
        dataset = "{dataset}"
        data_dir = "{data_dir}"
        [groups.streaming]
        method = "streaming_diloco"
        mixing_alpha = [0.5, 0.2]
        """
    )
    trained = []

    for number in (0, 3):
        folder = tmp_path / f"out_{number}"
        words = [f"--grid={path}", f"--workdir={folder}", f"--batch_trials={number}"]
        out, _ = call(sweep, *words)
        trained.append({row["row"]: row for row in rows.read(folder)})

    assert "batch 2/2, 2 trials" in out
    assert not (folder / "runs").exists()

    alone, together = trained
    assert alone.keys() == together.keys()

    for key, one in alone.items():
        both = together[key]
        assert one.keys() == both.keys()
        for name in one.keys() - {"seconds", "tokens_per_second"}:
            if name in NEAR:
                np.testing.assert_allclose(both[name], one[name], rtol=1e-4)
            else:
                assert both[name] == one[name], name

    cells = json.loads((folder / "cells.json").read_text())["cells"]
    assert [c["columns"]["tuned"]["seeds"] for c in cells] == [[0, 1]]
