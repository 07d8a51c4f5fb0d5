"""Paths as users write them: ~ for a home folder, and the folder of caches.

Every program passes each path that a user gives through `without_tilde` or `expanded`.
The shell expands `~` only at the beginning of a word, so `--workdir=~/runs/a` arrives
here as it is.
"""

import functools
import os
import pathlib
import stat
import tempfile

from cocodc_jax.files import say


class NoHomeError(ValueError):
    """A path begins with ~, and the home folder is not known."""


def without_tilde(path: str) -> str:
    """Return a path with a leading ~ or ~USER replaced by that home folder.

    Other text is unchanged, such as `gs://BUCKET/RUN` or the step of `WORKDIR@STEP`.

    Raises:
      NoHomeError: if the home folder is not known.

    >>> without_tilde("gs://bucket/~run"), without_tilde("runs/a@40")
    ('gs://bucket/~run', 'runs/a@40')
    """
    if not path.startswith("~"):
        return path
    # An empty HOME would make ~/runs a folder of the root.
    is_own = path == "~" or path.startswith("~/")
    path_there = "~" if is_own and _has_no_home() else os.path.expanduser(path)
    if path_there.startswith("~"):  # As in containers whose user has no entry.
        raise NoHomeError(
            f"{path} is below a home that is not known; name the folder without ~"
        )
    return path_there


def _has_no_home() -> bool:
    return os.environ.get("HOME") == "" or os.path.expanduser("~") == "~"


def expanded(name: str, asked: str) -> pathlib.Path:
    """Return the absolute path of a name that may begin with ~ or ~USER.

    Args:
      name: the path.
      asked: the flag or argument that names it, as NAME=VALUE, for the error.

    Raises:
      ValueError: if the home folder is not known.
    """
    try:
        return pathlib.Path(without_tilde(name)).absolute()
    except NoHomeError as error:
        raise ValueError(f"{asked}: {error}") from error


def cache_dir(data_dir: str = "") -> pathlib.Path:
    """Return the folder of prepared corpora and trained tokenizers.

    A user who has no home folder, or cannot write to it, gets a private folder below
    the one for temporary files.

    Raises:
      ValueError: if there is no folder to write to.
    """
    if data_dir:
        return expanded(data_dir, f"data_dir={data_dir!r}")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return expanded(base, f"XDG_CACHE_HOME={base!r}") / "cocodc_jax"

    try:
        folder = pathlib.Path(without_tilde("~/.cache/cocodc_jax"))
    except NoHomeError:
        return _temporary_cache("there is no home folder")
    if not _can_be_made(folder):
        return _temporary_cache(f"{folder} cannot be made")
    return folder.absolute()


def _can_be_made(folder: pathlib.Path) -> bool:
    """Return whether a folder exists, or its nearest parent can be written to."""
    if os.path.exists(folder):
        return True
    there = next(path for path in folder.absolute().parents if os.path.exists(path))
    return os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _temporary_cache(reason: str) -> pathlib.Path:
    """Return this user's folder of temporary files, and print a note."""
    repair = "name a folder by data_dir or XDG_CACHE_HOME"
    try:
        folder = pathlib.Path(tempfile.gettempdir(), f"cocodc_jax_{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        # Programs that are kept there are executed, so no other user may write them.
        status = folder.lstat()
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        if not stat.S_ISDIR(status.st_mode) or not is_private:
            raise ValueError(f"{reason}, and {folder} is another user's; {repair}")
    except OSError as error:
        raise ValueError(
            f"{reason}, and no other can be made ({error}); {repair}"
        ) from error

    # Matplotlib looks for a home too, and warns of having none.
    os.environ.setdefault("MPLCONFIGDIR", str(folder / "matplotlib"))
    say(f"note: {reason}; the cache is in {folder}; {repair} to keep it elsewhere")
    return folder
