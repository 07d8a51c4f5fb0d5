"""Files that are written whole: a reader finds the old one or the new one.

Written beside, then renamed: a process that is killed, and a disk that is full, leave
the file that was there before.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that is there with all of its content or not at all.

    Raises:
      OSError: if it cannot be written; what was there before is there still.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Otherwise the new name may be on the disk before the text is.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
      ValueError: if it holds none, naming the file.
      OSError: if it cannot be read.
    """
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value
