"""One attempt to train a run to its last step, and where the next one continues.

Most runs need one attempt. Another one follows where a region that was cut off from the
others rejoins them, where a loss spike sends the run back to its last checkpoint, and
where a region that returns is asked to stop before the others have admitted it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from cocodc_jax.data.streams import TrainStream, cut_to_sizes
from cocodc_jax.elastic.link import LeftBehindError
from cocodc_jax.engine.transfer import gather
from cocodc_jax.files import write_whole
from cocodc_jax.report.comparison import SUMMARY_FILE
from cocodc_jax.report.records import MetricsWriter
from cocodc_jax.run import attend, resume, timeline
from cocodc_jax.run.build import say_if_uneven
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.run.fault_watch import FaultWatch
from cocodc_jax.run.monitor import Monitor
from cocodc_jax.run.stopping import StopListener
from cocodc_jax.run.taking_part import Attendance, Start, taking_part
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.hooks import Hooks, Result
from cocodc_jax.train.joining import Carried
from cocodc_jax.train.loop import train
from cocodc_jax.train.spikes import LossSpikeError

if TYPE_CHECKING:
    from rich.console import Console

    from cocodc_jax.run.session import Session


@dataclasses.dataclass
class Attempt:
    """An attempt to train a run to its last step.

    `run` trains. Where it raises, `save_and_stop`, `rejoin` or `roll_back` return the
    attempt that follows.

    Attributes:
      session: the run.
      stream: its data; an attempt begins with the batch that the stream is at, or at
        the position of the checkpoint that it restores.
      checkpoints: of the run.
      monitor: passes on what happens.
      fault_watch: looks for faults of regions and links. One for all attempts, as a
        fault may end after a region has rejoined.
      listener: for the request to stop.
      console: where the progress is shown; None is the terminal.
      carried: what this region continues with, if the others went on without it.
      is_stopping: whether the run was asked to stop. It then saves, and ends.
      rollbacks: spikes after which the run returned to a checkpoint, for its summary.
      began_step: step that the run began at, not 0 if it adopted another run's state;
        None until an attempt trains.
      began_s: time at which the run began, in seconds since the epoch.
      seconds: that the run trained before this attempt.
      entered_s: time at which this attempt began to train.
      own_step: step of this region's own checkpoint, or of what it carries.
      first_batch: position of the data where this attempt began.
    """

    session: Session
    stream: TrainStream
    checkpoints: Checkpoints
    monitor: Monitor
    fault_watch: FaultWatch
    listener: StopListener
    console: Console | None = None

    # What one attempt passes on to the next.
    carried: Carried | None = None
    is_stopping: bool = False
    rollbacks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    began_step: int | None = None
    began_s: float = dataclasses.field(default_factory=time.time)
    seconds: float = 0.0

    # Known once this attempt has begun.
    entered_s: float = dataclasses.field(default=0.0, init=False)
    own_step: int = dataclasses.field(default=0, init=False)
    first_batch: Any = dataclasses.field(default=None, init=False)

    def run(self) -> dict[str, Any]:
        """Train to the last step; return the summary.

        Raises:
          AskedToStopError: if the run should stop before this region takes part in it.
          LeftBehindError: if the other regions went on without this one; its `state` is
            what the region carries, None if it cannot rejoin.
          LossSpikeError: if the run should return to its last checkpoint.
        """
        self.first_batch = self.stream.get_state()

        with (
            resume.starting(self.session.own_dir) as note_first_step,
            # The start is not kept here: a region may begin with another's state.
            self._among_regions(self._own_start()) as (start, attendance),
        ):
            if self.carried is not None:  # It may be ahead of the others.
                self.checkpoints.forget_after(start.state.step)
                self.carried = None  # It is as large as the state.

            self._note_times(start)
            if self.rollbacks:  # The run continues with the next data.
                self.stream.set_state(self.first_batch)
            return self._train(start, attendance, note_first_step)

    @property
    def has_unsaved_work(self) -> bool:
        """Whether the steps that this region carries, or its summary, are not saved."""
        is_done = self.own_step >= self.session.config.run.steps
        return is_done or self.carried is not None

    def save_and_stop(self) -> Attempt:
        """Return the attempt that saves what this region carries, and ends."""
        self.stream.set_state(self.first_batch)
        return dataclasses.replace(self, is_stopping=True)

    def rejoin(self, error: LeftBehindError) -> Attempt:
        """Return the attempt in which this region comes back with its own state."""
        print(f"{error}: coming back", file=sys.stderr, flush=True)
        self.monitor.notify("region_lost", f"{error}: coming back")

        seconds = self.seconds + time.time() - self.entered_s
        return dataclasses.replace(self, carried=error.state, seconds=seconds)

    def roll_back(self, error: LossSpikeError) -> Attempt:
        """Return the attempt that starts at the last checkpoint, with the next data."""
        to_step = self.checkpoints.latest_step or 0
        rollback = {**error.spikes[0]._asdict(), "to_step": to_step}

        if jax.process_index() == 0:
            print(
                f"warning: {error}; the run returns to it, or else to its start, and "
                "continues with the next data",
                file=sys.stderr,
            )
        return dataclasses.replace(self, rollbacks=[*self.rollbacks, rollback])

    def _own_start(self) -> Start:
        """Return where this region would start by itself."""
        if self.carried is None:
            start = self.session.begin(self.checkpoints, self.stream)
        else:
            times = {"seconds": self.seconds, "began_s": self.began_s}
            start = Start(self.carried.state, None, times)

        self.own_step = start.state.step
        return start

    def _among_regions(
        self, start: Start
    ) -> contextlib.AbstractContextManager[tuple[Start, Attendance | None]]:
        """Return the context in which an elastic region takes part in the run.

        It does not take part where regions are one job, and where it only saves.
        """
        # Every process calls it equally often.
        self.is_stopping = self.is_stopping or self.listener.hears_request()
        if self.session.place is None or self.is_stopping:
            return contextlib.nullcontext((start, None))

        return taking_part(
            self.session,
            start,
            self.stream,
            carried=self.carried,
            monitor=self.monitor,
            fault_watch=self.fault_watch,
            listen=self.listener.listen,
        )

    def _note_times(self, start: Start) -> None:
        """Note when the run began, and how long it has trained."""
        position = start.position
        self.began_s = position.get("began_s", self.began_s)
        if self.began_step is None:
            # Without a time it is new in this folder, at step 0 or another run's step.
            first_step = 0 if "began_s" in position else start.state.step
            self.began_step = int(position.get("began_step", first_step))

        self.entered_s = time.time()
        self.seconds = position.get("seconds", 0.0)

    def _train(
        self,
        start: Start,
        attendance: Attendance | None,
        note_first_step: Callable[[], None],
    ) -> dict[str, Any]:
        """Train from a start, with the run's files open; return the summary."""
        session = self.session
        config = session.config
        run = config.run
        state, progress, position = start
        # A request to stop that came before still holds.
        should_stop = (lambda: True) if self.is_stopping else self.listener.listen()

        if jax.process_index() == 0:
            resume.go_on(config, session.workdir, state.step)
        if state.step < run.steps:  # Else it was finished, with fewer steps.
            (session.own_dir / SUMMARY_FILE).unlink(missing_ok=True)

        mirrors = session.tracking.mirrors(session.workdir.name, config.to_json())
        with (
            resume.open_records(
                session.own_dir, position, state.step, mirrors
            ) as writer,
            attend.progress_bar(config, state.step, self.console) as bar,
        ):
            if state.step < run.steps:
                say_if_uneven(config, session.program)
                bar.say(attend.beginning(session, state.step))

            watch = attend.Watch(
                writer,
                bar,
                self.seconds,
                session.peak_tokens_per_second,
                note_first_step,
            )
            hooks = Hooks(
                record=writer.write,
                clock=watch,
                snapshot=lambda progress: self._snapshot(progress, writer, watch),
                should_stop=should_stop,
                of_all=gather,
            )
            hooks = self.monitor.extend(
                hooks, state.step, self._began, self.checkpoints.latest_step
            )
            if attendance is not None:
                hooks = attendance.extend(hooks, self.monitor.merged)

            result = train(
                session.program,
                state,
                cut_to_sizes(
                    self.stream, session.batch_sizes, config.data.batch_per_region
                ),
                run.steps,
                session.tokens_at,
                cadence=run.cadence,
                hooks=hooks,
                evaluate=session.evaluate,
                checkpoints=self.checkpoints,
                progress=progress,
                earlier_s=self.seconds,
                spikes=run.spikes(run.max_rollbacks - len(self.rollbacks)),
            )

        timeline.save(session.own_dir, result.timeline, state.step)
        gather("every process has written its own")
        return self._finish(result, position, attendance)

    def _snapshot(
        self, progress: dict[str, Any], writer: MetricsWriter, watch: attend.Watch
    ) -> dict[str, Any]:
        """Return what a checkpoint keeps of every process besides the state."""
        of_process = {
            "progress": progress,
            "stream": self.stream.get_state(),
            "metrics_bytes": writer.offset,
            "seconds": watch.seconds,
            "began_step": self.began_step,
            "began_s": self.began_s,
        }
        if self.session.bucket:  # The files that the checkpoint refers to.
            self.session.bucket.send(jax.process_index())
        return {"processes": gather(of_process)}

    def _finish(
        self, result: Result, position: dict[str, Any], attendance: Attendance | None
    ) -> dict[str, Any]:
        """Return the summary; write it if the run is at its last step."""
        session = self.session
        steps = session.config.run.steps
        step = result.state.step

        seconds = self.seconds + result.seconds
        summary = attend.summarize(
            session, result, seconds, self._began, self.rollbacks
        )
        if "result_of_region" in position:
            summary["result_of_region"] = position["result_of_region"]
        alone_since = attend.alone_since(session, attendance, step)
        if alone_since is not None:
            summary["alone_since_step"] = alone_since

        if step == steps:
            write_whole(session.own_dir / SUMMARY_FILE, dumps(summary))
        if jax.process_index() == 0:
            self.monitor.ended(summary["steps"], steps, summary["eval_loss"])
        return summary

    @property
    def _began(self) -> tuple[int, float]:
        """Step and time at which the run began."""
        assert self.began_step is not None
        return self.began_step, self.began_s
