"""The content of a run's `summary.json`."""

from __future__ import annotations

import pathlib
from typing import Any, Protocol

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.run import timeline
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.utilization import mfu
from cocodc_jax.train.hooks import Result


class _Session(Protocol):
    """The part of `session.Session` that is used here."""

    @property
    def config(self) -> TrainConfig: ...

    @property
    def model(self) -> models.TransformerConfig: ...

    @property
    def program(self) -> cc.RegionProgram: ...

    @property
    def own_dir(self) -> pathlib.Path: ...

    @property
    def peak_tokens_per_second(self) -> float | None: ...

    def tokens_at(self, step: int) -> int: ...


def summarize(
    session: _Session,
    result: Result,
    seconds: float,
    wall_s: float,
    rollbacks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the numbers of a finished run."""
    run = session.config.run
    evaluated, step = result.last_eval or {}, result.state.step
    others: dict[str, Any] = {}
    if result.left_out is not None:
        others["left_out"] = result.left_out
    if run.max_rollbacks:
        others["rollbacks"] = rollbacks
    return {
        "method": session.config.method.method,
        "preset": session.config.preset,
        "seed": run.seed,
        "regions": run.regions,
        "parameters": models.num_params(session.model),
        "steps": step,
        "tokens": session.tokens_at(step),
        "eval_loss": evaluated.get("eval_loss"),
        "eval_perplexity": evaluated.get("eval_perplexity"),
        "eval_loss_outer": evaluated.get("eval_loss_outer"),
        "region_drift": evaluated.get("region_drift"),
        "outer_bytes": session.program.outer_bytes(result.state),
        "bytes_sent_per_region": result.state.bytes_sent,
        "seconds": seconds,
        "stall_seconds": result.stall_seconds,
        "exposed_share": _exposed_share(session),
        "goodput": timeline.goodput(session.own_dir, step, wall_s),
        "tokens_per_second": result.tokens_per_second,
        "mfu": mfu(result.tokens_per_second, session.peak_tokens_per_second),
        "correction_ratio": result.correction_ratio,
        **others,
    }


def _exposed_share(session: _Session) -> float | None:
    """Return the share of time with exposed communication.

    Exchanges at every step are part of the step's own program, and cannot be separated.
    """
    method = session.program.method
    if method.per_step:
        return None
    warm_step = method.schedule.warm_up_steps if method.schedule else 0
    return timeline.exposed_share(session.own_dir, warm_step)
