"""One job of the ablation: tune a rule at one delay, then train the test seeds.

Everything that two jobs could differ in, but for the rule and the delay, is in
`Settings`; every rule gets the same model, data, tokens, schedule and bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax import methods, models
from cocodc_jax.data import load
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.messages import AsIs, Compressed
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import Schedule, staggered
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.second_moment import adam_second_moment

from ... import trials
from . import rules
from .settings import Settings

DILOCO, DATA_PARALLEL = "diloco", "data_parallel"
REFERENCES = (DILOCO, DATA_PARALLEL)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: what differs between the runs of a job."""

    seed: int
    inner_lr: float
    outer_lr: float
    strength: float | None


def run_job(settings: Settings, name: str, delay_steps: int) -> dict[str, Any]:
    """Tunes and tests one rule at one delay."""
    begin_s = time.perf_counter()
    tried = [
        Trial(seed, *each)
        for each in grid(settings, name, delay_steps)
        for seed in settings.tuning_seeds
    ]
    tuning = train(settings, name, delay_steps, tried) if len(tried) > 1 else {}
    best = choose(tried, tuning["losses"][:, -1]) if tuning else tried[0]
    tested = [dataclasses.replace(best, seed=seed) for seed in settings.test_seeds]
    test = train(settings, name, delay_steps, tested)
    return {
        "rule": name,
        "delay_steps": delay_steps,
        "inner_lr": best.inner_lr,
        "outer_lr": best.outer_lr,
        "strength": best.strength,
        "tuning": [
            dataclasses.asdict(trial) | {"loss": _finite(loss)}
            for trial, loss in zip(tried, tuning["losses"][:, -1], strict=True)
        ]
        if tuning
        else [],
        "steps": test["steps"],
        "losses": {
            str(trial.seed): [_finite(x) for x in row]
            for trial, row in zip(tested, test["losses"], strict=True)
        },
        "correction_ratio": [_finite(x) for x in test["correction_ratio"]],
        "bytes_sent_per_region": test["bytes_sent"],
        "seconds": time.perf_counter() - begin_s,
    }


def grid(
    settings: Settings, name: str, delay_steps: int
) -> list[tuple[float, float, float | None]]:
    """Inner learning rate, outer learning rate and strength to try together."""
    return [
        (inner_lr, *others)
        for inner_lr in settings.inner_lrs
        for others in _outer_grid(settings, name, delay_steps)
    ]


def _outer_grid(
    settings: Settings, name: str, delay_steps: int
) -> list[tuple[float, float | None]]:
    if name == DATA_PARALLEL:
        return [(1.0, None)]
    strengths = ()
    if name not in REFERENCES:
        strengths = rules.table(settings.sync_interval)[name].strengths_at(delay_steps)
    if not strengths:
        return [(lr, None) for lr in settings.outer_lrs]
    return list(itertools.product(settings.outer_lrs_with_strength, strengths))


def choose(runs: Sequence[Trial], losses: Sequence[float]) -> Trial:
    """Return the numbers of least mean loss over seeds; what diverged never wins."""
    sums: dict[Trial, float] = {}
    for run, loss in zip(runs, losses, strict=True):
        chosen = dataclasses.replace(run, seed=0)
        sums[chosen] = sums.get(chosen, 0.0) + (
            float(loss) if math.isfinite(loss) else math.inf
        )
    return min(sums, key=lambda chosen: sums[chosen])


def train(
    settings: Settings, name: str, delay_steps: int, runs: Sequence[Trial]
) -> dict[str, Any]:
    """Trains any number of runs, `settings.trials` at a time."""
    program, size, outcomes = (
        make_trials(settings, name, delay_steps),
        settings.trials,
        [],
    )
    # One shape for all, so that nothing is compiled again.
    padded = [*runs, *[runs[-1]] * (-len(runs) % size)]
    for first in range(0, len(padded), size):
        part = padded[first : first + size]
        outcomes.append(
            trials.train(
                program,
                init_params(settings, [run.seed for run in part]),
                numbers(part),
                [iter(tokens(settings, run.seed)) for run in part],
                range(size),
                settings.steps,
                eval_tokens(settings),
                settings.eval_every,
                eval_first=True,
            )
        )
    curves = [np.stack([x.loss for x in each.evaluations], 1) for each in outcomes]
    ratios = [each.ratios / np.maximum(each.merges, 1) for each in outcomes]
    return {
        "steps": outcomes[0].steps,
        "losses": np.concatenate(curves)[: len(runs)],
        "correction_ratio": np.concatenate(ratios)[: len(runs)],
        "bytes_sent": int(outcomes[0].bytes_sent[-1][0]),
    }


