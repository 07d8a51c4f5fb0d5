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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax import models
from cocodc_jax.data import load
from cocodc_jax.sync import cutting, merge
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.transforms.second_moment import adam_second_moment

from . import rules
from .settings import Settings
from .simulator import Plan, make_plan, simulate
from .trials import Trainer, Trials

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
    """Tunes and tests one rule at one delay.

    Args:
      settings: of the ablation.
      name: a rule of `rules.table`, or one of `REFERENCES`, which have no delay.
      delay_steps: tau.

    Returns:
      Plain values: what was tried and chosen, and the curves of every test seed.
    """
    begin_s = time.perf_counter()
    tried = [
        Trial(seed, *numbers)
        for numbers in grid(settings, name, delay_steps)
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


def choose(trials: Sequence[Trial], losses: Sequence[float]) -> Trial:
    """Return the numbers of least mean loss over seeds; what diverged never wins."""
    sums: dict[Trial, float] = {}
    for trial, loss in zip(trials, losses, strict=True):
        numbers = dataclasses.replace(trial, seed=0)
        sums[numbers] = sums.get(numbers, 0.0) + (
            float(loss) if math.isfinite(loss) else math.inf
        )
    return min(sums, key=lambda numbers: sums[numbers])


def train(
    settings: Settings, name: str, delay_steps: int, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Trains any number of runs, `settings.trials` at a time.

    Returns:
      "steps" [P], "losses" [len(trials), P], "correction_ratio" [len(trials)],
      "bytes_sent" by one region of one run.
    """
    outcomes = []
    for first in range(0, len(trials), settings.trials):
        part = list(trials[first : first + settings.trials])
        # One shape for all, so that nothing is compiled again.
        padded = part + [part[-1]] * (settings.trials - len(part))
        outcome = _train_together(settings, name, delay_steps, padded)
        outcomes.append((outcome, len(part)))
    losses = [outcome.losses[:count] for outcome, count in outcomes]
    ratios = [outcome.correction_ratio[:count] for outcome, count in outcomes]
    return {
        "steps": outcomes[0][0].steps,
        "losses": np.concatenate(losses),
        "correction_ratio": np.concatenate(ratios),
        "bytes_sent": outcomes[0][0].bytes_sent,
    }


def _train_together(settings, name, delay_steps, trials):
    whole = name in REFERENCES
    trainer = make_trainer(settings, 1 if whole else settings.num_fragments)
    plan = None if name == DATA_PARALLEL else _plan(settings, name, delay_steps)
    begun, tokens = begin(settings, trainer, [trial.seed for trial in trials])
    return simulate(
        trainer,
        begun,
        tokens,
        [trial.outer_lr for trial in trials],
        [0.0 if trial.strength is None else trial.strength for trial in trials],
        plan,
        inner_scale=[trial.inner_lr / rules.INNER_LR for trial in trials],
        eval_tokens=eval_tokens(settings),
        eval_every=settings.eval_every,
    )


def begin(
    settings: Settings, trainer: Trainer, seeds: Sequence[int]
) -> tuple[Trials, jax.Array]:
    """Return trials before their first step, one a seed, and what they train on.

    Args:
      settings: of the ablation.
      trainer: of `make_trainer`.
      seeds: of the E trials: of their parameters and of their data.

    Returns:
      The trials, and their tokens, int32 `[T, E, R, B, L + 1]`.
    """
    params = [_init_params(settings, seed) for seed in seeds]
    tokens = np.stack([_tokens(settings, seed) for seed in seeds], axis=1)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *params)
    return trainer.init(stacked, settings.regions), jnp.asarray(tokens)


@functools.cache
def make_trainer(settings: Settings, num_fragments: int) -> Trainer:
    """Return the compiled parts for so many fragments, the same at every call."""
    model, optimizer = settings.transformer, settings.optimizer
    shapes = jax.eval_shape(
        functools.partial(models.init_params, model), jax.random.key(0)
    )
    user_inputs = UserInputs(
        optimizer.learning_rate(settings.steps),
        adam_second_moment(optimizer.second_moment_decay()),
        models.make_outputs(model),
    )
    return Trainer(
        models.make_loss_fn(model),
        user_inputs,
        optimizer.build(settings.steps),
        cutting.cut(shapes, num_fragments),
    )


@functools.lru_cache(maxsize=1)
def _plan(settings: Settings, name: str, delay_steps: int) -> Plan:
    interval = settings.sync_interval
    if name == DILOCO:
        trainer, whole = make_trainer(settings, 1), staggered(interval)
        return make_plan(trainer, whole, lambda *_: merge.replace(), settings.regions)
    trainer = make_trainer(settings, settings.num_fragments)
    parts = staggered(interval, settings.num_fragments, delay_steps)
    rule = rules.table(interval)[name]
    return make_plan(trainer, parts, rule.make, settings.regions)


@functools.cache
def _init_params(settings: Settings, seed: int):
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.jit(functools.partial(models.init_params, settings.transformer))(key)


@functools.cache
def _tokens(settings: Settings, seed: int) -> np.ndarray:
    """int32 `[steps, R, B, L + 1]`."""
    stream = load(settings.data(seed), settings.regions).train_stream()
    with contextlib.closing(stream):
        return np.stack(list(itertools.islice(stream, settings.steps)))


@functools.cache
def eval_tokens(settings: Settings) -> jax.Array:
    """Return the validation text, int32 `[sequences, L + 1]`, the same at all times."""
    text = load(settings.data(0), settings.regions)
    num_batches = -(-settings.eval_sequences // settings.batch_per_region)
    return jnp.asarray(np.concatenate(list(text.eval_tokens(num_batches))))


def _finite(x: float) -> float | None:
    """JSON has no infinity."""
    return float(x) if math.isfinite(x) else None
