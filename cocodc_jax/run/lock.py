"""A lock on a folder, for one run at a time, which the system releases on exit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import IO

FILE = ".lock"

_LOOK_S = 0.1
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUseError(OSError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def only_writer(folder: pathlib.Path) -> Iterator[None]:
    """Lock a folder that holds a run against other processes.

    The lock is the kernel's (`flock`), so it ends with the process. Each process of a
    run locks the folder of its own files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a+") as file:
        try:
            _lock(file)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise FolderInUseError(
                f"workdir={str(folder)!r} is in use by {owner}; two runs cannot write "
                "one folder: wait for that one, end it, or name another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"warning: the file system of {folder} has no locks "
                f"({error.strerror}); see that no other run writes there",
                file=sys.stderr,
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _lock(file: IO[str]) -> None:
    """Lock a file; `owner_of` in another process holds it for an instant."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_LOOK_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def owner_of(folder: pathlib.Path) -> str | None:
    """Return which process writes to a folder now, None if none does."""
    try:
        with (folder / FILE).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
    except OSError:  # There is no lock, or the file system has none.
        pass
    return None
