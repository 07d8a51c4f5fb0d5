"""A run that is ready to train: data, model, devices and files; then the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax._extras import extra
from cocodc_jax.chips import peak_tokens_per_second
from cocodc_jax.data.corpora.row_files import RecordError
from cocodc_jax.data.streams import TrainStream
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
from cocodc_jax.report.comparison import SUMMARY_FILE
from cocodc_jax.run import resume
from cocodc_jax.run.adoption import Source
from cocodc_jax.run.attempt import Attempt
from cocodc_jax.run.attend import NO_TRACKING, Tracking
from cocodc_jax.run.bucket import Bucket
from cocodc_jax.run.build import init_params
from cocodc_jax.run.config.elastic_flags import NOT_ELASTIC, ElasticFlags
from cocodc_jax.run.config.train_config import TrainConfig, kind_of
from cocodc_jax.run.fault_watch import FaultWatch
from cocodc_jax.run.live_metrics import LiveMetrics
from cocodc_jax.run.monitor import NO_MONITORING, Monitor, Monitoring
from cocodc_jax.run.resume import CHECKPOINTS, ResumeError, only_writer
from cocodc_jax.run.stopping import StopListener
from cocodc_jax.run.taking_part import Start
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.finite import NonFiniteLossError
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
      monitoring: metrics of this process, and the command on events.
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
            names the last good checkpoint.
        """
        stream = self.text.train_stream()
        with (
            only_writer(self.own_dir),
            self._writing_to_bucket(),
            contextlib.closing(stream),
            self._open_checkpoints() as checkpoints,
            self._watched() as monitor,
            StopListener() as listener,
        ):
            changes = self._write_config()
            summary = self._summary_if_finished(checkpoints, changes)
            if summary is not None:
                return summary

            attempt = Attempt(
                session=self,
                stream=stream,
                checkpoints=checkpoints,
                monitor=monitor,
                fault_watch=self._fault_watch(monitor),
                listener=listener,
                console=console,
            )
            while True:
                try:
                    return attempt.run()
                except AskedToStopError:
                    if not attempt.has_unsaved_work:
                        return self._stopped(attempt.own_step, monitor)
                    attempt = attempt.save_and_stop()
                except LeftBehindError as error:
                    if self.place is not None:
                        attempt.fault_watch.note_left(self.place.region, str(error))
                    if error.state is None:
                        raise
                    attempt = attempt.rejoin(error)
                except LossSpikeError as error:
                    attempt = attempt.roll_back(error)

    def _write_config(self) -> resume.Changes:
        """Write the configuration if the folder is new; return differences to it."""
        changes: resume.Changes = {}
        if jax.process_index() == 0:
            try:
                first = resume.write_config(
                    self.config, self.workdir, self.checkpoint_dir
                )
            except ValueError as error:
                raise ResumeError(str(error)) from error
            changes = first.changes(self.config)
        return gather(changes)[0]

    def _summary_if_finished(
        self, checkpoints: Checkpoints, changes: resume.Changes
    ) -> dict[str, Any] | None:
        """Return the summary if all processes have finished the run, else None."""
        steps = self.config.run.steps
        summary = None
        # Whether the data are the same, the checkpoint checks.
        has_other_data = any(kind_of(name) is Kind.DATA for name in changes)
        if checkpoints.latest_step == steps and not has_other_data:
            summary = resume.finished_summary(self.own_dir / SUMMARY_FILE, steps)

        if not all(gather(summary is not None)):
            return None
        if changes and jax.process_index() == 0:
            print(
                f"note: the run in {self.workdir} is finished; it was not run again "
                f"with {resume.listed(changes)}",
                file=sys.stderr,
            )
        return summary

    def _stopped(self, step: int, monitor: Monitor) -> dict[str, Any]:
        """Return the summary of a region that was stopped before it took part."""
        monitor.ended(step, self.config.run.steps, None)
        return {"steps": step}

    def _writing_to_bucket(self) -> contextlib.AbstractContextManager[Any]:
        if self.bucket is None:
            return contextlib.nullcontext()
        return self.bucket.writing(jax.process_index())

    def _open_checkpoints(self) -> Checkpoints:
        keep = self.config.run.keep_checkpoints
        return Checkpoints(self.checkpoint_dir, keep, cleans=True)

    def _watched(self) -> contextlib.AbstractContextManager[Monitor]:
        """Return the context in which the run is monitored."""
        live = LiveMetrics(
            self.config.run.steps,
            self.tokens_at,
            None if self.place else self.config.run.regions,
            self.peak_tokens_per_second,
        )

        schedule = self.program.method.schedule
        delay_steps = None
        if schedule is not None and not schedule.is_measured:
            delay_steps = schedule.delay_steps

        return self.monitoring.watching(
            live,
            str(self.workdir),
            self.text.regions,
            own_region=self.place.region if self.place else None,
            delay_steps=delay_steps,
        )

    def _fault_watch(self, monitor: Monitor) -> FaultWatch:
        flags = self.elastic
        return FaultWatch(
            self.own_dir,
            flags.on_fault,
            least_s=flags.beat_s / 10,
            observe=monitor.fault,
        )

    def first_params(self) -> tuple[models.Params, jax.Array]:
        """Return one region's initial parameters, and the key for the regions' keys."""
        key = jax.random.key(self.config.run.seed)
        return self.init_params(jax.random.fold_in(key, 0)), jax.random.fold_in(key, 1)

    def begin(self, checkpoints: Checkpoints, stream: TrainStream) -> Start:
        """Return where to start: at the newest checkpoint, or at step 0."""
        try:
            newest = checkpoints.restore(self.program)
            if newest is not None:
                state, extra = newest
                position = resume.position(extra["processes"])
                stream.set_state(position["stream"])
                progress = resume.progress(extra["processes"], self.text.regions)
                return Start(state, progress, position)

            source = Source.of(self.config)
            if source is not None:
                state = source.adopt(self.program, self.model, self.mesh, stream)
                return Start(state, None, {})
        except ValueError as error:
            raise ResumeError(
                f"the run in {self.workdir} cannot go on: {error}; restore what was "
                "changed, or name another workdir"
            ) from error

        return Start(self.program.init(*self.first_params()), None, {})

    @property
    def checkpoint_dir(self) -> Any:
        """Folder or bucket of the checkpoints."""
        folder = self.bucket.folder if self.bucket else self.workdir
        return folder / CHECKPOINTS

    @property
    def own_dir(self) -> pathlib.Path:
        """Folder of this process's own files: the workdir for process 0."""
        process = jax.process_index()
        return self.workdir / f"process_{process}" if process else self.workdir

    def init_params(self, key: jax.Array) -> models.Params:
        """Return one region's initial parameters, equal in all regions."""
        return init_params(self.config.run, self.model, key)

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences per step of each region of this process."""
        sizes = self.program.regions.batch_sizes
        return [sizes[region] for region in self.text.regions]

    @property
    def peak_tokens_per_second(self) -> float | None:
        """Tokens per second of all regions at an MFU of 1; None on CPUs."""
        flops = models.flops_per_token(self.model, self.config.data.sequence_length)
        of_mesh = peak_tokens_per_second(self.mesh.devices.flat, flops)
        if of_mesh is None:
            return None
        # Of all regions, as `tokens_at`, also if the mesh has one region's devices.
        return of_mesh * self.program.regions.num / self.program.num_regions

    def tokens_at(self, step: int) -> int:
        """Return the tokens that all regions together have trained on by `step`."""
        sequences = self.program.regions.sequences_done(step).sum()
        return int(sequences) * self.config.data.sequence_length
