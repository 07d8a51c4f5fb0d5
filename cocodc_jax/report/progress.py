"""Progress of a run: a live bar in a terminal, an occasional plain line elsewhere."""

import time
from collections.abc import Callable

from cocodc_jax._extras import extra
from cocodc_jax.report.units import format_bytes, format_count, format_duration

with extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

PLAIN_INTERVAL_S = 10.0


class RunProgress:
    """Context manager that shows how far a run is; see `update`.

    >>> with RunProgress(num_steps=300, console=Console(width=120)) as progress:
    ...     progress.update(300, 1.71, 22_000.0, in_flight=2, bytes_sent=1_200_000)
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
        self._num_steps, self._start_step, self._label = num_steps, start_step, label
        self._console, self._clock = console or Console(), clock
        self._begin_s, self._last_line_s = clock(), float("-inf")
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
            )

    def __enter__(self) -> "RunProgress":
        self._begin_s = self._clock()
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                self._label, True, self._num_steps, self._start_step, status=""
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        in_flight: int,
        bytes_sent: float,
        mfu: float | None = None,
    ) -> None:
        """Show the state of the run after `step` inner steps.

        `tokens_per_second` is of all regions together, `in_flight` counts fragments,
        `bytes_sent` is of one region; an `mfu` of None is not shown.
        """
        share = "" if mfu is None else f"MFU {100 * mfu:.1f} %  "
        status = (
            f"loss {loss:.3f}  {format_count(tokens_per_second)} tokens/s  {share}"
            f"{in_flight} in flight  {format_bytes(bytes_sent)} sent  "
            f"{self._time_left(step)} left"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
            return
        now_s, is_last = self._clock(), step >= self._num_steps
        if is_last or now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            line = f"{self._label} step {step}/{self._num_steps}  {status}".lstrip()
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _time_left(self, step: int) -> str:
        done_steps = step - self._start_step
        if done_steps <= 0:
            return "?"
        step_s = (self._clock() - self._begin_s) / done_steps
        return format_duration(step_s * (self._num_steps - step))
