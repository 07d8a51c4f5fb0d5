"""Folders of data: where a name leads, and those that are made for prepared data."""

import pathlib

from cocodc_jax.files import UnwritableError, ensure_folder


def expanded(name: str, asked: str) -> pathlib.Path:
    """Return the absolute path of a name that may begin with ~ or ~USER.

    Raises:
      ValueError: if no home is known, as in containers whose user has no entry.
    """
    try:
        return pathlib.Path(name).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"{asked}: {name} is below a home that is not known; name the folder "
            "without ~"
        ) from error


def make_writable(folder: pathlib.Path) -> None:
    """Make a folder of prepared data unless it is there, to be written to.

    Raises:
      ValueError: naming the folder, why it cannot be, and what chooses it.
    """
    try:
        ensure_folder(folder)
    except UnwritableError as error:
        raise ValueError(
            f"data_dir={str(folder)!r} cannot be written to ({error.strerror}); name "
            "another folder by data_dir, or by XDG_CACHE_HOME where data_dir is empty"
        ) from error
