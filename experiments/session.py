"""One run from its configuration: data, model, devices, files; then the loop.

`prepare` does everything that can go wrong because of what was asked for, before
anything is compiled; `Session.train` is the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Console

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.data import load
from cocodc_jax.data.streams import TrainStream
from cocodc_jax.data.text_data import TextData
from cocodc_jax.report.progress import RunProgress
from cocodc_jax.report.records import MetricsWriter
from cocodc_jax.runtime.checkpoint import Checkpoints
from cocodc_jax.runtime.evaluate import make_evaluate
from cocodc_jax.runtime.mesh import Mesh
from cocodc_jax.runtime.second_moment import adam_second_moment
from cocodc_jax.runtime.state import TrainState
from cocodc_jax.runtime.trainer import (
    Clock,
    Hooks,
    NonFiniteLossError,
    Result,
    train,
)
from experiments.config import RunConfig, TrainConfig, dumps

CONFIG_FILE, SUMMARY_FILE, CHECKPOINTS = "config.json", "summary.json", "checkpoints"


class ResumeError(Exception):
    """The newest checkpoint does not belong to this run."""


# What may end a run for a reason that a person can act on without a traceback: a
# loss that is not finite, a disk that is full or gone, a checkpoint of other data.
RUN_ERRORS = (NonFiniteLossError, OSError, ResumeError)


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
      evaluate: judges parameters on the validation batches.
    """

    config: TrainConfig
    workdir: pathlib.Path
    text: TextData
    model: models.TransformerConfig
    mesh: Mesh
    program: cc.RegionProgram
    evaluate: Callable[[models.Params], jax.Array]

    def train(self, console: Console | None = None) -> dict[str, Any]:
        """Trains to the last step, going on from the newest checkpoint if there is one.

        Returns:
          The summary, which is also written to the workdir.

        Raises:
          NonFiniteLossError: naming step, region and last good checkpoint.
          ResumeError: if the newest checkpoint does not belong to this run.
          OSError: if the disk refuses; a `CheckpointError` names the last good one.
        """
        run = self.config.run
        stream = self.text.train_stream()
        with (
            contextlib.closing(stream),
            Checkpoints(self.workdir / CHECKPOINTS, run.keep_checkpoints) as saved,
        ):
            summary_path = self.workdir / SUMMARY_FILE
            if saved.latest_step == run.steps and summary_path.exists():
                return json.loads(summary_path.read_text())
            state, progress, position = self._begin(saved, stream)
            with (
                MetricsWriter(self.workdir, position.get("metrics_bytes")) as writer,
                _progress_bar(self, state.step, console) as bar,
                _stop_signal() as should_stop,
            ):
                earlier_s = position.get("seconds", 0.0)
                watch = _Watch(writer, bar, earlier_s)
                result = train(
                    self.program,
                    state,
                    stream,
                    run.steps,
                    self.tokens_per_step,
                    cadence=run.cadence,
                    hooks=Hooks(
                        record=writer.write,
                        clock=watch,
                        snapshot=lambda: {
                            "stream": stream.get_state(),
                            "metrics_bytes": writer.offset,
                            "seconds": watch.seconds,
                        },
                        should_stop=should_stop,
                    ),
                    evaluate=self.evaluate,
                    checkpoints=saved,
                    progress=progress,
                )
        summary = self._summary(result, earlier_s)
        if result.state.step == run.steps:
            summary_path.write_text(dumps(summary))
        return summary

    def _begin(
        self, saved: Checkpoints, stream: TrainStream
    ) -> tuple[TrainState, dict | None, dict]:
        """State, progress and positions at the newest checkpoint, or at step 0."""
        key = jax.random.key(self.config.run.seed)
        params = self.init_params(jax.random.fold_in(key, 0))
        try:
            restored = saved.restore(self.program, params)
            if restored is None:
                return self.program.init(params, jax.random.fold_in(key, 1)), None, {}
            state, extra = restored
            stream.set_state(extra["snapshot"]["stream"])
        except ValueError as error:
            raise ResumeError(
                f"the run in {self.workdir} cannot go on: {error}; restore what was "
                "changed, or name another workdir"
            ) from error
        return state, extra["progress"], extra["snapshot"]

    def init_params(self, key: jax.Array) -> models.Params:
        """One region's first parameters; all regions and the outer model begin so."""
        return models.init_params(self.model, key)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all regions together read in one step."""
        data = self.config.data
        return self.config.run.regions * data.batch_per_region * data.sequence_length

    def _summary(self, result: Result, earlier_s: float) -> dict[str, Any]:
        evaluated = result.last_eval or {}
        run = self.config.run
        return {
            "method": self.config.method.method,
            "preset": self.config.preset,
            "seed": run.seed,
            "regions": run.regions,
            "parameters": models.num_params(self.model),
            "steps": result.state.step,
            "tokens": result.state.step * self.tokens_per_step,
            "eval_loss": evaluated.get("eval_loss"),
            "eval_perplexity": evaluated.get("eval_perplexity"),
            "eval_loss_outer": evaluated.get("eval_loss_outer"),
            "bytes_sent_per_region": result.state.bytes_sent,
            "seconds": earlier_s + result.seconds,
            "stall_seconds": result.stall_seconds,
            "tokens_per_second": result.tokens_per_second,
            "correction_ratio": result.correction_ratio,
        }


def prepare(
    config: TrainConfig,
    workdir: str | pathlib.Path,
    open_text: Callable[..., TextData] = load,
    earlier: Sequence[Session] = (),
) -> Session:
    """Opens the data, lays out the devices and builds the program; compiles nothing.

    Args:
      config: of the run.
      workdir: its folder; made if missing.
      open_text: `cocodc_jax.data.load`, or something that remembers what it opened.
      earlier: sessions whose compiled programs to use again where they are the same.

    Raises:
      ValueError: naming the flag, its value and what would be right.
    """
    # A default may change with the version; a run keeps the one it began with.
    config = dataclasses.replace(config, method=config.method.resolve())
    run = config.run
    devices = _use_devices(run)
    models.check_divisible(config.model, run.data_axis, run.model_axis)
    mesh = cc.make_mesh(run.regions, run.data_axis, run.model_axis, devices)
    workdir = pathlib.Path(workdir)
    _check_workdir(config, workdir)
    text = open_text(config.data, run.regions)
    model = dataclasses.replace(config.model, vocab_size=text.vocab_size)
    models.check_divisible(model, run.data_axis, run.model_axis)
    alike = [s for s in earlier if (s.model, s.mesh) == (model, mesh)]
    twins = [s for s in alike if _program_key(s.config) == _program_key(config)]
    session = Session(
        config,
        workdir,
        text,
        model,
        mesh,
        twins[0].program if twins else _build_program(config, model, mesh),
        alike[0].evaluate if alike else _build_evaluate(config, model, mesh, text),
    )
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / CONFIG_FILE).write_text(dumps(config.to_json()))
    return session


def _program_key(config: TrainConfig) -> tuple:
    return (config.method, config.optimizer, config.run.steps, config.run.regions)


def _build_program(
    config: TrainConfig, model: models.TransformerConfig, mesh: Mesh
) -> cc.RegionProgram:
    steps = config.run.steps
    shapes = jax.eval_shape(
        lambda key: models.init_params(model, key), jax.random.key(0)
    )
    return cc.RegionProgram(
        models.make_loss_fn(model),
        config.optimizer.build(steps),
        config.method.build(),
        shapes,
        config.run.regions,
        mesh=mesh,
        learning_rate=config.optimizer.learning_rate(steps),
        second_moment=adam_second_moment(config.optimizer.beta2),
        outputs=models.make_outputs(model),
        param_specs=models.partition_specs(shapes),
    )


def _build_evaluate(
    config: TrainConfig, model: models.TransformerConfig, mesh: Mesh, text: TextData
) -> Callable[[models.Params], jax.Array]:
    # The same batches whatever the method and the seed.
    tokens = text.eval_tokens(config.run.eval_batches)
    return make_evaluate(models.make_loss_fn(model), mesh, tokens)


def _use_devices(run: RunConfig) -> list[Any]:
    """The devices regions may use; on a CPU, virtual ones, and one more outside."""
    wanted = run.regions * run.data_axis * run.model_axis
    # Ignored by other platforms, where it gives the outer state a device of its own.
    with contextlib.suppress(RuntimeError):  # JAX has started: what it has must do.
        cc.use_cpu_devices(max(wanted, run.devices) + 1)
    devices = jax.devices()
    is_cpu = devices[0].platform == "cpu"
    there = wanted if is_cpu else len(devices)
    if run.devices > there:
        reason = " (regions * data_axis * model_axis virtual ones)" if is_cpu else ""
        raise ValueError(
            f"devices={run.devices} asks for more than there are: {there}{reason}"
        )
    return devices[: run.devices or there]


def _check_workdir(config: TrainConfig, workdir: pathlib.Path) -> None:
    path = workdir / CONFIG_FILE
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir={str(workdir)!r} is a file; name a folder")
    if not path.exists():
        return
    try:
        found = TrainConfig.from_json(json.loads(path.read_text()))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a {CONFIG_FILE} that cannot be read "
            f"({error}); name another folder"
        ) from error
    if found != config:
        differences = "; ".join(found.differences(config)) or "preset"
        raise ValueError(
            f"workdir={str(workdir)!r} holds a run of another configuration "
            f"({differences}); name another folder or delete it"
        )


class _Watch:
    """Takes the loop's clock to the progress bar and the timing file."""

    def __init__(self, writer: MetricsWriter, bar: RunProgress, earlier_s: float):
        self._writer, self._bar, self._earlier_s = writer, bar, earlier_s
        self._stall_s = 0.0
        self.seconds = earlier_s

    def __call__(self, clock: Clock) -> None:
        self.seconds = self._earlier_s + clock.wall_s
        self._bar.update(
            clock.step,
            clock.loss,
            clock.tokens_per_second,
            clock.in_flight,
            clock.bytes_sent,
        )
        self._writer.write_timing(
            clock.step,
            clock.wall_s,
            clock.tokens_per_second,
            clock.stall_s - self._stall_s,
        )
        self._stall_s = clock.stall_s


def _progress_bar(session: Session, step: int, console: Console | None) -> RunProgress:
    run, method = session.config.run, session.config.method.method
    return RunProgress(run.steps, step, f"{method} seed {run.seed}", console)


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """SIGTERM, as schedulers send before they kill, ends the run after a checkpoint."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)
