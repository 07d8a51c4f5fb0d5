"""The rows of a grid as runs, one after another in one process.

Rows with equal programs, the seeds of one setting, share one `RegionProgram`. Rows
whose programs are equal in part (the inner steps of two outer learning rates) share
compiled programs through the compilation cache.
"""

import dataclasses
import functools
import gc
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.data import load
from cocodc_jax.report.comparison import Run, load_run
from cocodc_jax.run import build
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.hugging_face import model_of
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.session import Session
from cocodc_jax.train.finite import NonFiniteLossError

from ..program import about
from ..trials import StoppedError
from .grid import Setting
from .rows import completed, run_key

RUNS = "runs"
# Settings whose compiled programs are kept, 180 MB each (tiny). When they are dropped,
# the next setting compiles the small programs that it shares with them again, in
# seconds.
_KEPT_PROGRAMS = 8
open_text = functools.lru_cache(maxsize=8)(load)


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of the sweep."""

    setting: Setting
    seed: int
    stage: str  # "rung 1", ..., or "final".
    tuned: tuple[str, ...]  # Flags that the grid tunes.

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration of the run."""
        return self.setting.config.replace(seed=self.seed)

    @functools.cached_property
    def row_id(self) -> str:
        """The name of its folder and its line."""
        return run_key(self.config.to_json())

    @property
    def role(self) -> dict[str, Any]:
        """Its part in the sweep, in the form that is written."""
        return {
            "name": self.setting.name,
            "stage": self.stage,
            "published": self.setting.published,
            "tuned": list(self.tuned),
        }

    @property
    def cost(self) -> float:
        """Multiplications of the whole run, up to a factor that all rows share."""
        return self.setting.config.run.steps * self.setting.cost_per_step


def check(settings: Sequence[Setting]) -> None:
    """Build the program of every setting once; compiles nothing."""
    # JAX makes its CPU devices once: as many as the row that needs most.
    for setting in sorted(settings, key=_num_devices, reverse=True)[:1]:
        with about(setting.name):
            build.use_devices(setting.config.run, 1)

    seen: set[tuple] = set()
    for setting in settings:
        config = setting.config
        run = setting.config.run
        key = (*build.program_key(config), config.model, run.regions)
        if key in seen:
            continue

        seen.add(key)
        with about(setting.name):
            build.check_model(config, config.model)
            mesh = build.mesh_of(run, build.use_devices(run, 1))
            build.build_program(config, config.model, mesh)


def check_data(settings: Sequence[Setting], seed: int) -> None:
    """Open the data of every setting once, as `prepare` will."""
    seen: set[tuple] = set()
    for setting in settings:
        config = setting.config.replace(seed=seed)
        run = setting.config.run
        key = (
            config.data,
            config.model,
            run.regions,
            run.eval_batches,
            run.init_from,
        )
        if key in seen:
            continue
        seen.add(key)

        with about(setting.name):
            text = open_text(config.data, run.regions, None)
            model = model_of(config, text.tokenizer)
            build.check_model(config, model)
            mesh = build.mesh_of(run, build.use_devices(run, 1))
            build.build_evaluate(config, model, mesh, text)


def text_of(config: TrainConfig) -> str:
    """Return a digest of the text and the tokenizer of a run, equal on all machines."""
    text = open_text(config.data, config.run.regions, None)
    return text.fingerprint.partition(", length ")[0]


def _num_devices(setting: Setting) -> int:
    run = setting.config.run
    return max(run.regions * run.devices_per_region, run.devices) + run.outer_channels


