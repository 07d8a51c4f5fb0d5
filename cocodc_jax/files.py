"""Files that are written whole, so that a reader finds the old one or the new one.

Written beside, then renamed: a process that is killed, and a disk that is full, leave
the file that was there before. Files that grow line by line are read by `read_lines`.
"""

import codecs
import contextlib
import errno
import json
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class TransientError(ValueError):
    """The same command may work later."""


class UnwritableError(OSError):
    """A file cannot be written; says which, as the system does not of a full disk."""

    def __str__(self) -> str:
        """Return what to print of it."""
        return f"{self.filename} cannot be written ({self.strerror})"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an `OSError` name the file that is being written."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(error.errno, error.strerror, str(path)) from error


def ensure_folder(folder: pathlib.Path) -> None:
    """Make a folder unless it is there, to be written to."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def say(line: str) -> None:
    """Print to stderr, if it can be written to: whoever read it may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole, or leave it as it was and raise an `UnwritableError`."""
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                # Otherwise the new name may be on the disk before the content is.
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def without_mark(content: bytes) -> bytes:
    """Return UTF-8 text without the byte order mark that some editors begin it with."""
    return content.removeprefix(codecs.BOM_UTF8)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file that a user wrote, without a byte order mark."""
    return without_mark(pathlib.Path(path).read_bytes()).decode()


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def append_line(path: pathlib.Path, value: Any) -> None:
    """Append a JSON value to a file, as a line, also after one that is cut off."""
    with writing(path), path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        ends = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(ends + json.dumps(value).encode() + b"\n")


def read_lines(
    path: pathlib.Path,
    parse: Callable[[Any], T],
    what: str = "line",
    skips_damaged: bool = False,
) -> list[T]:
    """Return the lines of a file of JSON that is appended to; none without the file.

    A last line without its end is left out: it is still being written, or a kill has
    cut it off.

    A line is damaged if `parse` raises an error on its value: it is left out with
    `skips_damaged`, else a `ValueError` names it and the file, and `what` a line is.
    """
    if not path.exists():
        return []
    return parse_lines(path, path.read_bytes(), parse, what, skips_damaged)


def parse_lines(
    path: str | os.PathLike[str],
    data: bytes,
    parse: Callable[[Any], T],
    what: str = "line",
    skips_damaged: bool = False,
) -> list[T]:
    """Return the lines of a file's content, see `read_lines`."""
    found = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if not skips_damaged:
                raise ValueError(
                    f"{path}, line {number} is no {what}: {line[:60]!r}"
                ) from error
    return found
