"""Files of a bucket (`gs://`), which can neither rename nor append.

Files that grow are first fetched to a local folder (`fetch`), written there, and sent
to the bucket in full (`send`). The bucket's client is imported only if a path needs it.
"""

import os
import pathlib
import shutil
from typing import IO, Any

from cocodc_jax._extras import extra
from cocodc_jax.files import TransientError, open_regular, read_regular, write_whole


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is in a bucket.

    >>> is_in_bucket("gs://models/run"), is_in_bucket("runs/gs")
    (True, False)
    """
    return str(path).startswith("gs://")


def in_bucket(path: str | os.PathLike[str]) -> Any:
    """Return a path in a bucket as an `etils.epath.Path`, if it can be reached."""
    with extra("gcs"):
        from etils import epath

        bucket_path = epath.Path(path)
        try:
            bucket_path.exists()
        except ImportError as error:
            raise ModuleNotFoundError(str(error), name="gcsfs") from error
        except Exception as error:  # Clients of buckets raise errors of any type.
            raise TransientError(f"{path} cannot be reached: {error}") from error
    return bucket_path


def fetched(path: str, folder: pathlib.Path) -> pathlib.Path:
    """Copy a file or folder of a bucket to this machine; return the local path."""
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
    """Return the path in `folder` of the local copy of a path in a bucket."""
    scheme, _, rest = os.fspath(path).partition("://")
    return folder / "buckets" / scheme / rest.strip("/")


def fetch(source: Any, folder: pathlib.Path, is_deep: bool = False) -> None:
    """Make a folder equal to a folder of a bucket: copy its files, remove others.

    Hidden files are left alone, and so are a launcher's logs (`*.log`) of a run.
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
    """Copy a file of a bucket, unless there is a copy of the same time and size."""
    stat = source.stat()
    there = path.stat() if path.exists() else None
    if there and (there.st_size, int(there.st_mtime)) == (stat.length, stat.mtime):
        return
    write_whole(path, source.read_bytes())
    os.utime(path, (stat.mtime, stat.mtime))


def send(folder: pathlib.Path, target: Any, sent: dict[str, tuple[int, int]]) -> None:
    """Write the files of a folder, but not of its subfolders, to a folder of a bucket.

    A file of a bucket is complete or missing, like those of `write_whole`.
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
