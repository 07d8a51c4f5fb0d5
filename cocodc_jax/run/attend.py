"""What a run shows while it trains and where, the request to stop, its summary."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

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
from cocodc_jax.run.config import TrainConfig
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
        trains: Callable[[], None] = lambda: None,
    ):
        """Call `trains` at the first steps that are done."""
        self._trains = trains
        self._writer, self._bar, self._earlier_s = writer, bar, earlier_s
        self._peak = peak_tokens_per_second
        self._stall_s = 0.0
        self.seconds = earlier_s  # Of the run so far, including its earlier parts.

    def __call__(self, clock: Clock) -> None:
        """Show and write the progress."""
        self._trains()
        self.seconds = self._earlier_s + clock.wall_s
        step, rate, sent = clock.step, clock.tokens_per_second, clock.bytes_sent
        share, steady = mfu(rate, self._peak), clock.steady_tokens_per_second
        self._bar.update(
            step,
            clock.loss,
            steady,
            clock.in_flight,
            sent,
            mfu=mfu(steady, self._peak),
            step_s=clock.step_s,
        )
        stall_s, self._stall_s = clock.stall_s - self._stall_s, clock.stall_s
        self._writer.write_timing(step, clock.wall_s, rate, stall_s, share)


def progress_bar(
    config: TrainConfig, step: int, console: Console | None
) -> RunProgress:
    """Return the bar of a run that starts at `step`; only process 0 shows it."""
    if jax.process_index() > 0:  # Process 0 reports.
        console = Console(quiet=True)
    run = config.run
    return RunProgress(
        run.steps, step, f"{_method_of(config)} seed {run.seed}", console
    )


def _method_of(config: TrainConfig) -> str:
    """Return the name of a run's method, and of an inner optimizer that is not its."""
    optimizer = config.optimizer.inner_optimizer
    return config.method.method + (f"+{optimizer}" if optimizer else "")


def beginning(session: "Session", step: int) -> str:
    """Return what a run trains and where, before it compiles."""
    config, devices = session.config, session.mesh.devices
    run = config.run
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
    """Return since when a region has trained without the others, None if it has not.

    The last interval does not count, in which the others may have ended a little
    earlier.
    """
    if attendance is None or attendance.alone_since is None:
        return None
    schedule = session.program.method.schedule
    interval = schedule.sync_interval if schedule else 0
    is_long = step - attendance.alone_since > interval
    return attendance.alone_since if is_long else None


def ending(summary: Mapping[str, Any], workdir: pathlib.Path, steps: int) -> list[str]:
    """Return the end of a run in five lines: how it went, and what to do next.

    Args:
      summary: of the run, as in its `summary.json`.
      workdir: its folder.
      steps: that it was to do.
    """
    done = summary["steps"]
    how = f"finished: {done} of {steps} steps in {format_duration(summary['seconds'])}"
    if (since := summary.get("alone_since_step")) is not None:
        how = how.replace("finished", f"finished alone since step {since}", 1)
    if (region := summary.get("result_of_region")) is not None:
        how = how.replace("finished", f"finished with the result of region {region}", 1)
    if rate := summary.get("tokens_per_second"):
        how += f", {format_count(rate)} tokens/s"
    loss = "loss: not evaluated"
    if summary.get("eval_loss") is not None:
        loss = (
            f"loss: {summary['eval_loss']:.4f} on validation text (perplexity "
            f"{summary['eval_perplexity']:.2f})"
        )
        if summary.get("eval_loss_outer") is not None:
            loss += f", {summary['eval_loss_outer']:.4f} of the outer model"
    sent = f"sent: {format_bytes(summary['bytes_sent_per_region'])} by each region"
    stall_s = summary.get("stall_seconds") or 0.0
    if stall_s >= 1:
        sent += f"; waited {format_duration(stall_s)} for messages"
    place = shlex.quote(str(workdir))
    files = f"files: {workdir}/summary.json, metrics.jsonl, checkpoints/{done}"
    to_do = f"next: python -m experiments.timeline --workdir={place}; "
    to_do += f"tensorboard --logdir={place}"
    return [how, loss, sent, files, to_do]


# Where JAX's runtime notes that one of a run's processes received SIGTERM.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_ASK_S = 0.2


