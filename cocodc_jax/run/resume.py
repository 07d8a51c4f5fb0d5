"""Going on with a run: whether a folder holds it, and where it stopped."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

import cocodc_jax as cc
from cocodc_jax.data.streams import TrainStream
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.runtime.loop.checkpoint import Checkpoints
from cocodc_jax.runtime.state import TrainState

CONFIG_FILE = "config.json"


class ResumeError(Exception):
    """The newest checkpoint does not belong to this run."""


def check_workdir(config: TrainConfig, workdir: pathlib.Path) -> None:
    """Refuses a folder that holds anything but this run.

    Args:
      config: of the run, resolved.
      workdir: its folder, which may be missing.

    Raises:
      ValueError: naming the folder and what is in it.
    """
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
    # An argument that the method has been given since takes its default there too.
    found = found.resolve()
    if found != config:
        differences = "; ".join(found.differences(config)) or "preset"
        raise ValueError(
            f"workdir={str(workdir)!r} holds a run of another configuration "
            f"({differences}); name another folder or delete it"
        )


def resume(
    saved: Checkpoints,
    program: cc.RegionProgram,
    stream: TrainStream,
    regions: Sequence[int],
) -> tuple[TrainState, dict, dict] | None:
    """Goes to the newest checkpoint, None if there is none.

    Args:
      saved: the run's checkpoints.
      program: of the run.
      stream: is set to where it was.
      regions: that this process has.

    Returns:
      The state, the records' sums, and this process's positions in its files.

    Raises:
      ValueError: if the checkpoint is of another program or of other data.
    """
    restored = saved.restore(program)
    if restored is None:
        return None
    state, extra = restored
    found = position(extra["processes"])
    stream.set_state(found["stream"])
    return state, progress(extra["processes"], regions), found


def position(saved: list[dict]) -> dict:
    """Where this process goes on: its own files, and whatever regions it reads now."""
    process = jax.process_index()
    own = saved[process] if len(saved) == jax.process_count() else {"seconds": 0.0}
    regions: dict = {}
    for each in saved:
        regions |= each["stream"]["regions"]
    stream = {**saved[0]["stream"], "regions": regions}
    return {**own, "stream": stream}


def progress(saved: list[dict], regions: Sequence[int]) -> dict:
    """Return the records' sums of this process, with losses of the regions it has."""
    process = jax.process_index()
    own = saved[process] if len(saved) == jax.process_count() else saved[0]
    losses = {
        region: [row[i] for row in each["progress"]["window"]]
        for each in saved
        for i, region in enumerate(each["stream"]["regions"])
    }
    window = np.array([losses[str(region)] for region in regions]).T
    return {**own["progress"], "window": list(window)}
