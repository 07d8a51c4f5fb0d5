"""A run's progress bar, its messages, where its records are shown, and its summary."""

import dataclasses
import functools
import pathlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from cocodc_jax import models
from cocodc_jax._extras import check_installed, extra
from cocodc_jax.chips import mfu
from cocodc_jax.fields import check_choices
from cocodc_jax.report.progress import RunProgress
from cocodc_jax.report.records import (
    MetricsWriter,
    OpenMirror,
    tensorboard,
    weights_and_biases,
)
from cocodc_jax.report.units import format_bytes, format_count, format_duration
from cocodc_jax.run import timeline
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.train.hooks import Clock, Result

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session
    from cocodc_jax.run.taking_part import Attendance

with extra("train"):
    from rich.console import Console


class Watch:
    """Passes the loop's clock to the progress bar and the timing file."""

    def __init__(
        self,
        writer: MetricsWriter,
        bar: RunProgress,
        earlier_s: float,
        peak_tokens_per_second: float | None = None,
        note_first_step: Callable[[], None] = lambda: None,
    ):
        """Watch a loop from its start.

        Args:
          writer: of the run's records, whose timing file gets a line every turn.
          bar: shows the progress.
          earlier_s: seconds that the run took before.
          peak_tokens_per_second: tokens per second at an MFU of 1, None if unknown.
          note_first_step: called after every turn; only the first call has an effect.
        """
        self.seconds = earlier_s  # Of the run so far, including its earlier parts.

        self._writer = writer
        self._bar = bar
        self._earlier_s = earlier_s
        self._peak = peak_tokens_per_second
        self._note_first_step = note_first_step
        self._stall_s = 0.0

    def __call__(self, clock: Clock) -> None:
        """Show and write the progress."""
        self._note_first_step()
        self.seconds = self._earlier_s + clock.wall_s

        self._bar.update(
            clock.step,
            clock.loss,
            clock.steady_tokens_per_second,
            clock.in_flight,
            clock.bytes_sent,
            mfu=mfu(clock.steady_tokens_per_second, self._peak),
            step_s=clock.step_s,
        )

        stall_s = clock.stall_s - self._stall_s
        self._stall_s = clock.stall_s
        self._writer.write_timing(
            step=clock.step,
            wall_s=clock.wall_s,
            tokens_per_second=clock.tokens_per_second,
            stall_s=stall_s,
            mfu=mfu(clock.tokens_per_second, self._peak),
        )


def progress_bar(
    config: TrainConfig, step: int, console: Console | None
) -> RunProgress:
    """Return the bar of a run that starts at `step`; only process 0 shows it."""
    if jax.process_index() > 0:  # Process 0 reports.
        console = Console(quiet=True)
    title = f"{_method_of(config)} seed {config.run.seed}"
    return RunProgress(config.run.steps, step, title, console)


def _method_of(config: TrainConfig) -> str:
    """Return a run's method, with the inner optimizer if it is not the method's own."""
    method = config.method.method
    optimizer = config.optimizer.inner_optimizer
    return f"{method}+{optimizer}" if optimizer else method


def beginning(session: "Session", step: int) -> str:
    """Describe what a run trains and where, before it compiles."""
    config = session.config
    run = config.run
    devices = session.mesh.devices

    regions = f"in {run.regions} regions"
    if session.place is not None:
        regions = f"in region {session.place.region} of {run.regions}"

    kinds = sorted({device.device_kind for device in devices.flat})
    kind = "CPU" if kinds == ["cpu"] else " and ".join(kinds)
    where = f"on {devices.size} {kind} device{'s' if devices.size > 1 else ''}"
    if jax.process_count() > 1:
        where += f" of {jax.process_count()} processes"

    num_params = format_count(models.num_params(session.model))
    tokens = format_count(config.tokens_per_step)
    steps = f"steps {step + 1} to {run.steps}" if step else f"{run.steps} steps"
    return (
        f"training {_method_of(config)} {regions} {where}: {num_params} parameters, "
        f"{steps} of {tokens} tokens, in {session.workdir}\n"
        "compiling; the first steps follow"
    )


def alone_since(
    session: "Session", attendance: "Attendance | None", step: int
) -> int | None:
    """Return the step since which a region has trained alone; None if it has not.

    The last interval does not count, because the others may have ended a little
    earlier.
    """
    if attendance is None or attendance.alone_since is None:
        return None
    schedule = session.program.method.schedule
    interval = schedule.sync_interval if schedule else 0
    is_long = step - attendance.alone_since > interval
    return attendance.alone_since if is_long else None


