"""The run's records: `metrics.jsonl`, one JSON object a line, and how it is read.

A few kinds of record, all deterministic: the file of a run that was killed and
resumed equals the unbroken run's byte for byte, so no clock may enter it. What the
clock says goes to `timing.jsonl`, which only grows. Floats are written in the
shortest form that reads back to the same float64, hence also to the same float32.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from cocodc_jax.files import parse_lines, writing
from cocodc_jax.report.events import OpenMirror, scalars, tensorboard

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"

Record = dict[str, Any]


class MetricsWriter:
    """Appends records to `metrics.jsonl` and hands them to those who show them live.

    Every record is handed to the operating system before `write` returns, so a killed
    process loses at most the line it was writing.
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
            of `metrics.jsonl` to keep, as `offset` gave them when the checkpoint was
            written. What lies behind is dropped: the resumed run writes it again.
          mirrors: where the records go besides, see `events`.

        Raises:
          ValueError: resume_offset is not the end of a record of the existing file,
            or a line before it is damaged; nothing is changed then.
        """
        directory = pathlib.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        metrics, timing = directory / METRICS_FILE, directory / TIMING_FILE
        kept = []
        if resume_offset:
            kept = _parse(metrics, _bytes_before(metrics, resume_offset))
        self._file = _open_at(metrics, resume_offset or 0)
        is_new = resume_offset is None
        # Without a last line that a kill cut off.
        has_lines = timing.exists() and not is_new
        timing_bytes = timing.read_bytes().rfind(b"\n") + 1 if has_lines else 0
        self._timing = _open_at(timing, timing_bytes)
        first_step = kept[-1]["step"] + 1 if kept else None
        self._mirrors = [open_mirror(directory, first_step) for open_mirror in mirrors]

    @property
    def offset(self) -> int:
        """Size of `metrics.jsonl` in bytes, all of them safely on the disk.

        A checkpoint that remembers the offset must not outlive the records it counts,
        hence the fsync.
        """
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Args:
          record: "kind", "step" and further fields, as `train.records` makes them;
            values are plain numbers, lists of numbers, or None where the method, or a
            region, has no such quantity.

        Raises:
          ValueError: a value is NaN or infinite (the trainer stops such a run before it
            is recorded).
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
        """Append what the clock said to `timing.jsonl`; a resumed run repeats steps.

        `wall_s` counts from when this process began to train, `tokens_per_second` (of
        all regions) and `stall_s` (waiting for a mean to arrive) from the last record.
        """
        numbers = {
            "wall_s": wall_s,
            "tokens_per_second": tokens_per_second,
            "stall_s": stall_s,
        } | ({} if mfu is None else {"mfu": mfu})
        timing = {"step": int(step)} | {n: float(x) for n, x in numbers.items()}
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

    Args:
      path: the file; a last line without its newline is still being written, or was
        cut off by a kill, and is left out.

    Returns:
      The records in the order they were written.

    Raises:
      ValueError: a complete line is not a JSON object with a step; names the line.
    """
    return _parse(path, pathlib.Path(path).read_bytes())


def bytes_until(path: str | os.PathLike[str], step: int) -> int:
    """Measure a `metrics.jsonl` up to the records of a step, 0 without a file."""
    path = pathlib.Path(path)
    if not path.exists():
        return 0
    data = path.read_bytes()
    kept = sum(record["step"] <= step for record in _parse(path, data))
    return sum(len(line) + 1 for line in data.split(b"\n")[:kept])


def _parse(path: str | os.PathLike[str], data: bytes) -> list[Record]:
    def record(value: Any) -> Record:
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise ValueError("a record has a step")
        return value

    return parse_lines(path, data, record, "record")


def _append(file: BinaryIO, record: Mapping[str, Any]) -> None:
    with writing(file.name):
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()


def _open_at(path: pathlib.Path, size: int) -> BinaryIO:
    """Open for appending after the first `size` bytes; what lies behind is dropped."""
    file = path.open("ab")
    file.truncate(size)
    file.seek(size)
    return file


def _bytes_before(path: pathlib.Path, offset: int) -> bytes:
    kept = path.read_bytes()[:offset] if path.exists() else b""
    if len(kept) < offset or not kept.endswith(b"\n"):
        raise ValueError(
            f"resume_offset={offset} is not the end of a record of {path}; the file "
            "was changed since the checkpoint was written: restore it, or train anew "
            "in another workdir"
        )
    return kept
