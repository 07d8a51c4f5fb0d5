"""What a run shows while it trains, the request to stop it, and its summary."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import multihost_utils

from cocodc_jax import models
from cocodc_jax._extras import extra
from cocodc_jax.chips import mfu
from cocodc_jax.report.progress import RunProgress
from cocodc_jax.report.records import MetricsWriter
from cocodc_jax.run import timeline
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.train.hooks import Clock, Result

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session

with extra("train"):
    from rich.console import Console


class Watch:
    """Passes the loop's clock to the progress bar and the timing file.

    Attributes:
      seconds: of the run so far, including its earlier parts.
    """

    def __init__(
        self,
        writer: MetricsWriter,
        bar: RunProgress,
        earlier_s: float,
        peak_tokens_per_second: float | None = None,
    ):
        """Start at the seconds of the run's earlier parts."""
        self._writer, self._bar, self._earlier_s = writer, bar, earlier_s
        self._peak = peak_tokens_per_second
        self._stall_s = 0.0
        self.seconds = earlier_s

    def __call__(self, clock: Clock) -> None:
        """Show and write the progress."""
        self.seconds = self._earlier_s + clock.wall_s
        share = mfu(clock.tokens_per_second, self._peak)
        self._bar.update(
            clock.step,
            clock.loss,
            clock.tokens_per_second,
            clock.in_flight,
            clock.bytes_sent,
            share,
        )
        self._writer.write_timing(
            clock.step,
            clock.wall_s,
            clock.tokens_per_second,
            clock.stall_s - self._stall_s,
            share,
        )
        self._stall_s = clock.stall_s


def progress_bar(
    config: TrainConfig, step: int, console: Console | None
) -> RunProgress:
    """Return the bar of a run that starts at `step`; only process 0 shows it."""
    if jax.process_index() > 0:  # Process 0 reports.
        console = Console(quiet=True)
    run, optimizer = config.run, config.optimizer.inner_optimizer
    name = config.method.method + f"+{optimizer}" * bool(optimizer)
    return RunProgress(run.steps, step, f"{name} seed {run.seed}", console)


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Stop the run after a checkpoint on SIGTERM, as schedulers send before they kill.

    Ctrl-C does the same; a second one ends the run at once. With several processes, JAX
    catches SIGTERM in any of them, and all return True at the same call: the first that
    none of them has reached yet.
    """
    if jax.process_count() > 1:
        calls = itertools.count(1)
        yield lambda: multihost_utils.reached_preemption_sync_point(next(calls))
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
        yield lambda: bool(received)
    finally:
        for number in handlers:
            signal.signal(number, before[number])


def summarize(
    session: Session,
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


def _exposed_share(session: Session) -> float | None:
    """Return the share of time with exposed communication.

    Exchanges at every step are part of the step's own program, and cannot be separated.
    """
    method = session.program.method
    if method.per_step:
        return None
    warm_step = method.schedule.warm_up_steps if method.schedule else 0
    return timeline.exposed_share(session.own_dir, warm_step)
