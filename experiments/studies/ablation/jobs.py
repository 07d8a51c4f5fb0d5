"""One job of the ablation: tune a rule at one delay, then train the test seeds."""

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
from cocodc_jax.data import DataConfig, load
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.messages import AsIs, Compressed
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import Schedule, staggered
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.numerics import check_rate
from cocodc_jax.transforms.second_moment import adam_second_moment

from ... import trials
from . import rules

DILOCO, DATA_PARALLEL = "diloco", "data_parallel"
REFERENCES = (DILOCO, DATA_PARALLEL)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and grids of the ablation, the same for every rule.

    Everything that two jobs could differ in, but for the rule and the delay, is here;
    every rule gets the same model, data, tokens, schedule and bytes.

    Attributes:
      model: preset of `cocodc_jax.models`.
      steps: inner steps of each run.
      regions: M.
      sync_interval: H.
      num_fragments: K.
      batch_per_region: sequences per region and step.
      sequence_length: tokens per sequence.
      warmup_steps: of the inner learning rate, constant afterwards.
      eval_every: steps between evaluations.
      eval_sequences: validation sequences, the same ones at all times.
      test_seeds: reported.
      tuning_seeds: for the choice of outer learning rate and strength.
      inner_lrs: peak inner learning rates, each tried with all of the following.
      outer_lrs: tried for a rule without strength.
      outer_lrs_with_strength: tried with each strength of a rule that has one.
      trials: runs that are trained side by side.
    """

    model: str = "smoke"
    steps: int = 400
    regions: int = 4
    sync_interval: int = 20
    num_fragments: int = 4
    batch_per_region: int = 4
    sequence_length: int = 32
    warmup_steps: int = 40
    eval_every: int = 20
    eval_sequences: int = 128
    test_seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    tuning_seeds: tuple[int, ...] = (100,)
    inner_lrs: tuple[float, ...] = (rules.INNER_LR,)
    outer_lrs: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.4)
    outer_lrs_with_strength: tuple[float, ...] = (0.4, 0.7, 1.1)
    trials: int = 6

    def __post_init__(self):
        """Check what nothing else does."""
        for name in ("steps", "trials", "regions", "eval_every", "eval_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        seeds = ("test_seeds", "tuning_seeds")
        for name in (*seeds, "inner_lrs", "outer_lrs", "outer_lrs_with_strength"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}=() is empty; name at least one")
            if name not in seeds:
                for rate in values:
                    check_rate(name, rate)
            elif len({*values}) < len(values):
                raise ValueError(f"{name}={values} names one twice")
        shared = set(self.test_seeds) & set(self.tuning_seeds)
        if shared:
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} holds test seeds {sorted(shared)}; "
                "what was tuned on cannot be reported on"
            )
        if self.steps % self.eval_every:
            raise ValueError(
                f"eval_every={self.eval_every} must divide steps={self.steps}, so that "
                "the end is evaluated"
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be at least 0 and less than "
                f"steps={self.steps}"
            )
        staggered(self.sync_interval, self.num_fragments)
        if self.model not in models.PRESETS:
            raise ValueError(
                f"model={self.model!r} is unknown; use one of {list(models.PRESETS)}"
            )
        if self.num_fragments > self.transformer.num_layers:
            raise ValueError(
                f"num_fragments={self.num_fragments} must be at most the "
                f"{self.transformer.num_layers} blocks of model={self.model}"
            )
        self.data(0)  # Which checks its own.

    @property
    def transformer(self) -> models.TransformerConfig:
        """The model."""
        return models.get(self.model)

    @property
    def optimizer(self) -> OptimizerConfig:
        """Inner AdamW; a constant rate, so that a step means the same at all times."""
        return OptimizerConfig(
            inner_lr=rules.INNER_LR,
            warmup_steps=self.warmup_steps,
            beta2=0.99,
            final_lr_fraction=1.0,
        )

    def data(self, seed: int) -> DataConfig:
        """Return the text of one seed."""
        return DataConfig(
            sequence_length=self.sequence_length,
            batch_per_region=self.batch_per_region,
            seed=seed,
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: what differs between the runs of a job."""

    seed: int
    inner_lr: float
    outer_lr: float
    strength: float | None


def run_job(settings: Settings, name: str, delay_steps: int) -> dict[str, Any]:
    """Tune and test one rule at one delay."""
    begin_s, tuning = time.perf_counter(), []
    tried = [
        Trial(seed, *each)
        for each in grid(settings, name, delay_steps)
        for seed in settings.tuning_seeds
    ]
    best = tried[0]
    if len(tried) > 1:
        losses = train(settings, name, delay_steps, tried)["losses"][:, -1]
        best = choose(tried, losses)
        tuning = [
            dataclasses.asdict(trial) | {"loss": _finite(loss)}
            for trial, loss in zip(tried, losses, strict=True)
        ]
    tested = [dataclasses.replace(best, seed=seed) for seed in settings.test_seeds]
    test = train(settings, name, delay_steps, tested)
    chosen = dataclasses.asdict(best)
    del chosen["seed"]
    return {
        "rule": name,
        "delay_steps": delay_steps,
        **chosen,
        "tuning": tuning,
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
    """Return inner learning rates, outer ones and strengths to try together."""
    strengths, outer = (), settings.outer_lrs
    if name not in REFERENCES:
        strengths = rules.table(settings.sync_interval)[name].strengths_at(delay_steps)
    if strengths:
        outer = settings.outer_lrs_with_strength
    elif name == DATA_PARALLEL:
        outer = (1.0,)
    return list(itertools.product(settings.inner_lrs, outer, strengths or (None,)))


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
    """Train any number of runs, `settings.trials` at a time."""
    program, size = make_trials(settings, name, delay_steps), settings.trials
    outcomes = []
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
