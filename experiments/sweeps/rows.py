"""The file of rows: one JSON object a line, appended whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from cocodc_jax.files import writing

from .keys import completed, run_key, setting_key

FILE = "rows.jsonl"
Row = dict[str, Any]


def append(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Append a row; several processes may do so at once.

    What a killed process left of a line is dropped first.

    Raises:
      UnwritableError: if it cannot be written.
    """
    line, path = json.dumps(row).encode() + b"\n", folder / FILE
    with writing(path), path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read(folder: pathlib.Path) -> list[Row]:
    """Return the rows of a folder, each once, the newest of each.

    Files of other machines, put beside as rows-NAME.jsonl, count too. A last line that
    is still being written, or was cut off by a kill, is left out. Keys are those of the
    configuration that is written in the row, with today's defaults for the fields that
    it did not have yet.
    """
    found: dict[str, Row] = {}
    for path in sorted(folder.glob("rows*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = _known(json.loads(line))
                found[row["row"]] = row
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}, line {number} is no row of a sweep: {line[:60]!r}"
                ) from error
    return list(found.values())


def _known(row: Row) -> Row:
    """Return a row with today's keys."""
    config = completed(row["config"])
    keys = {"row": run_key(config), "setting": setting_key(config)}
    return {**row, **keys, "config": config}