class Trainer:
    """Trains rows, and reuses data and programs of the row before if they are equal."""

    def __init__(self, folder: pathlib.Path, keep_runs: bool, console: Console):
        self._folder = folder / RUNS
        self._keep = keep_runs
        self._console = console
        self._before: Session | None = None
        self._num_programs = 0

    def train(self, row: Row) -> dict[str, Any]:
        """Train a row to its end, from its newest checkpoint if it has one."""
        folder = self._folder / row.row_id
        before = self._before
        earlier = [before] if before else []

        session = self._before = prepare(row.config, folder, open_text, earlier)
        if before is None or before.program is not session.program:
            self._num_programs += 1
            if self._num_programs % _KEPT_PROGRAMS == 0:
                jax.clear_caches()
                gc.collect()

        try:
            summary = session.train(self._console)
            if summary["steps"] < row.config.run.steps:
                raise StoppedError(f"{row.setting.name} at step {summary['steps']}")
            run = load_run(folder)
            evaluations = run.of_kind("eval")
            curve = [
                [e["step"], e["eval_loss"], e["bytes_sent_per_region"]]
                for e in evaluations
            ]
            curve_outer = [[e["step"], e["eval_loss_outer"]] for e in evaluations]
            sizes = _fragment_bytes(session, run)

            return trained(row, session.model, run.summary, curve, curve_outer, sizes)
        except NonFiniteLossError as error:
            return diverged(row, session.model, str(error))

    def forget(self, row: Row) -> None:
        """Delete the files of a row that was written, unless runs are kept."""
        if not self._keep:
            shutil.rmtree(self._folder / row.row_id, ignore_errors=True)


def trained(
    row: Row,
    model: models.TransformerConfig,
    summary: Mapping[str, Any],
    curve: Sequence[Sequence[float]],
    curve_outer: Sequence[Sequence[float]],
    fragment_bytes: Mapping[int, float],
) -> dict[str, Any]:
    """Return the line of a finished row.

    Args:
      row: the trial.
      model: its transformer.
      summary: of the run.
      curve: of each evaluation the step, the loss of the regions' mean, and the bytes
        sent until then.
      curve_outer: of each evaluation the step and the loss of the outer parameters.
      fragment_bytes: of one message, by fragment.
    """
    sent = summary["bytes_sent_per_region"]
    steps = summary["steps"]
    # One that none of its messages arrived of is taken to be like the others.
    usual = sum(fragment_bytes.values()) / max(len(fragment_bytes), 1)
    every = range(row.config.method.build().num_fragments if fragment_bytes else 0)

    return {
        **_head(row, model),
        "loss": summary["eval_loss"],
        "loss_outer": summary["eval_loss_outer"],
        "perplexity": summary["eval_perplexity"],
        "region_drift": summary["region_drift"],
        "correction_ratio": summary["correction_ratio"],
        "tokens": summary["tokens"],
        "bytes": sent,
        "bytes_per_step": sent / steps,
        "fragment_bytes": [fragment_bytes.get(k, usual) for k in every],
        "seconds": summary["seconds"],
        "tokens_per_second": summary["tokens_per_second"],
        "curve": curve,
        "curve_outer": curve_outer,
        "diverged": None,
        "config": completed(row.config.resolve().to_json()),
    }


def diverged(row: Row, model: models.TransformerConfig, why: str) -> dict[str, Any]:
    """Return the line of a row that diverged."""
    return {
        **_head(row, model),
        "loss": None,
        "curve": [],
        "diverged": why,
        "config": completed(row.config.resolve().to_json()),
    }


def _head(row: Row, model: models.TransformerConfig) -> dict[str, Any]:
    return {
        "row": row.row_id,
        "setting": row.setting.key,
        **row.role,
        "method": row.config.method.method,
        "seed": row.seed,
        "steps": row.config.run.steps,
        "parameters": models.num_params(model),
        "version": cc.__version__,
        "platform": jax.devices()[0].platform,
    }


def _fragment_bytes(session: Session, run: Run) -> dict[int, float]:
    """Return the mean bytes of each fragment's messages, or of a step's exchange."""
    if session.program.bytes_per_step:
        return {0: float(session.program.bytes_per_step)}
    sizes: dict[int, list[float]] = {}
    for record in run.of_kind("sync"):
        sizes.setdefault(record["fragment"], []).append(record["bytes"])
    return {k: sum(of_sync) / len(of_sync) for k, of_sync in sizes.items()}
