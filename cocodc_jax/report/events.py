"""Where a run's records go for those who watch it live: TensorBoard, Weights & Biases.

Each is a `Mirror`, two functions; numbers have the same names in all of them.
"""

import errno
import json
import os
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cocodc_jax._extras import extra
from cocodc_jax.files import UnwritableError, read_table, write_whole, writing

with extra("report"):
    from tensorboardX import SummaryWriter

WANDB_FILE = "wandb.json"


class Mirror(NamedTuple):
    """Where numbers go."""

    # Takes an inner step and the numbers by name.
    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]  # Flushes and ends it.


# Takes the folder of the run, and the step from which on a resumed run writes again, or
# None for a new one.
OpenMirror = Callable[[pathlib.Path, int | None], Mirror]


def tensorboard(folder: pathlib.Path, first_step: int | None = None) -> Mirror:
    """Open event files in the run's `tb`, see `OpenMirror`.

    TensorBoard hides events of older files at `first_step` and later.
    """
    path = folder / "tb"
    writer = SummaryWriter(os.fspath(path), None, first_step, flush_secs=10)
    events: Any = vars(writer.file_writer)["event_writer"]

    def write(step: int, numbers: Mapping[str, float]) -> None:
        # A full disk ends the thread that writes; its queue would fill up, and block.
        if not events._worker.is_alive():
            raise UnwritableError(errno.EIO, "its writer has ended", os.fspath(path))
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    def close() -> None:
        try:
            with writing(path):
                writer.close()
        finally:
            events._closed = True  # The end of the process would try it once more.

    return Mirror(write, close)


def weights_and_biases(
    folder: pathlib.Path,
    first_step: int | None = None,
    *,
    project: str,
    mode: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Mirror:
    """Open a run of Weights & Biases, or go on with the one that the folder had.

    Its id is kept in `wandb.json`, so that all parts of a resumed run are one. Steps
    that are written again come twice, with the same numbers. What is written offline
    is in the run's `wandb`; `wandb sync --append` sends all parts of it.
    """
    with extra("wandb"):
        import wandb  # pyright: ignore[reportMissingImports]

    try:
        run = wandb.init(
            project=project,
            id=_run_id(folder / WANDB_FILE),
            name=name,
            config=dict(config or {}),
            dir=os.fspath(folder),
            mode=mode,
            # Offline there is nothing to ask; what is written has the id.
            resume=None if mode == "offline" else "allow",
        )
    except wandb.Error as error:
        raise ConnectionError(
            f"Weights & Biases refused project {project!r} ({error}); log in, or use "
            "--wandb_mode=offline"
        ) from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def write(step: int, numbers: Mapping[str, float]) -> None:
        run.log({"step": step, **numbers})

    return Mirror(write, run.finish)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by the names that they are shown under.

    >>> scalars({"kind": "train", "step": 3, "loss_regions": [2.0, 1.5]})
    {'train/loss_regions/region_0': 2.0, 'train/loss_regions/region_1': 1.5}
    """
    suffix = f"/fragment_{record['fragment']}" if "fragment" in record else ""
    found: dict[str, float] = {}

    def add(name: str, value: Any, *axes: str) -> None:
        if isinstance(value, list):
            for i, one in enumerate(value):
                add(f"{name}/{axes[0]}_{i}", one, *axes[1:])
        elif value is not None:
            found[name] = value

    for field, value in record.items():
        if field not in ("kind", "step", "fragment"):
            name = f"{record['kind']}/{field}{suffix}"
            add(name, value, "region", "layer", "expert")
    return found


def _run_id(path: pathlib.Path) -> str:
    """Return the id of the folder's run, made at its first start."""
    if path.exists():
        return read_table(path)["id"]
    run_id = uuid.uuid4().hex[:8]
    write_whole(path, json.dumps({"id": run_id}))
    return run_id
