"""Rows of a sweep trained together: many trials of one program, see `trials.py`.

Rows whose settings differ in `INPUTS` and in the seed alone form a group. A group is
one program: its numbers are inputs. Data, evaluations and learning rate schedules are
those of the same rows trained alone; losses agree up to float32 rounding, and for
messages that are rounded at random up to their draws, which do not depend on the seed.
"""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.run import build, losses
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.hugging_face import model_of

from .. import trials
from .grid import Setting
from .rows import completed
from .runs import Row, diverged, open_text, trained

# Numbers that are inputs of a program, by section of the configuration.
INPUTS = {
    "optimizer": ("inner_lr", "weight_decay", "beta1", "beta2"),
    "method": (
        "outer_lr",
        "outer_momentum",
        "mixing_alpha",
        "compensation_strength",
        "progress_weight",
    ),
}
# Flags of a run that trials have, or that change none of their numbers. A run in which
# another one is set is trained alone.
_OF_TRIALS = frozenset(
    {
        "steps",
        "seed",
        "regions",
        "accumulate_steps",
        "eval_every",
        "eval_batches",
        "devices",
        "local_regions",
        "exchange",
        "overlap",
        "all_reduce",
        "outer_channels",
        "stage_compress",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "change_schedule",
    }
)


@functools.cache
def why_alone(config: TrainConfig) -> str | None:
    """Return why a run cannot be a trial beside others; None if it can."""
    run = config.run
    defaults = type(config.run)()
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if field.name not in _OF_TRIALS and value != getattr(defaults, field.name):
            return f"{field.name}={value}"

    if run.exchange == "elastic":
        return "exchange='elastic'"
    if config.model.lora_rank:
        return f"lora_rank={config.model.lora_rank}"

    # Raises where the method is not possible inside one program.
    try:
        _trials(config, config.model).transform({})
    except ValueError as error:
        return str(error)

    return None


def group_key(config: TrainConfig) -> str:
    """Return what the rows of a group have in common."""
    numbers = numbers_of(config)
    shared = completed(config.replace(seed=0).to_json())
    for section, names in INPUTS.items():
        shared[section] |= {name: None for name in names if name in numbers}
    return json.dumps(shared, sort_keys=True)


def numbers_of(config: TrainConfig) -> dict[str, float]:
    """Return the numbers of a run that are inputs of its group's program."""
    values = {"optimizer": dataclasses.asdict(config.optimizer)}
    values["method"] = config.method.values
    return {
        name: float(values[section][name])
        for section, names in INPUTS.items()
        for name in names
        if isinstance(values[section].get(name), int | float)
    }


