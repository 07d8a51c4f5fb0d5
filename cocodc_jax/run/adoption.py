"""Start a new run from another run's checkpoint, see `RegionProgram.adopt`."""

import dataclasses
import pathlib
import sys
from typing import Self

import jax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.core.state import TrainState
from cocodc_jax.data.streams import TrainStream
from cocodc_jax.engine.mesh import Mesh
from cocodc_jax.fields import Kind
from cocodc_jax.files import read_table
from cocodc_jax.run.build import build_program, mesh_of
from cocodc_jax.run.config.train_config import TrainConfig, kind_of
from cocodc_jax.run.resume import CHECKPOINTS, CONFIG_FILE, position
from cocodc_jax.train.checkpoint import Checkpoints, steps_in


@dataclasses.dataclass(frozen=True)
class Source:
    """The run to start from."""

    folder: pathlib.Path
    step: int | None  # Of the checkpoint; None is the newest.
    config: TrainConfig

    @classmethod
    def of(cls, config: TrainConfig) -> Self | None:
        """Find the run of `--adopt_from`, None if the flag is empty."""
        text = config.run.adopt_from
        if not text:
            return None

        folder, step = _split(text)
        path = pathlib.Path(folder)
        if not (path / CONFIG_FILE).exists() or not steps_in(path / CHECKPOINTS):
            raise ValueError(
                f"adopt_from={text!r} holds no run with checkpoints; name the workdir "
                "of one, or WORKDIR@STEP"
            )
        try:
            other = TrainConfig.from_json(read_table(path / CONFIG_FILE)).resolve()
        except ValueError as error:
            raise ValueError(f"adopt_from={text!r} cannot be read: {error}") from error

        if "elastic" in (config.run.exchange, other.run.exchange):
            raise ValueError(
                f"adopt_from={text!r} is not possible with exchange='elastic', of this "
                "run or of that one; leave out one of the two"
            )
        changes = other.changes(config)
        is_other_model = any(kind_of(name) is Kind.MODEL for name in changes)
        if is_other_model or other.data.tokenizer != config.data.tokenizer:
            raise ValueError(
                f"adopt_from={text!r} is of another model or tokenizer "
                f"({other.differences(config)}); a run can go on with other "
                "regions, devices, methods and optimizers, of the same model"
            )

        steps = steps_in(path / CHECKPOINTS)
        if step is not None and step not in steps:
            raise ValueError(
                f"adopt_from={text!r} has no checkpoint of step {step}; there are "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        at_step = max(steps, default=None) if step is None else step
        if at_step is not None and at_step >= config.run.steps:
            raise ValueError(
                f"adopt_from={text!r} is at step {at_step}, where steps="
                f"{config.run.steps}, the inner steps of the whole run, are over; give "
                "more steps, or an earlier checkpoint as WORKDIR@STEP"
            )
        return cls(path, step, other)

    def adopt(
        self,
        program: cc.RegionProgram,
        model: models.TransformerConfig,
        mesh: Mesh,
        stream: TrainStream,
    ) -> TrainState:
        """Return the new run's initial state, and print what was kept and lost."""
        old_mesh = mesh_of(self.config.run, list(mesh.devices.flat))
        old = build_program(self.config, model, old_mesh)
        with Checkpoints(self.folder / CHECKPOINTS) as saved:
            restored = saved.restore(old, self.step)
        if restored is None:
            raise ValueError(f"{self.folder} holds no checkpoint")

        state, extra = restored
        adopted = program.adopt(state, old)
        kept = dict(adopted.kept)
        lost = dict(adopted.lost)
        try:
            stream.set_state(position(extra["processes"])["stream"])
            kept["data"] = "the stream goes on"
        except ValueError:
            lost["data"] = "it is read from its start, as it is shared out otherwise"

        if jax.process_index() == 0:
            print(
                f"goes on from step {state.step} of {self.folder}",
                *(f"  kept {name}: {how}" for name, how in kept.items()),
                *(f"  lost {name}: {why}" for name, why in lost.items()),
                sep="\n",
                file=sys.stderr,
            )
        return adopted.state


def _split(text: str) -> tuple[str, int | None]:
    """Return the folder and the step of WORKDIR@STEP; WORKDIR alone has step None."""
    folder, at, step = text.rpartition("@")
    if at and step.isdecimal():
        return folder, int(step)
    return text, None
