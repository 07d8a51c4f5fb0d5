"""Folders of prepared data, as they are made."""

import errno
import os
import pathlib


def make_writable(folder: pathlib.Path) -> None:
    """Make a folder of prepared data unless it is there, to be written to.

    Raises:
      ValueError: naming the folder, why it cannot be, and what chooses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        why = error.strerror
    if why:
        raise ValueError(
            f"data_dir={str(folder)!r} cannot be written to ({why}); name another "
            "folder by data_dir, or by XDG_CACHE_HOME where data_dir is empty"
        )