def first_of_groups(settings: Sequence[Setting]) -> list[Setting]:
    """Return a setting of each group, and those that are trained alone."""
    first: dict[str, Setting] = {}
    for setting in settings:
        alone = why_alone(setting.config) is not None
        key = setting.key if alone else group_key(setting.config)
        first.setdefault(key, setting)
    return list(first.values())


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one group that are trained at once, padded to `size` trials."""

    rows: tuple[Row, ...]
    size: int


def batches(rows: Sequence[Row], most: int) -> tuple[list[Batch], dict[str, str]]:
    """Cut rows into batches."""
    alone: dict[str, str] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if why := why_alone(row.setting.config):
            alone[row.row_id] = why
        else:
            groups.setdefault(group_key(row.config), []).append(row)

    of_groups = []
    for group in groups.values():
        size = -(-len(group) // -(-len(group) // most))
        for i in range(0, len(group), size):
            of_groups.append(Batch(tuple(group[i : i + size]), size))

    return of_groups, alone


class BatchTrainer:
    """Trains batches; batches of one group share compiled programs."""

    def __init__(self):
        self._programs: dict[str, trials.Trials] = {}

    def train(
        self, batch: Batch, should_stop: Callable[[], bool] = lambda: False
    ) -> list[dict[str, Any]]:
        """Train a batch to its end."""
        began_s = time.perf_counter()
        padded = [*batch.rows, *[batch.rows[-1]] * (batch.size - len(batch.rows))]
        configs = [row.config for row in padded]
        of_seed = {config.run.seed: config for config in configs}
        first = configs[0]
        seeds = list(of_seed)
        regions = first.run.regions
        texts = [open_text(one.data, regions, None) for one in of_seed.values()]
        model = model_of(first, texts[0].tokenizer)

        key = group_key(first)
        if key not in self._programs:  # Of the last group only.
            self._programs = {key: _trials(first, model)}
        program = self._programs[key]

        numbers = [numbers_of(config) for config in configs]
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(contextlib.closing(text.train_stream()))
                for text in texts
            ]
            outcome = trials.train(
                program,
                trials.init_params(model, [config.run.seed for config in configs]),
                {name: [trial[name] for trial in numbers] for name in numbers[0]},
                streams,
                [seeds.index(config.run.seed) for config in configs],
                first.run.steps,
                texts[0].eval_tokens(first.run.eval_batches),
                first.run.eval_every,
                should_stop=should_stop,
            )

        seconds = (time.perf_counter() - began_s) / len(batch.rows)
        return [
            _row(row, model, program.method, outcome, trial, seconds)
            for trial, row in enumerate(batch.rows)
        ]


def _trials(config: TrainConfig, model: models.TransformerConfig) -> trials.Trials:
    """Return trials with the attention and backward passes of one device."""
    model = losses.with_kernels(
        config, model, config.method.build(), jax.devices()[0], is_divided=False
    )
    loss_fn = models.make_loss_fn(model)

    return trials.Trials(
        models.make_accumulated_loss_fn(loss_fn, config.run.accumulate_steps),
        functools.partial(_make, config, model),
        numbers_of(config),
        config.run.regions,
    )


def _make(
    config: TrainConfig, model: models.TransformerConfig, numbers: trials.Numbers
) -> tuple[optax.GradientTransformation, cc.methods.Method, cc.UserInputs]:
    """Return inner optimizer, method and user inputs; numbers may be traced."""
    of_method = {n: x for n, x in numbers.items() if n in INPUTS["method"]}
    method = cc.methods.get(config.method.method, **config.method.values | of_method)

    of_optimizer = {n: x for n, x in numbers.items() if n in INPUTS["optimizer"]}
    fields: dict[str, Any] = dataclasses.asdict(config.optimizer) | of_optimizer
    inner = trials.Inner(**fields)
    steps = config.run.steps
    optimizer, user_inputs = build.training_parts(model, method, inner, steps)
    return optimizer, method, user_inputs


def _row(
    row: Row,
    model: models.TransformerConfig,
    method: cc.methods.Method,
    outcome: trials.Outcome,
    trial: int,
    seconds: float,
) -> dict[str, Any]:
    """Return one trial as it is to be written."""
    if why := _why_diverged(outcome, trial):
        return diverged(row, model, why)
    run = row.config.run
    last = outcome.evaluations[-1]
    loss = float(last.loss[trial])
    tokens = run.steps * row.config.tokens_per_step
    merges = float(outcome.merges[trial])
    ratios = float(outcome.ratios[trial])
    compensates = method.sync and method.sync.merge.reports_correction
    summary = {
        "steps": run.steps,
        "eval_loss": loss,
        "eval_loss_outer": float(last.loss_outer[trial]),
        "eval_perplexity": math.exp(min(loss, 700.0)),
        "region_drift": float(last.drift[trial]),
        "correction_ratio": ratios / merges if compensates and merges else None,
        "tokens": tokens,
        "bytes_sent_per_region": int(outcome.bytes_sent[-1][trial]),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    curve = [
        [step, float(evaluation.loss[trial]), int(sent[trial])]
        for step, evaluation, sent in zip(
            outcome.steps, outcome.evaluations, outcome.bytes_sent, strict=True
        )
    ]
    curve_outer = [
        [step, float(evaluation.loss_outer[trial])]
        for step, evaluation in zip(outcome.steps, outcome.evaluations, strict=True)
    ]

    sizes = outcome.fragment_bytes(trial)
    return trained(row, model, summary, curve, curve_outer, sizes)


def _why_diverged(outcome: trials.Outcome, trial: int) -> str | None:
    """Return where the first number of a trial is that is not finite."""
    bad = np.argwhere(~np.isfinite(outcome.losses[trial]))
    if len(bad):
        step, region = map(int, bad[0])
        value = outcome.losses[trial, step, region]
        return f"loss is {value} at step {step + 1} in region {region}"

    for step, evaluation in zip(outcome.steps, outcome.evaluations, strict=True):
        for name, values in evaluation._asdict().items():
            if not np.isfinite(values[trial]):
                return f"{name} is {values[trial]} at step {step}"

    return None
