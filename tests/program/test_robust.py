"""Regions that send bad messages in the middle of a run, against NumPy.

The formulas are those of `sync.robust` and of the methods, one region and one step at a
time.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.robust import reasons_of
from cocodc_jax.sync.schedules import events_at, one_step_stale
from cocodc_jax.train.hooks import Cadence
from cocodc_jax.transforms.compensation import adam_second_moment
from cocodc_jax.transforms.compressor import identity
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program import tiny
from tests.slow import mostly_slow

R = 4
LR = 0.1
MOMENTUM = 0.5
PARAMS = {"a": np.array([1.0, -2.0, 0.5]), "b": np.array([2.0, 1.0])}
OUTER = {"outer_lr": 0.5, "outer_momentum": 0.9}
DILOCO = functools.partial(methods.get, "diloco", sync_interval=2, **OUTER)
STREAMING = functools.partial(
    methods.get,
    "streaming_diloco",
    sync_interval=4,
    num_fragments=2,
    delay_steps=2,
    mixing_alpha=0.25,
    **OUTER,
)


def loss_fn(params, batch, key):
    return sum(jnp.sum((params[n] - batch[n]) ** 2) for n in params) / 2, {}


def make_batch(step):
    """Region 2 reads NaN at step 3, region 0 far too large values at step 6."""
    rng = np.random.default_rng(step)
    batch = {n: rng.normal(size=(R, *x.shape)) for n, x in PARAMS.items()}
    if step == 3:
        batch["b"][2, 0] = np.nan
    if step == 6:
        batch["a"][0] = 1e4
    return batch


def stream(step=0):
    while True:
        step += 1
        yield make_batch(step)


def make_program(method, exchange="program"):
    optimizer = optax.sgd(LR, MOMENTUM)
    transport = Transport(exchange)
    return RegionProgram(loss_fn, optimizer, method, PARAMS, R, transport=transport)


def start(program):
    return program.init(PARAMS, jax.random.key(0))


def verdict_of(program, num_steps):
    """Return the state after some steps, and the verdict of its only sync."""
    state, outputs = tiny.follow(program, start(program), stream(), num_steps)
    return state, reasons_of(np.asarray(outputs[-1].syncs[0].verdict))


def mean_of(messages, above, mean, trim):
    """The verdicts and the mean of the regions' messages, each one array."""
    length = np.array([np.linalg.norm(x) for x in messages])
    finite = np.isfinite(length)
    far = finite & (np.nan_to_num(length) > above * np.median(length[finite]))
    kept = [m for m in range(R) if finite[m] and not far[m]]
    values = np.array([messages[m] for m in kept])
    if mean == "clip":
        limit = np.median(length[kept])
        scale = np.minimum(1, limit / length[kept])
        values = values * scale[:, None]

    if mean == "trim":
        cut = int(trim * len(kept))
        values = np.sort(values, axis=0)[cut : len(kept) - cut]
    return [m for m in range(R) if m not in kept], values.mean(0)


def reference(program, num_steps, above, mean="weighted", trim=0.0, alpha=0.0):
    """Return the outer parameters, and the verdict of each sync."""
    schedule = program.method.sync.schedule
    names = [
        sorted(program.fragments.take(PARAMS, k)) for k in range(len(program.fragments))
    ]
    outer = dict(PARAMS)
    trace = {n: np.zeros_like(x) for n, x in PARAMS.items()}
    w = {n: np.stack([x] * R) for n, x in PARAMS.items()}
    pace = {n: np.zeros_like(x) for n, x in w.items()}
    state = schedule.init()
    flights = {}
    judged = []

    for step in range(1, num_steps + 1):
        for n, target in make_batch(step).items():
            pace[n] = MOMENTUM * pace[n] + w[n] - target
            w[n] = w[n] - LR * pace[n]

        if schedule.next_step(state) != step:
            continue
        for after, event in events_at(schedule, state, step):
            state = after
            if event is None:
                break

            k = event.fragment_id
            if event.kind == "start":
                messages = np.concatenate([outer[n] - w[n] for n in names[k]], axis=1)
                is_sick = np.any([np.isnan(x).any(1) for x in w.values()], axis=0)
                messages[is_sick] = np.nan

                out, delta = mean_of(messages, above, mean, trim)
                flights[event.sync_id] = set(out), delta
                judged.append((step, k, out))
            elif event.kind == "finish":
                out, delta = flights.pop(event.sync_id)
                for n in names[k]:
                    part, delta = np.split(delta, [len(outer[n])])
                    trace[n] = part + 0.9 * trace[n]
                    outer[n] = outer[n] - 0.5 * (part + 0.9 * trace[n])

                for n in PARAMS:
                    w[n][list(out)] = outer[n]
                    pace[n][list(out)] = 0
                for flight in flights.values():
                    flight[0].difference_update(out)
                for n in names[k]:
                    w[n] = alpha * w[n] + (1 - alpha) * outer[n]
    return outer, w, judged


