"""Saves and restores everything a run is made of, fragments in flight included.

Arrays go to Orbax, asynchronously: training goes on as soon as they are copied to
the host. What is not an array (the schedule's memory, bytes sent, and whatever the
caller adds: positions in the data and in the metrics file) is JSON in the same
checkpoint, which Orbax makes visible only when all of it is on disk. So a killed
process leaves either a whole checkpoint or none.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp

from cocodc_jax.runtime.program import RegionProgram
from cocodc_jax.runtime.state import TrainState
from cocodc_jax.sync.schedule import ScheduleState

PyTree = Any


class Checkpoints:
    """The checkpoints of one run, newest last; use as a context manager."""

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        """Opens or creates `directory`.

        Args:
          directory: where checkpoints go, one folder a step.
          keep: how many of the newest to keep, at least 1.
        """
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(
            pathlib.Path(directory).absolute(),
            item_names=("arrays", "rest"),
            options=options,
        )

    def __enter__(self) -> Checkpoints:
        """Nothing to do: the folder is open."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Waits for a save that is still being written."""
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(
        self, program: RegionProgram, state: TrainState, extra: dict
    ) -> TrainState:
        """Starts to save; raises here if the save before this one failed.

        Args:
          program: whose state it is.
          state: may be used (and donated) as soon as this returns.
          extra: JSON-able, given back by `restore`.

        Returns:
          The state, with the norms that the schedule had not seen read.
        """
        if state.schedule is not None:
            state = program.settle(state)
        rest = {
            "schedule": state.schedule.to_json() if state.schedule else None,
            "bytes_sent": state.bytes_sent,
            "extra": extra,
        }
        self._manager.save(
            state.step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_arrays(state)),
                rest=ocp.args.JsonSave(rest),
            ),
        )
        return state

    def restore(
        self, program: RegionProgram, params: PyTree
    ) -> tuple[TrainState, dict] | None:
        """The newest checkpoint and the `extra` saved with it; None if there is none.

        Args:
          program: of the same method, model and number of regions.
          params: one region's parameters, or their shapes.
        """
        step = self.latest_step
        if step is None:
            return None
        only_rest = ocp.args.Composite(rest=ocp.args.JsonRestore())
        rest: dict = self._manager.restore(step, args=only_rest)["rest"]
        memory = rest["schedule"] and ScheduleState.from_json(rest["schedule"])
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
            step=step,
            bytes_sent=rest["bytes_sent"],
        )
        return state, rest["extra"]

    def wait(self) -> None:
        """Waits until the last save is on disk; raises if it failed."""
        self._manager.wait_until_finished()


def _arrays(state: TrainState) -> dict[str, PyTree]:
    """The arrays of a state; keys of dicts must be text."""
    return {
        "region": state.region,
        "outer": state.outer,
        "in_flight": {str(k): flight for k, flight in state.in_flight.items()},
    }
