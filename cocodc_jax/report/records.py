"""The run's records: how they are written, shown live, and read.

`metrics.jsonl` has one JSON object a line, of a few kinds, all deterministic: the file
of a run that was killed and resumed equals the unbroken run's byte for byte. So it has
no times; these go to `timing.jsonl`, which only grows. Floats are written in the
shortest form that reads back to the same float64, hence also to the same float32.
Mirrors show the numbers live, all under the same names.
"""

import contextlib
import errno
import json
import os
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from cocodc_jax._extras import extra
from cocodc_jax.files import (
    UnwritableError,
    open_regular,
    parse_lines,
    read_regular,
    read_table,
    write_whole,
    writing,
)

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
WANDB_FILE = "wandb.json"

Record = dict[str, Any]


class Mirror(NamedTuple):
    """A service that shows numbers live."""

    # Takes an inner step and the numbers by name.
    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]  # Flushes and ends it.


# Called with the folder of the run, and the step from which a resumed run writes again,
# None for a new one.
OpenMirror = Callable[[pathlib.Path, int | None], Mirror]


def tensorboard(folder: pathlib.Path, first_step: int | None = None) -> Mirror:
    """Open event files in the run's `tb`, see `OpenMirror`.

    TensorBoard hides events of older files at `first_step` and later, or all.
    """
    path = folder / "tb"
    if first_step is None and path.exists():
        first_step = 0
    with extra("report"):
        from tensorboardX import SummaryWriter

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
    """Open a run of Weights & Biases, or continue that of the folder.

    Its id is kept in `wandb.json`, so that all parts of a resumed run are one. Steps
    that are written again appear twice, with the same numbers. Offline data are in the
    run's folder `wandb`; `wandb sync --append` uploads all parts.
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
    """Return the numbers of a record by their names in mirrors.

    >>> scalars({"kind": "train", "step": 3, "loss_regions": [2.0, 1.5]})
    {'train/loss_regions/region_0': 2.0, 'train/loss_regions/region_1': 1.5}
    """
    suffix = f"/fragment_{record['fragment']}" if "fragment" in record else ""
    numbers: dict[str, float] = {}

    def add(name: str, value: Any, *axes: str) -> None:
        if isinstance(value, list):
            for i, one in enumerate(value):
                add(f"{name}/{axes[0]}_{i}", one, *axes[1:])
        elif value is not None:
            numbers[name] = value

    for field, value in record.items():
        if field not in ("kind", "step", "fragment"):
            name = f"{record['kind']}/{field}{suffix}"
            add(name, value, "region", "layer", "expert")

    return numbers


def _run_id(path: pathlib.Path) -> str:
    """Return the id of the folder's run, made at its first start."""
    if path.exists():
        return read_table(path)["id"]
    run_id = uuid.uuid4().hex[:8]
    write_whole(path, json.dumps({"id": run_id}))
    return run_id


class MetricsWriter:
    """Appends records to `metrics.jsonl`, and passes them to the mirrors.

    Every record reaches the operating system before `write` returns, so a killed
    process loses at most the line that it was writing.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_offset: int | None = None,
        mirrors: Sequence[OpenMirror] = (tensorboard,),
    ):
        """Open the files of a run, new or resumed.

        Args:
          workdir: directory of the run, made if missing.
          resume_offset: None to begin anew (older records are dropped); else the bytes
            of `metrics.jsonl` to keep, the `offset` at the checkpoint. The resumed run
            writes the rest again.
          mirrors: services that show the records too.

        Raises:
          ValueError: if resume_offset is not the end of a record, or a line before it
            is damaged; the files are then unchanged.
        """
        directory = pathlib.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        metrics = directory / METRICS_FILE
        timing = directory / TIMING_FILE

        kept = []
        if resume_offset:
            kept = _parse(metrics, _bytes_before(metrics, resume_offset))
        has_lines = timing.exists() and resume_offset is not None
        # Without a last line that a kill cut off.
        timing_bytes = read_regular(timing).rfind(b"\n") + 1 if has_lines else 0
        first_step = kept[-1]["step"] + 1 if kept else None

        with contextlib.ExitStack() as opened:  # Closed if one cannot be opened.
            self._file = opened.enter_context(_open_at(metrics, resume_offset or 0))
            self._timing = opened.enter_context(_open_at(timing, timing_bytes))
            self._mirrors = [
                open_mirror(directory, first_step) for open_mirror in mirrors
            ]
            opened.pop_all()

    @property
    def offset(self) -> int:
        """Size of `metrics.jsonl` in bytes, after all of them were synced to disk."""
        # A checkpoint that remembers it must not outlive the records that it counts.
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, as `train.records` makes them.

        A `ValueError` refuses NaN and infinity.
        """
        _append(self._file, record)
        self._show(record)

    def write_timing(
        self,
        step: int,
        wall_s: float,
        tokens_per_second: float,
        stall_s: float,
        mfu: float | None = None,
    ) -> None:
        """Append times to `timing.jsonl`, where a resumed run repeats steps.

        `wall_s` counts from when this process began to train, `tokens_per_second` (of
        all regions) and `stall_s` (waits for a mean to arrive) from the last record.
        """
        timing = {
            "step": int(step),
            "wall_s": float(wall_s),
            "tokens_per_second": float(tokens_per_second),
            "stall_s": float(stall_s),
        } | ({} if mfu is None else {"mfu": float(mfu)})
        _append(self._timing, timing)
        self._show({"kind": "timing", **timing})

    def _show(self, record: Mapping[str, Any]) -> None:
        for mirror in self._mirrors:
            mirror.write(record["step"], scalars(record))

    def close(self) -> None:
        """Flush and close all files."""
        with contextlib.ExitStack() as stack:  # All, whichever fails.
            for file in (self._file, self._timing, *self._mirrors):
                stack.callback(file.close)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        # What ended the run is not hidden by what follows from it.
        with contextlib.suppress(*[OSError] * (exception[0] is not None)):
            self.close()


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read a `metrics.jsonl` or `timing.jsonl`, also one that is being written.

    A last line without its newline, still being written or cut off by a kill, is left
    out. A `ValueError` names a complete line that is not a JSON object with a step.
    """
    return _parse(path, read_regular(path))


def bytes_until(path: str | os.PathLike[str], step: int) -> int:
    """Return the bytes of a `metrics.jsonl` up to a step; 0 if there is no file."""
    path = pathlib.Path(path)
    if not path.exists():
        return 0
    data = read_regular(path)
    kept = sum(record["step"] <= step for record in _parse(path, data))
    return sum(len(line) + 1 for line in data.split(b"\n")[:kept])


def _parse(path: str | os.PathLike[str], data: bytes) -> list[Record]:
    def record(value: Any) -> Record:
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise ValueError("a record has a step")
        return value

    return parse_lines(path, data, record, "record")


def _append(file: IO[bytes], record: Mapping[str, Any]) -> None:
    with writing(file.name):
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()


def _open_at(path: pathlib.Path, size: int) -> IO[bytes]:
    """Open for appending after the first `size` bytes; drop the bytes after them."""
    file = open_regular(path, "ab")
    file.truncate(size)
    file.seek(size)
    return file


def _bytes_before(path: pathlib.Path, offset: int) -> bytes:
    kept = read_regular(path)[:offset] if path.exists() else b""
    if len(kept) < offset or not kept.endswith(b"\n"):
        raise ValueError(
            f"resume_offset={offset} is not the end of a record of {path}; the file "
            "was changed since the checkpoint was written: restore it, or train anew "
            "in another workdir"
        )
    return kept
