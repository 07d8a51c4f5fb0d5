"""Files that are replaced atomically: a reader finds the old or the new content.

The new content is written to a temporary file, which is then renamed. If the process is
killed or the disk is full, the old file stays. Files that grow line by line are read by
`read_lines`.

Other users may write to the folder of a run too. Opening a named pipe waits until a
process opens its other end, so files of such folders are opened by `open_regular`.
"""

import codecs
import contextlib
import errno
import json
import os
import pathlib
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

T = TypeVar("T")

# Errors of `open` for a link that is not followed, a socket, a device without a driver,
# and a pipe without a reader.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV)


class TransientError(ValueError):
    """The same command may work later."""


class UnwritableError(OSError):
    """A file cannot be written; it names the file, as errors of a full disk do not."""

    def __str__(self) -> str:
        """Return the message."""
        return f"{self.filename} cannot be written ({self.strerror})"


class NoRegularFileError(OSError):
    """A path is that of a pipe, a socket, a device or a folder."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(errno.EINVAL, "not a regular file", os.fspath(path))

    def __str__(self) -> str:
        """Return the message."""
        return f"{self.filename} is not a regular file"


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Have an `OSError` name the file that is being written."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(error.errno, error.strerror, str(path)) from error


def ensure_folder(folder: pathlib.Path) -> None:
    """Make a folder if it is missing; refuse one that cannot be written to."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def say(line: str) -> None:
    """Print to stderr; ignore errors, as its reader may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def open_regular(
    path: str | os.PathLike[str], mode: str = "rb", follows_links: bool = True
) -> IO[bytes]:
    """Open a regular file as `open` does, without waiting for another process.

    Args:
      path: of the file.
      mode: "rb", "wb", "ab" or "a+b".
      follows_links: whether the path may be a symbolic link.

    Raises:
      NoRegularFileError: if it is a pipe, a socket, a device, a folder, or a link that
        is not followed.
      OSError: as `open` raises it.
    """

    def opened(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
        try:
            descriptor = os.open(name, flags, 0o666)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NoRegularFileError(path) from error
            raise

        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NoRegularFileError(path)
        os.set_blocking(descriptor, True)  # A child may inherit it.
        return descriptor

    return open(path, mode, opener=opened)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file of a folder that others can write to.

    Raises what `open_regular` raises.
    """
    with open_regular(path) as file:
        return file.read()


def check_regular(folder: str | os.PathLike[str]) -> None:
    """Raise `NoRegularFileError` if a pipe, a socket or a device is below a folder.

    For folders whose files other libraries read, which would wait for it.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                check_regular(entry.path)
            elif not (entry.is_file() or entry.is_dir()) and os.path.exists(entry.path):
                raise NoRegularFileError(entry.path)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file's content, or leave it as it was and raise `UnwritableError`."""
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
    """Return UTF-8 text without the byte order mark that some editors write."""
    return content.removeprefix(codecs.BOM_UTF8)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file that a user wrote, without a byte order mark."""
    return without_mark(pathlib.Path(path).read_bytes()).decode()


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        value = json.loads(read_regular(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def append_line(path: pathlib.Path, value: Any) -> None:
    """Append a JSON value to a file, as a line, also after an incomplete line."""
    with writing(path), open_regular(path, "a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        ends = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(ends + json.dumps(value).encode() + b"\n")


def read_lines(
    path: pathlib.Path,
    parse: Callable[[Any], T],
    noun: str = "line",
    skips_damaged: bool = False,
) -> list[T]:
    """Return the lines of a file of JSON that is appended to; none without the file.

    A last line without its end is left out: it is still being written, or a kill has
    cut it off.

    Args:
      path: of the file.
      parse: called with the value of each line. A line is damaged if it raises
        `ValueError`, `TypeError` or `KeyError`.
      noun: what a line is called in the error.
      skips_damaged: whether damaged lines are left out.

    Raises:
      ValueError: if a line is damaged; it names the file and the line.
    """
    if not path.exists():
        return []
    return parse_lines(path, read_regular(path), parse, noun, skips_damaged)


def parse_lines(
    path: str | os.PathLike[str],
    data: bytes,
    parse: Callable[[Any], T],
    noun: str = "line",
    skips_damaged: bool = False,
) -> list[T]:
    """Return the lines of a file's content, see `read_lines`."""
    values = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            values.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if not skips_damaged:
                raise ValueError(
                    f"{path}, line {number} is no {noun}: {line[:60]!r}"
                ) from error
    return values
