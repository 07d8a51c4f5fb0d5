"""The ablation's trials against the region program, its statistics, its command."""

import concurrent.futures
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.train.run_steps import run
from cocodc_jax.transforms.second_moment import adam_second_moment
from experiments import trials
from experiments.studies import ablate_compensation
from experiments.studies.ablation import jobs, results, rules
from experiments.studies.ablation.jobs import Settings
from tests.waiting import is_over, wait_until

REGIONS, TRIALS, STEPS = 4, 2, 22
INTERVAL, NUM_FRAGMENTS = 4, 2


def init_params(trial):
    rng = np.random.default_rng(trial)
    draw = lambda *shape: rng.normal(0, 0.4, shape).astype(np.float32)  # noqa: E731
    return {"embed": draw(3, 6), "blocks": {"w": draw(2, 6, 6)}, "head": draw(6, 2)}


def batches():
    """Leaves `[T, E, R, B, ...]`."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(STEPS, TRIALS, REGIONS, 5, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[..., :2])}


def rate(step):
    return 0.03 / (1 + 0.1 * step)


def model(params, batch):
    x = jnp.tanh(batch["x"] @ params["embed"])
    for i in range(2):
        x = x + jnp.tanh(x @ params["blocks"]["w"][i])
    return x @ params["head"]


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def loss_fn(params, batch, key):
    return mean_square(model(params, batch), batch), {}


OUTPUTS = (model, mean_square)
MOMENT = adam_second_moment(0.99)


TABLE = rules.table(20)


def scaled(inner_scale):
    def own_rate(step):
        return inner_scale * rate(step)

    return optax.adamw(own_rate, b2=0.99), UserInputs(own_rate, MOMENT, OUTPUTS)


def make_method(name, delay_steps, outer_lr, strength):
    rule = TABLE[name].make(strength, delay_steps)
    schedule = staggered(INTERVAL, NUM_FRAGMENTS, delay_steps)
    return jobs.with_merge(rule, schedule, outer_lr)


def make_trials(name, delay_steps):
    def make(given):
        inner, user_inputs = scaled(given["inner_scale"])
        numbers = given["outer_lr"], given["strength"]
        return inner, make_method(name, delay_steps, *numbers), user_inputs

    example = {"inner_scale": 1.0, "outer_lr": 0.3, "strength": 0.5}
    return trials.Trials(loss_fn, make, example, REGIONS)


QUICK = [("isotropic", 4), ("mix_feedback", 4)]
CASES = [*QUICK] + [
    pytest.param(name, delay, marks=pytest.mark.slow)  # Each compiles for seconds.
    for name, delay in [*((name, 4) for name in TABLE), ("mix_0.5", 1)]
    if (name, delay) not in QUICK and name not in ("hutchinson", "adam_second_moment")
]


@pytest.mark.parametrize(("name", "delay_steps"), CASES)
def test_trials_are_the_region_program(name, delay_steps):
    """With a delay of H a fragment is in flight at all times, across every cycle."""
    outer_lr, inner_scale, trial = [0.3, 0.6], [1.0, 1.5], 1
    strength = [*TABLE[name].strengths_at(delay_steps)[:2]] or [0.0, 0.0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(init_params, range(TRIALS)))
    data = batches()
    of_steps = [jax.tree.map(lambda x, t=t: x[t], data) for t in range(STEPS)]
    outcome = trials.train(
        make_trials(name, delay_steps), stacked,
        {"inner_scale": inner_scale, "outer_lr": outer_lr, "strength": strength},
        [iter([jax.tree.map(lambda x, e=e: x[e], b) for b in of_steps])
         for e in range(TRIALS)],
        range(TRIALS),
        STEPS,
        jax.tree.map(lambda x: x[:2, 0, 0], data),
    )  # fmt: skip
    inner, user_inputs = scaled(inner_scale[trial])
    program = cc.RegionProgram(
        loss_fn,
        inner,
        make_method(name, delay_steps, outer_lr[trial], strength[trial]),
        init_params(trial),
        REGIONS,
        mesh=cc.make_mesh(REGIONS, devices=jax.devices()[:1]),
        user_inputs=user_inputs,
    )
    state = program.init(init_params(trial), jax.random.key(0))
    stream = (jax.tree.map(lambda x: x[trial], batch) for batch in of_steps)
    ratios, num_syncs = [], 0
    for new, output in run(program, state, stream, STEPS):
        state = new
        num_syncs += len(output.syncs)
        for sync in output.syncs:
            ratios.append(sync.metrics.get("correction_ratio", jnp.zeros(REGIONS)))
    # 22 steps of float32 in another order of summation; Adam divides small numbers.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)  # noqa: E731
    jax.tree.map(lambda a, b: close(a[trial], b), outcome.params, state.region.params)
    close(outcome.ratios[trial] / num_syncs, np.mean(ratios))
    assert outcome.merges[trial] == num_syncs > 4
    assert outcome.bytes_sent[-1][trial] == state.bytes_sent


@pytest.mark.parametrize("name", TABLE)
def test_every_rule_is_a_method_of_trials(name):
    """Traced with its strength as an input; nothing is compiled."""
    found = make_trials(name, 4)
    given = dict.fromkeys(("inner_scale", "outer_lr", "strength"), jnp.ones(TRIALS))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(init_params, range(TRIALS)))
    state = jax.eval_shape(found.init, stacked, given)
    data = jax.tree.map(lambda x: x[:2], batches())
    after, losses = jax.eval_shape(found.advance, state, given, data, jnp.arange(2))
    assert losses.shape == (TRIALS, 2, REGIONS)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_strengths_fall_with_the_delay_where_they_say_so():
    assert TABLE["isotropic"].strengths_at(10) == TABLE["isotropic"].strengths
    one, ten = (TABLE["outer_product"].strengths_at(tau) for tau in (1, 10))
    np.testing.assert_allclose(np.array(one) / 10, ten)


def test_the_choice_is_the_least_mean_and_never_diverged():
    tried = [
        jobs.Trial(seed, 3e-3, lr, strength)
        for lr, strength in [(0.1, 1.0), (0.1, 2.0), (0.4, 1.0)]
        for seed in (8, 9)
    ]
    chosen = jobs.choose(tried, [2.0, 2.4, 1.0, float("nan"), 2.1, 2.2])
    assert (chosen.outer_lr, chosen.strength) == (0.4, 1.0)


def made_up(rule, delay, losses, tuning=()):
    return {
        "rule": rule, "delay_steps": delay, "inner_lr": 3e-3, "outer_lr": 0.4,
        "strength": None, "seconds": 1.0, "steps": [0, 10, 20],
        "losses": {str(seed): curve for seed, curve in enumerate(losses)},
        "correction_ratio": [0.5, 0.7], "bytes_sent_per_region": 100,
        "tuning": list(tuning),
    }  # fmt: skip


PLAIN = [[5.0, 3.0, 1.0], [6.0, 5.0, 3.0]]  # Two seeds' losses, all of 20 steps.


def against_plain(losses):
    done = [made_up("mix_0.5", 4, PLAIN), made_up("other", 4, losses)]
    return results.summarise(done, 20)[1]


def test_ratios_are_paired_by_seed():
    """Seed 0 gets to 1.0 at step 15, seed 1 to 3.0 at step 12.5, of 20 each."""
    row = against_plain([[5.0, 2.0, 0.0], [6.0, 4.0, 0.0]])
    ratio = row["vs_streaming"]["ratio"]
    np.testing.assert_allclose(ratio["mean"], (15 / 20 + (10 + 10 / 4) / 20) / 2)
    # Two seeds: Student's t of one degree of freedom.
    half = 12.706204736174698 * np.std([0.75, 0.625], ddof=1) / np.sqrt(2)
    np.testing.assert_allclose(ratio["half"], half)
    np.testing.assert_allclose(row["vs_streaming"]["loss_difference"]["mean"], -2.0)
    assert row["vs_streaming"]["reached"] == 2
    assert row["vs_diloco"] is None


def test_a_seed_that_falls_short_bounds_the_ratio():
    against = against_plain([[5.0, 3.0, 2.0], [6.0, 3.0, 0.0]])["vs_streaming"]
    assert against["reached"] == 1
    np.testing.assert_allclose(against["ratio"]["mean"], (1.0 + 0.5) / 2)


def test_a_run_that_diverged_is_no_number():
    row = against_plain([[5.0, None, None], [6.0, 3.0, 0.0]])
    assert row["final_loss"] is None
    assert row["vs_streaming"]["loss_difference"] is None
    assert results.final_loss([5.0, 900.0]) is None
    assert row["vs_streaming"]["reached"] == 1
    assert row["vs_streaming"]["seeds"] == 2


def test_the_best_at_an_end_of_its_grid_is_marked():
    tried = [
        {"inner_lr": 3e-3, "outer_lr": lr, "strength": None, "loss": 1.0}
        for lr in (0.2, 0.4, 0.8)
    ]
    assert results.at_edge(made_up("x", 4, [[1.0]], tried)) == []
    assert results.at_edge(made_up("x", 4, [[1.0]], tried[1:])) == ["outer_lr"]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"steps": 30}, "eval_every=20 must divide steps=30"),
        ({"test_seeds": (1, 2), "tuning_seeds": (2,)}, "holds test seeds .2."),
        ({"test_seeds": (1, 1)}, r"test_seeds=\(1, 1\) names one twice"),
        ({"inner_lrs": ()}, r"inner_lrs=\(\) is empty"),
        ({"outer_lrs": ()}, r"outer_lrs=\(\) is empty"),
        ({"num_fragments": 3}, "sync_interval=20 is not a multiple"),
        ({"num_fragments": 5}, "num_fragments=5 must be at most the 4 blocks"),
        ({"model": "huge"}, "model='huge' is unknown; use one of"),
        ({"regions": 0}, "regions=0 must be at least 1"),
        ({"sequence_length": 0}, "sequence_length=0 is too small"),
        ({"warmup_steps": 400}, "warmup_steps=400 must be at least 0 and less than"),
        ({"outer_lrs_with_strength": ()}, r"outer_lrs_with_strength=\(\) is empty"),
        ({"outer_lrs": (0.4, math.nan)}, "outer_lrs=nan must be positive and finite"),
    ],
)
def test_settings_are_checked(leaves, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Settings(), **leaves)


TINY = (
    "--steps=4", "--sync_interval=4", "--eval_every=2", "--eval_sequences=4",
    "--sequence_length=8", "--warmup_steps=1", "--trials=1", "--test_seeds=0",
    "--outer_lrs=0.4", "--rules=mix_0.5", "--delays=1", "--workers=1",
)  # fmt: skip


def test_the_command_writes_results_and_goes_on(call, refused, tmp_path, monkeypatch):
    # What it tells its worker by that is none of other tests' business.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    flags = (f"--workdir={tmp_path}", *TINY)
    out, _ = call(ablate_compensation, *flags)
    assert "3/3" in out
    summary = json.loads((tmp_path / "ablate_compensation.json").read_text())
    assert [row["rule"] for row in summary["rows"]] == [
        "diloco", "data_parallel", "mix_0.5"
    ]  # fmt: skip
    assert summary["rows"][2]["vs_streaming"]["ratio"]["mean"] == 1
    sent = [row["bytes_sent_per_region"] for row in summary["rows"]]
    assert sent == [49_952 * 4, 4 * 49_952 * 4, 49_952 * 4]
    for name in ("steps", "loss", "curves"):
        assert (tmp_path / f"ablate_{name}.png").stat().st_size > 10_000
    # What is done is not done again.
    out, _ = call(ablate_compensation, *flags)
    assert "3/3" not in out
    again = json.loads((tmp_path / "ablate_compensation.json").read_text())
    assert again["rows"] == summary["rows"]
    said = refused(ablate_compensation, *flags, "--steps=8")
    assert said.startswith(f"--workdir='{tmp_path}' holds an ablation with other")


def test_what_has_begun_beside_a_job_that_fails_is_kept(tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def job(settings, name, delay):
        if name == "bad":
            begun.wait(10)
            raise ValueError("bad")
        begun.set()
        assert name == "good"
        may_end.wait(10)
        return {"seconds": 1.0}

    def pool(workers, context, **_):
        made = concurrent.futures.ThreadPoolExecutor(workers)
        made.submit(lambda: None).result()
        return made

    def cancelled(future):
        may_end.set()
        return cancel(future)

    cancel = concurrent.futures.Future.cancel
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(concurrent.futures.Future, "cancel", cancelled)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(ablate_compensation, "run_job", job)
    monkeypatch.setattr(ablate_compensation.flags, "value", lambda _: 2)
    asked = [("good", 1), ("bad", 1), *(("late", n) for n in range(9))]
    with pytest.raises(ValueError, match="bad"):
        ablate_compensation._run(Settings(), asked, tmp_path)
    assert "good_delay1.json" in [path.name for path in tmp_path.iterdir()]


ORPHAN = """
import os, pathlib, signal, sys, time
from experiments.studies import ablate_compensation

def job(settings, name, delay):
    pathlib.Path(sys.argv[1], "pid").write_text(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ablate_compensation.run_job = job
    ablate_compensation.flags.value = lambda _: 1
    ablate_compensation._run(None, [("x", 1)], pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_program(tmp_path, number):
    (tmp_path / "program.py").write_text(ORPHAN)
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(words, env=env)
    path = tmp_path / "pid"
    wait_until(lambda: path.exists() and path.read_text())
    process.send_signal(number)
    try:
        process.wait(30)  # The job would take 60.
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: is_over(path.read_text()))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--rules=median", "--rules='median' is unknown; use some of"),
        ("--rules=mix_0,mix_0", "--rules=mix_0,mix_0 names one twice"),
        ("--delays=21", "--delays=21 must be at least 1 and at most sync_int"),
        ("--delays=x", "--delays=x must be numbers separated by commas"),
        ("--steps=-1", "--steps=-1 must be at least 1"),
        ("--model=huge", "--model='huge' is unknown; use one of"),
    ],
)
def test_a_wrong_flag_is_one_line(refused, tmp_path, flag, message):
    said = refused(ablate_compensation, f"--workdir={tmp_path}", flag)
    assert said.startswith(message)
