"""Saves and restores everything a run is made of, fragments in flight included.

Arrays go to Orbax, asynchronously: training goes on as soon as they are copied to
the host. What is not an array (the schedule's memory, bytes sent, and whatever the
caller adds: positions in the data and in the metrics file) is JSON in the same
checkpoint, which Orbax makes visible only when all of it is on disk. So a killed
process leaves either a whole checkpoint or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from cocodc_jax.runtime.program import RegionProgram
from cocodc_jax.runtime.state import TrainState
from cocodc_jax.sync.events import ScheduleState

PyTree = Any


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class Checkpoints:
    """The checkpoints of one run, newest last; use as a context manager."""

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        """Opens or creates `directory`.

        Args:
          directory: where checkpoints go, one folder a step.
          keep: how many of the newest to keep, at least 1.

        Raises:
          ValueError: for a `keep` below 1.
          OSError: if the folder cannot be made.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1 checkpoint")
        self._directory = pathlib.Path(directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=("arrays", "rest"),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep),
        )

    def __enter__(self) -> Checkpoints:
        """Nothing to do: the folder is open."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Waits for a save that is still being written; raises if it failed."""
        with self._explained():
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None if there is none.

        It may still be being written, which `wait` waits for.
        """
        return self._manager.latest_step()

    def save(
        self, program: RegionProgram, state: TrainState, extra: dict
    ) -> TrainState:
        """Starts to save.

        Args:
          program: whose state it is.
          state: may be used (and donated) as soon as this returns.
          extra: JSON-able, given back by `restore`.

        Returns:
          The state, with the norms that the schedule had not seen read.

        Raises:
          CheckpointError: if this save cannot be started, or the one before failed.
          ValueError: if the folder holds a checkpoint of this step or a later one.
        """
        if self.latest_step is not None and self.latest_step >= state.step:
            raise ValueError(
                f"{self._directory} holds a checkpoint of step {self.latest_step}, so "
                f"step {state.step} cannot be saved; restore it, or use another folder"
            )
        if state.schedule is not None:
            state = program.settle(state)
        rest = {
            "schedule": state.schedule.to_json() if state.schedule else None,
            "bytes_sent": state.bytes_sent,
            "shapes": _shapes(state),
            "extra": extra,
        }
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_arrays(state)), rest=ocp.args.JsonSave(rest)
        )
        with self._explained():
            self._manager.save(state.step, args=items)
        return state

    def restore(
        self, program: RegionProgram, params: PyTree
    ) -> tuple[TrainState, dict] | None:
        """The newest checkpoint and the `extra` saved with it; None if there is none.

        Args:
          program: of the same method, model and number of regions.
          params: one region's parameters, or their shapes.

        Raises:
          ValueError: if the checkpoint's arrays are not those of `program`.
        """
        step = self.latest_step
        if step is None:
            return None
        only_rest = ocp.args.Composite(rest=ocp.args.JsonRestore())
        rest: dict = self._manager.restore(step, args=only_rest)["rest"]
        memory = rest["schedule"] and ScheduleState.from_json(rest["schedule"])
        # Nothing in flight yet: another method's fragments need not exist here.
        landed = memory and dataclasses.replace(memory, in_flight=())
        self._check_shapes(step, rest["shapes"], program.abstract(params, landed))
        abstract = program.abstract(params, memory)
        only_arrays = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(_arrays(abstract))
        )
        arrays = self._manager.restore(step, args=only_arrays)["arrays"]
        state = dataclasses.replace(
            abstract,
            region=arrays["region"],
            outer=arrays["outer"],
            in_flight={int(k): v for k, v in arrays["in_flight"].items()},
            senders=arrays["senders"],
            step=step,
            bytes_sent=rest["bytes_sent"],
        )
        return state, rest["extra"]

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: if it failed.
        """
        with self._explained():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        # Orbax lets through whatever the storage raised.
        try:
            yield
        except Exception as error:
            last = self.latest_step
            raise CheckpointError(
                f"a checkpoint could not be written to {self._directory}: {error}; "
                f"last good checkpoint: {'none' if last is None else f'step {last}'}"
            ) from error

    def _check_shapes(
        self, step: int, saved: dict[str, str], program: TrainState
    ) -> None:
        here = _shapes(program)
        wrong = [
            f"{path} is {saved.get(path, 'missing')} there and "
            f"{here.get(path, 'missing')} here"
            for path in sorted(saved.keys() | here.keys())
            if saved.get(path) != here.get(path)
        ]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} is of another "
                f"model, method or number of regions: {wrong[0]}{more}"
            )


def _shapes(state: TrainState) -> dict[str, str]:
    """Dtype and shape of every array that is there at every step, by path."""
    arrays = {
        "region": state.region,
        "outer": state.outer,
        "senders": state.senders,
    }
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{x.dtype}{list(x.shape)}"
        )
        for path, x in leaves
    }


def _arrays(state: TrainState) -> dict[str, PyTree]:
    """The arrays of a state; keys of dicts must be text."""
    return {
        "region": state.region,
        "outer": state.outer,
        "senders": state.senders,
        "in_flight": {str(k): flight for k, flight in state.in_flight.items()},
    }
