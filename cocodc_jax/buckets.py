"""Files of a bucket (`gs://`), which knows neither renaming nor appending.

What grows is written here and sent there whole (`send`), and is fetched from there
first (`fetch`). What reaches buckets is imported only where one is named.
"""

import os
import pathlib
import shutil
from typing import IO, Any

from cocodc_jax._extras import extra
from cocodc_jax.files import TransientError, open_regular, read_regular, write_whole


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path names something in a bucket.

    >>> is_in_bucket("gs://models/run"), is_in_bucket("runs/gs")
    (True, False)
    """
    return str(path).startswith("gs://")


def in_bucket(path: str | os.PathLike[str]) -> Any:
    """Return a path in a bucket, an `etils.epath.Path`, of which anything is asked."""
    with extra("gcs"):
        from etils import epath

        bucket_path = epath.Path(path)
        try:
            bucket_path.exists()
        except ImportError as error:
            raise ModuleNotFoundError(str(error), name="gcsfs") from error
        except Exception as error:  # Clients of buckets raise what they like.
            raise TransientError(f"{path} cannot be reached: {error}") from error
    return bucket_path


def fetched(path: str, folder: pathlib.Path) -> pathlib.Path:
    """Copy a file or folder of a bucket to this machine, as far as it is not there."""
    source = in_bucket(path)
    if not source.exists():
        raise ValueError(f"{path} does not exist")
    here = here_of(path, folder)
    if source.is_dir():
        fetch(source, here, is_deep=True)
    else:
        here.parent.mkdir(parents=True, exist_ok=True)
        fetch_file(source, here)
    return here


def open_file(path: Any) -> IO[bytes]:
    """Open a file of a bucket, or a regular file of a folder, to read.

    Raises what `files.open_regular` raises, or the client of the bucket.
    """
    return open_regular(path) if isinstance(path, pathlib.Path) else path.open("rb")


def here_of(path: str | os.PathLike[str], folder: pathlib.Path) -> pathlib.Path:
    """Return what stands in `folder` for a path in a bucket."""
    scheme, _, rest = os.fspath(path).partition("://")
    return folder / "buckets" / scheme / rest.strip("/")


def fetch(source: Any, folder: pathlib.Path, is_deep: bool = False) -> None:
    """Make a folder hold what a folder of a bucket holds, and no other files.

    What is hidden is left alone; and, of a run, logs (`*.log`) of who started it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(source.iterdir()) if source.exists() else []

    names = set()
    for entry in sorted(entries, key=lambda entry: entry.name):
        if not _is_ours(entry.name, is_deep):
            continue
        names.add(entry.name)
        if not entry.is_dir():
            fetch_file(entry, folder / entry.name)
        elif is_deep:
            fetch(entry, folder / entry.name, is_deep)

    for path in folder.iterdir():
        if path.name in names or not _is_ours(path.name, is_deep):
            continue
        if path.is_file():
            path.unlink(missing_ok=True)
        elif is_deep:
            shutil.rmtree(path)


def fetch_file(source: Any, path: pathlib.Path) -> None:
    """Copy a file of a bucket, unless it is here already, of the same time and size."""
    stat = source.stat()
    there = path.stat() if path.exists() else None
    if there and (there.st_size, int(there.st_mtime)) == (stat.length, stat.mtime):
        return
    write_whole(path, source.read_bytes())
    os.utime(path, (stat.mtime, stat.mtime))


def send(folder: pathlib.Path, target: Any, sent: dict[str, tuple[int, int]]) -> None:
    """Write the files of a folder, not of those below it, to a folder of a bucket.

    A file of a bucket is there whole or not at all, as those of `write_whole`.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not _is_ours(path.name):
            continue
        stat = path.stat()
        if sent.get(path.name) != (stat.st_size, stat.st_mtime_ns):
            target.mkdir(parents=True, exist_ok=True)
            (target / path.name).write_bytes(read_regular(path))
            sent[path.name] = (stat.st_size, stat.st_mtime_ns)


def _is_ours(name: str, with_logs: bool = False) -> bool:
    return not name.startswith(".") and (with_logs or not name.endswith(".log"))