def ending(summary: Mapping[str, Any], workdir: pathlib.Path, steps: int) -> list[str]:
    """Describe the end of a run in five lines: its results, and what to do next.

    Args:
      summary: of the run, as in its `summary.json`.
      workdir: its folder.
      steps: of the full run.
    """
    done = summary["steps"]
    place = shlex.quote(str(workdir))
    return [
        f"{_how_it_ended(summary)}: {done} of {steps} steps in {_how_fast(summary)}",
        f"loss: {_final_loss(summary)}",
        f"sent: {_what_it_sent(summary)}",
        f"files: {workdir}/summary.json, metrics.jsonl, checkpoints/{done}",
        f"next: python -m experiments.timeline --workdir={place}; "
        f"tensorboard --logdir={place}",
    ]


def _how_it_ended(summary: Mapping[str, Any]) -> str:
    region = summary.get("result_of_region")
    alone_since = summary.get("alone_since_step")
    words = "finished"
    if region is not None:
        words += f" with the result of region {region}"
    if alone_since is not None:
        words += f" alone since step {alone_since}"
    return words


def _how_fast(summary: Mapping[str, Any]) -> str:
    duration = format_duration(summary["seconds"])
    rate = summary.get("tokens_per_second")
    return f"{duration}, {format_count(rate)} tokens/s" if rate else duration


def _final_loss(summary: Mapping[str, Any]) -> str:
    loss = summary.get("eval_loss")
    if loss is None:
        return "not evaluated"

    perplexity = summary["eval_perplexity"]
    text = f"{loss:.4f} on validation text (perplexity {perplexity:.2f})"
    outer_loss = summary.get("eval_loss_outer")
    if outer_loss is not None:
        text += f", {outer_loss:.4f} of the outer model"
    return text


def _what_it_sent(summary: Mapping[str, Any]) -> str:
    text = f"{format_bytes(summary['bytes_sent_per_region'])} by each region"
    stall_s = summary.get("stall_seconds") or 0.0
    if stall_s >= 1:
        text += f"; waited {format_duration(stall_s)} for messages"
    return text


def summarize(
    session: "Session",
    result: Result,
    seconds: float,
    began: tuple[int, float],
    rollbacks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the summary of a finished run; `began` is its first step and its time."""
    run = session.config.run
    method = session.program.method
    evaluated = result.last_eval or {}
    step = result.state.step

    began_step, began_s = began
    goodput = timeline.goodput(
        session.own_dir, step - began_step, time.time() - began_s
    )
    exposed_share = None
    # Exchanges at every step are part of the step's program, and cannot be separated.
    if not method.per_step:
        warm_step = method.schedule.warm_up_steps if method.schedule else 0
        exposed_share = timeline.exposed_share(session.own_dir, warm_step)

    optional: dict[str, Any] = {}
    if result.left_out is not None:
        optional["left_out"] = result.left_out
    if run.max_rollbacks:
        optional["rollbacks"] = rollbacks

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
        "exposed_share": exposed_share,
        "goodput": goodput,
        "tokens_per_second": result.tokens_per_second,
        "mfu": mfu(result.tokens_per_second, session.peak_tokens_per_second),
        "correction_ratio": result.correction_ratio,
        **optional,
    }


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Where process 0 shows its records besides TensorBoard; it changes no number.

    Attributes:
      wandb: project in Weights & Biases that shows the run. Default: none.
      wandb_mode: online, offline (`wandb sync` uploads it later) or disabled. Default:
        what WANDB_MODE in the environment says.
    """

    wandb: str = ""
    wandb_mode: str = ""

    def __post_init__(self):
        check_choices(self, wandb_mode=("", "online", "offline", "disabled"))
        if self.wandb_mode and not self.wandb:
            raise ValueError(
                f"wandb_mode={self.wandb_mode} has no project; add --wandb=PROJECT"
            )

    def check(self) -> None:
        """Refuse a project if process 0 lacks the package."""
        if self._is_here:
            check_installed("wandb", "wandb", f"wandb={self.wandb}")

    def mirrors(self, name: str, config: Mapping[str, Any]) -> Sequence[OpenMirror]:
        """Return the services that show this process's records."""
        if not self._is_here:
            return (tensorboard,)
        with_wandb = functools.partial(
            weights_and_biases,
            project=self.wandb,
            mode=self.wandb_mode or None,
            name=name,
            config=config,
        )
        return (tensorboard, with_wandb)

    @property
    def _is_here(self) -> bool:
        """Whether this process is the one that shows the run."""
        return bool(self.wandb) and jax.process_index() == 0


NO_TRACKING = Tracking()