class Stop:
    """The request to end a run after a checkpoint; call it once in every turn.

    With several processes, all of them return True from the same call on: the first
    that none of them has reached yet.
    """

    def __init__(self, reached: Callable[[], bool], is_asked: Callable[[], bool]):
        self._reached, self._is_asked = reached, is_asked

    def __call__(self) -> bool:
        """Return whether to end the run now; every process must call it."""
        return self._reached()

    def is_asked(self) -> bool:
        """Return whether a process was asked to stop; any thread may call this."""
        return self._is_asked()


def _notices() -> Callable[[], bool]:
    """Return a function that says whether some process of the run received SIGTERM.

    They may be in the middle of a turn, where they cannot agree on a call of `Stop`.
    """
    asked, looked_s = [False], [-_ASK_S]

    def is_asked() -> bool:
        now = time.monotonic()
        if not asked[0] and now - looked_s[0] >= _ASK_S:
            looked_s[0] = now
            client = distributed.global_state.client
            # It raises an error as long as there is no notice.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                asked[0] = client is not None and bool(
                    client.key_value_try_get(_NOTICE)
                )
        return asked[0]

    return is_asked


@contextlib.contextmanager
def stop_signal() -> Iterator[Stop]:
    """Stop the run after a checkpoint on SIGTERM, as schedulers send before they kill.

    So does Ctrl-C with one process; a second one ends the run at once.
    """
    if jax.process_count() > 1:
        calls, is_asked = itertools.count(1), [False]

        def should_stop() -> bool:
            reached = multihost_utils.reached_preemption_sync_point
            is_asked[0] = is_asked[0] or reached(next(calls))  # True at one call only.
            return is_asked[0]

        yield Stop(should_stop, _notices())
        return
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        print("stopping after a checkpoint; Ctrl-C again ends at once", file=sys.stderr)

    handlers = {
        signal.SIGTERM: lambda number, _: received.append(number),
        signal.SIGINT: interrupt,
    }
    before = {number: signal.getsignal(number) for number in handlers}
    # Background jobs of shells ignore it; None is a handler that is not Python's.
    if before[signal.SIGINT] in (signal.SIG_IGN, None):
        del handlers[signal.SIGINT]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield Stop(lambda: bool(received), lambda: bool(received))
    finally:
        for number in handlers:
            signal.signal(number, before[number])


def summarize(
    session: "Session",
    result: Result,
    seconds: float,
    began: tuple[int, float],
    rollbacks: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the numbers of a finished run, which `began` at a step and a time."""
    run = session.config.run
    evaluated, step = result.last_eval or {}, result.state.step
    of_eval = ("eval_loss", "eval_perplexity", "eval_loss_outer", "region_drift")
    method, exposed_share = session.program.method, None
    lived = step - began[0], time.time() - began[1]
    # Exchanges at every step are part of the step's program, and cannot be separated.
    if not method.per_step:
        warm_step = method.schedule.warm_up_steps if method.schedule else 0
        exposed_share = timeline.exposed_share(session.own_dir, warm_step)
    left_out = {} if result.left_out is None else {"left_out": result.left_out}
    return {
        "method": session.config.method.method,
        "preset": session.config.preset,
        "seed": run.seed,
        "regions": run.regions,
        "parameters": models.num_params(session.model),
        "steps": step,
        "tokens": session.tokens_at(step),
        **{name: evaluated.get(name) for name in of_eval},
        "outer_bytes": session.program.outer_bytes(result.state),
        "bytes_sent_per_region": result.state.bytes_sent,
        "seconds": seconds,
        "stall_seconds": result.stall_seconds,
        "exposed_share": exposed_share,
        "goodput": timeline.goodput(session.own_dir, *lived),
        "tokens_per_second": result.tokens_per_second,
        "mfu": mfu(result.tokens_per_second, session.peak_tokens_per_second),
        "correction_ratio": result.correction_ratio,
        **left_out,
        **({"rollbacks": rollbacks} if run.max_rollbacks else {}),
    }


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Where process 0 shows its records, besides TensorBoard; changes no number.

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
        """Return where this process's records go."""
        if not self._is_here:
            return (tensorboard,)
        mode = self.wandb_mode or None
        about = {"project": self.wandb, "mode": mode, "name": name, "config": config}
        return (tensorboard, functools.partial(weights_and_biases, **about))

    @property
    def _is_here(self) -> bool:
        """Whether this process shows the run: only one does."""
        return bool(self.wandb) and jax.process_index() == 0


NO_TRACKING = Tracking()