ABOVE = {"exclude_above": 5.0}
CASES = {
    "program": (DILOCO, ABOVE, "program", 0.0),
    "outer mesh": (DILOCO, ABOVE, "outer", 0.0),
    "gathered": (DILOCO, ABOVE, "program", 0.0),
    "clip": (DILOCO, ABOVE | {"robust_mean": "clip"}, "program", 0.0),
    "trim": (DILOCO, {"robust_mean": "trim:0.25"}, "outer", 0.0),
    "late": (STREAMING, ABOVE, "program", 0.25),
    "late, outer mesh, gathered": (STREAMING, ABOVE, "outer", 0.25),
}


@pytest.mark.parametrize(
    "case", mostly_slow(CASES, quick=["clip", "trim", "late, outer mesh, gathered"])
)
def test_robust_means_equal_the_numpy_reference(case):
    make, options, exchange, alpha = CASES[case]
    with jax.enable_x64(True):
        method = make(**options)
        if "gathered" in case:
            method = method.with_sync(message=Compressed(identity()))
        program = make_program(method, exchange)

        state, outputs = tiny.follow(program, start(program), stream(), 12)
        robust = method.sync.robust
        outer, w, judged = reference(
            program, 12, robust.exclude_above, robust.mean, robust.trim, alpha
        )

        assert_all_close(program.outer_params(state), outer, rtol=1e-10)
        assert_all_close(state.region.params, w, rtol=1e-10)

    left_out = {
        (s.start_step, s.fragment_id): reasons_of(np.asarray(s.verdict))
        for output in outputs
        for s in output.syncs
    }

    assert any(out for _, _, out in judged)
    for step, k, out in judged:
        if (step, k) in left_out:
            assert sorted(left_out[step, k]) == out, (step, k)


def test_without_an_outlier_exclude_above_changes_no_number():
    """The flag is on, but no region is an outlier."""

    def quiet():
        rng = np.random.default_rng(0)
        while True:
            yield {n: rng.normal(size=(R, *x.shape)) for n, x in PARAMS.items()}

    ends = []
    for options in ({}, {"exclude_above": 50.0}):
        program = make_program(STREAMING(**options))
        state, _ = tiny.follow(program, start(program), quiet(), 12)
        ends.append(state.region.params)
    assert_within_ulps(*ends)


@pytest.mark.parametrize("averaging", ["mean", "rda"])
def test_an_outlier_is_one_whatever_the_mean_is_of(averaging):
    """Directions are of length 1, far above that of a short pseudo-gradient."""
    method = methods.get(
        "decoupled_diloco",
        sync_interval=6,
        num_fragments=1,
        delay_steps=1,
        averaging=averaging,
        exclude_above=5.0,
    )
    program = RegionProgram(loss_fn, optax.sgd(1e-5), method, PARAMS, R)
    _, verdict = verdict_of(program, 7)
    assert verdict == {0: "outlier", 2: "not finite"}


def test_a_restored_region_has_new_moments_and_the_learning_rate_of_its_step():
    method = DILOCO(exclude_above=5.0, compress="ef+int8")
    optimizer = optax.adam(optax.linear_schedule(0.1, 0.0, 100))
    program = RegionProgram(loss_fn, optimizer, method, PARAMS, R)
    state, verdict = verdict_of(program, 4)
    assert verdict == {2: "not finite"}

    (fed_back,) = jax.tree.map(np.asarray, state.sync.compressors)
    for leaf in jax.tree.leaves(fed_back):
        if leaf.dtype == np.float32:
            assert (leaf[2] == 0).all()
            assert np.isfinite(leaf).all()

    adam, rate = state.region.opt_state
    assert np.asarray(adam.count).tolist() == [4, 4, 0, 4]
    assert np.asarray(rate.count).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("curvature", ["adam_second_moment", "hessian_vector"])
