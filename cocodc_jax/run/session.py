"""One run from its configuration: data, model, devices, files; then the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax._extras import extra
from cocodc_jax.chips import peak_tokens_per_second
from cocodc_jax.data.corpora.row_files import RecordError
from cocodc_jax.data.streams import TrainStream, cut_to_sizes
from cocodc_jax.data.text_data import TextData
from cocodc_jax.elastic.link import (
    AskedToStopError,
    LeftBehindError,
    SupersededError,
)
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.mesh import Mesh
from cocodc_jax.engine.transfer import gather
from cocodc_jax.fields import Kind
from cocodc_jax.files import write_whole
from cocodc_jax.report.comparison import SUMMARY_FILE
from cocodc_jax.run import attend, resume, timeline
from cocodc_jax.run.adoption import Source
from cocodc_jax.run.attend import NO_TRACKING, Tracking
from cocodc_jax.run.bucket import Bucket
from cocodc_jax.run.build import init_params, say_if_uneven
from cocodc_jax.run.config import TrainConfig, dumps, kind_of
from cocodc_jax.run.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.fault_watch import FaultWatch
from cocodc_jax.run.live_metrics import LiveMetrics
from cocodc_jax.run.monitor import NO_MONITORING, Monitor, Monitoring
from cocodc_jax.run.resume import CHECKPOINTS, ResumeError, only_writer
from cocodc_jax.run.taking_part import Attendance, Begun, taking_part
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.finite import NonFiniteLossError
from cocodc_jax.train.hooks import Hooks
from cocodc_jax.train.joining import Carried
from cocodc_jax.train.loop import train
from cocodc_jax.train.spikes import LossSpikeError

with extra("train"):
    from rich.console import Console

# Errors that a user can act on without a traceback: a non-finite loss, a full or
# missing disk, a checkpoint of other data, rows without text, regions that went on.
RUN_ERRORS = (
    NonFiniteLossError,
    OSError,
    ResumeError,
    RecordError,
    LeftBehindError,
    SupersededError,
)


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that is ready to train.

    Attributes:
      config: of the run.
      workdir: where its files go.
      text: the corpus, opened.
      model: the transformer, with the tokenizer's vocabulary.
      mesh: the inner mesh.
      program: the method, not yet compiled.
      evaluate: evaluates parameters on the validation batches.
      tracking: where process 0 also shows its records.
      monitoring: how this process is watched from outside.
      place: of this region, if each is a separate job.
      elastic: the flags of such regions.
      bucket: behind the workdir, if any.
    """

    config: TrainConfig
    workdir: pathlib.Path
    text: TextData
    model: models.TransformerConfig
    mesh: Mesh
    program: cc.RegionProgram
    evaluate: Callable[[models.Params], jax.Array]
    tracking: Tracking = NO_TRACKING
    monitoring: Monitoring = NO_MONITORING
    place: Place | None = None
    elastic: ElasticFlags = NOT_ELASTIC
    bucket: Bucket | None = None

    def train(self, console: Console | None = None) -> dict[str, Any]:
        """Train to the last step, resuming from the newest checkpoint if there is one.

        Returns:
          The summary, which is also written to the workdir.

        Raises:
          NonFiniteLossError: naming step, region and last good checkpoint.
          ResumeError: if the newest checkpoint does not belong to this run, or another
            run has begun in the folder since this one was prepared.
          LeftBehindError: if the other regions go on without this region, and it cannot
            rejoin.
          SupersededError: if this region was started again elsewhere.
          OSError: if no region admits this one, or the disk fails; a `CheckpointError`
            names the last good one.
        """
        run, process = self.config.run, jax.process_index()
        stream = self.text.train_stream()
        with (
            only_writer(self.own_dir),
            self.bucket.writing(process) if self.bucket else contextlib.nullcontext(),
            contextlib.closing(stream),
            Checkpoints(
                self.checkpoint_dir, run.keep_checkpoints, cleans=True
            ) as saved,
            self._watched() as monitor,
            contextlib.ExitStack() as stack,
        ):
            if (finished := self._finished(saved)) is not None:
                return finished
            began_s, rollbacks = time.time(), []
            seconds, entered_s = 0.0, began_s
            began_step: int | None = None  # Not 0 where it goes on from another run.
            carried: Carried | None = None
            own_step = 0
            stop: attend.Stop | None = None
            is_stopping = False

            def listen() -> attend.Stop:
                nonlocal stop
                stop = stop or stack.enter_context(attend.stop_signal())
                return stop

            # One for all links: faults end after a return too.
            flags = self.elastic
            least_s = flags.beat_s / 10
            watch = FaultWatch(self.own_dir, flags.on_fault, least_s, monitor.fault)
            while True:
                at = stream.get_state()
                trains = stack.enter_context(resume.starting(self.own_dir))
                try:
                    if carried is None:
                        begun = self.begin(saved, stream)
                    else:
                        times = {"seconds": seconds, "began_s": began_s}
                        begun = carried.state, None, times
                    among = contextlib.nullcontext((begun, None))
                    own_step = begun[0].step
                    is_stopping = is_stopping or (stop is not None and stop())
                    if self.place is not None and not is_stopping:
                        among = taking_part(
                            self, begun, stream, carried, monitor, watch, listen
                        )
                    with among as (begun, attendance):
                        if carried is not None:  # It may be ahead of the others.
                            saved.forget_after(begun[0].step)
                        carried = None
                        began_s = begun[2].get("began_s", began_s)
                        if began_step is None:
                            first = 0 if "began_s" in begun[2] else begun[0].step
                            began_step = int(begun[2].get("began_step", first))
                        began = began_step, began_s
                        entered_s, seconds = time.time(), begun[2].get("seconds", 0.0)
                        if rollbacks:  # The run continues with the next data.
                            stream.set_state(at)
                        # A stop that is asked for while a run rolls back still holds.
                        should_stop = (lambda: True) if is_stopping else listen()
                        rest = attendance, monitor, console, began, rollbacks, trains
                        return self._train_on(saved, stream, begun, should_stop, *rest)
                except AskedToStopError:
                    if carried is None and own_step < run.steps:
                        monitor.ended(own_step, run.steps, None)
                        return {"steps": own_step}  # It has done nothing yet.
                    stream.set_state(at)
                    is_stopping = True  # It saves what it carries.
                except LeftBehindError as error:
                    if error.state is None:
                        raise
                    print(f"{error}: coming back", file=sys.stderr, flush=True)
                    monitor.notify("region_lost", f"{error}: coming back")
                    carried, seconds = error.state, seconds + time.time() - entered_s
                except LossSpikeError as error:
                    to_step = saved.latest_step or 0
                    rollbacks.append({**error.spikes[0]._asdict(), "to_step": to_step})
                    if jax.process_index() == 0:
                        print(
                            f"warning: {error}; the run returns to it, or else to its "
                            "start, and continues with the next data",
                            file=sys.stderr,
                        )

    def _finished(self, saved: Checkpoints) -> dict[str, Any] | None:
        """Write the configuration; return the summary if all processes are finished."""
        changed: resume.Changes = {}
        if jax.process_index() == 0:
            try:
                folders = self.workdir, self.checkpoint_dir
                there = resume.write_config(self.config, *folders)
            except ValueError as error:
                raise ResumeError(str(error)) from error
            changed = there.changes(self.config)
        changed = gather(changed)[0]
        summary, steps = None, self.config.run.steps
        # Whether the data are the same, the checkpoint checks.
        has_data = any(kind_of(name) is Kind.DATA for name in changed)
        if saved.latest_step == steps and not has_data:
            summary = resume.finished_summary(self.own_dir / SUMMARY_FILE, steps)
        if not all(gather(summary is not None)):
            return None
        if changed and jax.process_index() == 0:
            print(
                f"note: the run in {self.workdir} is finished; it was not run again "
                f"with {resume.listed(changed)}",
                file=sys.stderr,
            )
        return summary

    def _train_on(
        self,
        saved: Checkpoints,
        stream: TrainStream,
        begun: Begun,
        should_stop: Callable[[], bool],
        attendance: Attendance | None,
        monitor: Monitor,
        console: Console | None,
        began: tuple[int, float],
        rollbacks: list[dict[str, Any]],
        trains: Callable[[], None],
    ) -> dict[str, Any]:
        """Train from the run's current step; see `train`."""
        run, (state, progress, position) = self.config.run, begun
        if jax.process_index() == 0:
            resume.go_on(self.config, self.workdir, state.step)
        if state.step < run.steps:  # Else it was finished, with fewer steps.
            (self.own_dir / SUMMARY_FILE).unlink(missing_ok=True)
        everyone = self.program.regions.batch_sizes
        sizes = [everyone[region] for region in self.text.regions]
        mirrors = self.tracking.mirrors(self.workdir.name, self.config.to_json())
        with (
            resume.open_records(self.own_dir, position, state.step, mirrors) as writer,
            attend.progress_bar(self.config, state.step, console) as bar,
        ):
            if state.step < run.steps:
                say_if_uneven(self.config, self.program)
                bar.say(attend.beginning(self, state.step))
            earlier_s = position.get("seconds", 0.0)
            watch = attend.Watch(
                writer, bar, earlier_s, self.peak_tokens_per_second, trains
            )

            def snapshot(progress: dict) -> dict:
                own = {
                    "progress": progress,
                    "stream": stream.get_state(),
                    "metrics_bytes": writer.offset,
                    "seconds": watch.seconds,
                    "began_step": began[0],
                    "began_s": began[1],
                }
                if self.bucket:  # The files that the checkpoint refers to.
                    self.bucket.send(jax.process_index())
                return {"processes": gather(own)}

            hooks = Hooks(writer.write, watch, snapshot, should_stop, of_all=gather)
            hooks = monitor.told_by(hooks, state.step, began, saved.latest_step)
            if attendance is not None:
                hooks = attendance.told_by(hooks, monitor.merged)
            result = train(
                self.program, state,
                cut_to_sizes(stream, sizes, self.config.data.batch_per_region),
                run.steps, self.tokens_at, cadence=run.cadence, hooks=hooks,
                evaluate=self.evaluate, checkpoints=saved, progress=progress,
                earlier_s=earlier_s,
                spikes=run.spikes(run.max_rollbacks - len(rollbacks)),
            )  # fmt: skip
        timeline.save(self.own_dir, result.timeline, state.step)
        gather("every process has written its own")
        if jax.process_index() == 0:
            timeline.show(self.workdir)
        seconds = earlier_s + result.seconds
        summary = attend.summarize(self, result, seconds, began, rollbacks)
        if "result_of_region" in position:
            summary["result_of_region"] = position["result_of_region"]
        alone = attend.alone_since(self, attendance, result.state.step)
        if alone is not None:
            summary["alone_since_step"] = alone
        if result.state.step == run.steps:
            write_whole(self.own_dir / SUMMARY_FILE, dumps(summary))
        if jax.process_index() == 0:
            monitor.ended(summary["steps"], run.steps, summary["eval_loss"])
        return summary

    def _watched(self) -> contextlib.AbstractContextManager[Monitor]:
        schedule = self.program.method.schedule
        delay = None
        if schedule is not None and not schedule.is_measured:
            delay = schedule.delay_steps
        live = LiveMetrics(
            self.config.run.steps,
            self.tokens_at,
            None if self.place else self.config.run.regions,
            self.peak_tokens_per_second,
        )
        own = self.place.region if self.place else None
        regions = self.text.regions
        return self.monitoring.watching(live, str(self.workdir), regions, own, delay)

    def first_params(self) -> tuple[models.Params, jax.Array]:
        """Return one region's initial parameters, and the key for the regions' keys."""
        key = jax.random.key(self.config.run.seed)
        return self.init_params(jax.random.fold_in(key, 0)), jax.random.fold_in(key, 1)

    def begin(self, saved: Checkpoints, stream: TrainStream) -> Begun:
        """Return state, progress and positions at the newest checkpoint, or step 0."""
        try:
            if (newest := saved.restore(self.program)) is not None:
                state, extra = newest
                found = resume.position(extra["processes"])
                stream.set_state(found["stream"])
                progress = resume.progress(extra["processes"], self.text.regions)
                return state, progress, found
            if source := Source.of(self.config):
                state = source.adopt(self.program, self.model, self.mesh, stream)
                return state, None, {}
        except ValueError as error:
            raise ResumeError(
                f"the run in {self.workdir} cannot go on: {error}; restore what was "
                "changed, or name another workdir"
            ) from error
        return self.program.init(*self.first_params()), None, {}

    @property
    def checkpoint_dir(self) -> Any:
        """Folder or bucket of the checkpoints."""
        return (self.bucket.folder if self.bucket else self.workdir) / CHECKPOINTS

    @property
    def own_dir(self) -> pathlib.Path:
        """Folder of this process's own files: the workdir for process 0."""
        process = jax.process_index()
        return self.workdir / f"process_{process}" if process else self.workdir

    def init_params(self, key: jax.Array) -> models.Params:
        """Return one region's initial parameters, equal in all regions."""
        return init_params(self.config.run, self.model, key)

    @property
    def peak_tokens_per_second(self) -> float | None:
        """Tokens per second of all regions at an MFU of 1; None on CPUs."""
        flops = models.flops_per_token(self.model, self.config.data.sequence_length)
        own = peak_tokens_per_second(self.mesh.devices.flat, flops)
        # As `tokens_at`, also where the mesh has one region's devices.
        return own and own * self.program.regions.num / self.program.num_regions

    def tokens_at(self, step: int) -> int:
        """Return the tokens that all regions together have trained on by `step`."""
        sequences = self.program.regions.sequences_done(step).sum()
        return int(sequences) * self.config.data.sequence_length