def numbers(runs: Sequence[Trial]) -> dict[str, list[float]]:
    """Return the inputs of the program, one of each run."""
    return {
        "inner_lr": [run.inner_lr for run in runs],
        "outer_lr": [run.outer_lr for run in runs],
        "strength": [run.strength or 0.0 for run in runs],
    }


@functools.cache
def make_trials(settings: Settings, name: str, delay_steps: int) -> trials.Trials:
    """Return the program of a rule or a reference, the same at every call."""
    interval, num = settings.sync_interval, settings.num_fragments

    def method(outer_lr: Any, strength: Any) -> Method:
        if name == DATA_PARALLEL:
            return methods.get(name)
        if name == DILOCO:
            return methods.get(name, sync_interval=interval, outer_lr=outer_lr)
        rule = rules.table(interval)[name].make(strength, delay_steps)
        return with_merge(rule, staggered(interval, num, delay_steps), outer_lr)

    return trials_of(settings, method)


def with_merge(rule: Merge, schedule: Schedule, outer_lr: Any) -> Method:
    """Return the method of a merge rule, with messages that it can feed back into."""
    message = Compressed(error_feedback(identity())) if rule.has_feedback else AsIs()
    outer = nesterov(outer_lr, 0.9)
    sync = Sync(schedule=schedule, outer=outer, merge=rule, message=message)
    return Method(name=rule.name, sync=sync)


def trials_of(
    settings: Settings, method: Callable[[Any, Any], Method]
) -> trials.Trials:
    """Return trials of a method, which is made of outer learning rate and strength."""
    loss_fn, make_inner = parts(settings)

    def make(given: trials.Numbers):
        inner, user_inputs = make_inner(given["inner_lr"])
        return inner, method(given["outer_lr"], given["strength"]), user_inputs

    # A strength between nothing and all.
    example = {"inner_lr": rules.INNER_LR, "outer_lr": 0.4, "strength": 0.5}
    return trials.Trials(loss_fn, make, example, settings.regions)


def parts(settings: Settings) -> tuple[Callable, Callable]:
    """Return the loss, and what makes the inner optimizer of its learning rate."""
    model, config = settings.transformer, settings.optimizer

    def make_inner(inner_lr: Any):
        given: dict[str, Any] = dataclasses.asdict(config) | {"inner_lr": inner_lr}
        inner = trials.Inner(**given)
        return inner.build(settings.steps), UserInputs(
            inner.learning_rate(settings.steps),
            adam_second_moment(inner.second_moment_decay()),
            models.make_outputs(model),
        )

    return models.make_loss_fn(model), make_inner


def init_params(settings: Settings, seeds: Sequence[int]) -> models.Params:
    """Return initial parameters by seed, leaves `[E, ...]`."""
    return trials.init_params(settings.transformer, seeds)


@functools.cache
def tokens(settings: Settings, seed: int) -> np.ndarray:
    """int32 `[steps, R, B, L + 1]`."""
    stream = load(settings.data(seed), settings.regions).train_stream()
    with contextlib.closing(stream):
        return np.stack(list(itertools.islice(stream, settings.steps)))


@functools.cache
def eval_tokens(settings: Settings) -> jax.Array:
    """Return the validation text as one batch, int32 `[1, sequences, L + 1]`."""
    text = load(settings.data(0), settings.regions)
    num_batches = -(-settings.eval_sequences // settings.batch_per_region)
    return jnp.asarray(np.concatenate(list(text.eval_tokens(num_batches))))[None]


def _finite(x: float) -> float | None:
    """JSON has no infinity."""
    return float(x) if math.isfinite(x) else None
