"""Progress of a run: a live bar in a terminal, an occasional plain line elsewhere."""

import time
from collections.abc import Callable

from cocodc_jax._extras import extra
from cocodc_jax.report.units import format_bytes, format_count, format_duration

with extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

PLAIN_INTERVAL_S = 10.0
_WIDE = 110  # Columns of a terminal that the bar with all numbers needs.


class RunProgress:
    """Context manager that shows the progress of a run; see `update`.

    >>> with RunProgress(num_steps=300, console=Console(width=120)) as progress:
    ...     progress.update(300, 1.71, 22_000.0, 2, 1_200_000, step_s=0.5)
    step 300/300  loss 1.710  22.0 k tokens/s  2 in flight  1.20 MB sent  0 s left
    """

    def __init__(
        self,
        num_steps: int,
        start_step: int = 0,
        label: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the display of a run of `num_steps` inner steps.

        A resumed run has done `start_step` of them. The console, by default standard
        output, gets a bar if it is a terminal, else a line each `PLAIN_INTERVAL_S`
        seconds and at the last step.
        """
        self._num_steps = num_steps
        self._start_step = start_step
        self._label = label
        self._console = console or Console()
        self._clock = clock
        self._last_line_s = float("-inf")
        self._is_narrow = self._console.width < _WIDE
        self._bar = None

        if self._console.is_terminal:
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[status]}", markup=False),
            ]
            if not self._is_narrow:
                columns.insert(1, BarColumn(bar_width=10))
            self._bar = Progress(*columns, console=self._console)

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                self._label,
                total=self._num_steps,
                completed=self._start_step,
                status="compiling",
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print lines above the bar, or plainly if there is no bar."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float | None,
        in_flight: int,
        bytes_sent: float,
        mfu: float | None = None,
        step_s: float | None = None,
    ) -> None:
        """Show the state of the run after `step` inner steps.

        Args:
          step: inner steps done.
          loss: of the last one.
          tokens_per_second: of all regions together, without the time of compilation;
            None if that is not yet known.
          in_flight: number of fragments.
          bytes_sent: of one region.
          mfu: model FLOPs utilization; None is not shown.
          step_s: seconds of a step, for the time left; None if not yet known.
        """
        parts = [f"loss {loss:.3f}"]
        if tokens_per_second is not None:
            parts.append(f"{format_count(tokens_per_second)} tokens/s")
        if mfu is not None:
            parts.append(f"MFU {100 * mfu:.1f} %")
        if self._bar is None or not self._is_narrow:
            parts.append(f"{in_flight} in flight")

        parts.append(f"{format_bytes(bytes_sent)} sent")
        if step_s is not None:
            left_s = step_s * (self._num_steps - step)
            parts.append(f"{format_duration(left_s)} left")

        status = "  ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
            return

        now_s = self._clock()
        is_last = step >= self._num_steps
        if is_last or now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            line = f"{self._label} step {step}/{self._num_steps}  {status}".lstrip()
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
