"""An elastic region that comes back after all others have ended.

It takes the result of a region that finished, if it can read that region's folder.
Training alone to the end would make a different model under the same name.
"""

import pathlib
from typing import TYPE_CHECKING, NamedTuple

from cocodc_jax.core.state import TrainState
from cocodc_jax.fields import Kind
from cocodc_jax.files import read_table, say
from cocodc_jax.report.comparison import SUMMARY_FILE
from cocodc_jax.run.config.train_config import TrainConfig, kind_of
from cocodc_jax.run.processes import gather
from cocodc_jax.run.resume import (
    CHECKPOINTS,
    CONFIG_FILE,
    finished_summary,
    owner_of,
)
from cocodc_jax.train.checkpoint import Checkpoints, steps_in

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session


class Ended(NamedTuple):
    """The result of a region that finished."""

    region: int
    state: TrainState  # At the last step.


def result_of_others(session: "Session") -> Ended | None:
    """Return the result of a region that finished; None if there is none or one runs.

    Only folders on this machine, or mounted here, are read. Call it in every process.
    """
    place = session.place
    assert place is not None
    # One process reads for all, because files may change between two reads.
    region = gather(_finished(session))[0]
    if region is None:
        return None

    folder = _folder_of(session, region)
    with Checkpoints(folder / CHECKPOINTS) as saved:
        restored = saved.restore(session.program, session.config.run.steps)
    if restored is None:
        return None
    say(
        f"all other regions have ended: region {place.region} takes the result of "
        f"region {region}, from {folder}"
    )
    return Ended(region, restored[0])


def _folder_of(session: "Session", region: int) -> pathlib.Path:
    return session.workdir.with_name(f"region_{region}")


def _finished(session: "Session") -> int | None:
    """Return a region that finished this run; None if there is none or one runs."""
    place = session.place
    assert place is not None
    if session.bucket is not None or place.num_regions == 1:
        return None

    steps = session.config.run.steps
    finished = []
    for region in range(place.num_regions):
        folder = _folder_of(session, region)
        if region == place.region or not folder.is_dir():
            continue
        if owner_of(folder) is not None:
            return None
        has_result = steps in steps_in(folder / CHECKPOINTS)
        if has_result and _is_of_this_run(session.config, folder):
            if finished_summary(folder / SUMMARY_FILE, steps) is not None:
                finished.append(region)

    return finished[0] if finished else None


def _is_of_this_run(config: TrainConfig, folder: pathlib.Path) -> bool:
    try:
        other = TrainConfig.from_json(read_table(folder / CONFIG_FILE)).resolve()
    except (OSError, ValueError):
        return False
    may_differ = (Kind.FREE, Kind.DATA)
    return all(kind_of(name) in may_differ for name in config.changes(other))