def test_a_region_restored_at_a_merge_gets_the_outer_model(curvature):
    """Region 2 is restored as it merges, with a new inner optimizer."""
    method = methods.get(
        "cocodc",
        sync_interval=4,
        num_fragments=1,
        delay_steps=2,
        curvature=curvature,
        exclude_above=5.0,
    )
    optimizer = optax.adam(LR)
    user_inputs = UserInputs(LR, adam_second_moment(0.999))
    program = RegionProgram(
        loss_fn, optimizer, method, PARAMS, R, user_inputs=user_inputs
    )
    state, verdict = verdict_of(program, 6)

    assert verdict == {2: "not finite"}
    assert np.asarray(state.region.opt_state[0].count).tolist() == [6, 6, 0, 6]

    restored = jax.tree.map(lambda x: x[2], state.region.params)
    tiny.assert_same(restored, program.outer_params(state))


def train_in(folder, num_steps, **options):
    program = make_program(STREAMING(**options))
    cadence = Cadence(log_every=2, checkpoint_every=5)
    return tiny.train_in(
        folder, program, start(program), stream, num_steps, cadence=cadence
    )


@pytest.mark.parametrize("changes", [{}, {"schedule": one_step_stale(4, 2)}])
def test_a_region_is_restored_before_and_after_the_middle_of_a_delay(changes):
    method = methods.get(
        "cocodc",
        curvature="secant",
        sync_interval=4,
        num_fragments=1,
        delay_steps=4,
        syncs_per_interval=1,
        exclude_above=5.0,
    )
    program = make_program(method.with_sync(**changes))
    state = start(program)

    batches = stream()
    kept = set()
    for _ in range(9):
        state, _ = tiny.follow(program, state, batches, 1)
        state = program.restore_regions(state, np.array([False, False, True, False]))
        kept |= {tuple(sorted(f.kept)) for f in state.sync.in_flight.values()}

    assert len(kept) == 2
    assert np.asarray(program.finite_regions(state)).all()


def test_a_region_with_bad_batches_does_not_end_the_run(tmp_path):
    """And it goes on from its middle: region 2 is restored as the run is saved.

    Without the flag it does: `TestNotFinite` of `train/test_loop.py`.
    """
    whole, records = train_in(tmp_path / "whole", 12, exclude_above=5.0)
    assert all(map(np.isfinite, whole.state.region.params["a"].ravel()))

    left_out = [r["left_out"] for r in records if r["kind"] == "sync"]
    assert [0, 0, 1, 0] in left_out
    assert [2, 0, 0, 0] in left_out

    json.dumps(records, allow_nan=False)
    assert whole.left_out["region 2: not finite"] >= 1

    losses = [r for r in records if r["kind"] == "train"]
    assert all(r["loss"] is not None for r in losses)
    assert any(None in r["loss_regions"] for r in losses)
    assert None not in losses[-1]["loss_regions"]

    train_in(tmp_path / "parts", 5, exclude_above=5.0)
    result, _ = train_in(tmp_path / "parts", 12, exclude_above=5.0)
    assert result.left_out == whole.left_out
    tiny.assert_same(result.state.region.params, whole.state.region.params)


def test_a_region_that_is_restored_keeps_its_keys_and_counts():
    noise = optax.add_noise(0.1, 0.5, key=3)
    optimizer = optax.chain(
        noise, optax.MultiSteps(optax.sgd(LR), 2).gradient_transformation()
    )
    program = RegionProgram(loss_fn, optimizer, DILOCO(exclude_above=5.0), PARAMS, R)
    state, _ = tiny.follow(program, start(program), stream(), 3)
    before = jax.tree.map(np.asarray, _noise_and_counts(state))
    state = program.restore_regions(state, np.array([False, False, True, False]))

    tiny.assert_same(jax.tree.map(np.asarray, _noise_and_counts(state)), before)
    assert len({key.tobytes() for key in before[0]}) == R


def _noise_and_counts(state):
    noise, multi_steps = state.region.opt_state
    counts = noise.count, multi_steps.mini_step, multi_steps.gradient_step
    return jax.random.key_data(noise.rng_key), *counts
