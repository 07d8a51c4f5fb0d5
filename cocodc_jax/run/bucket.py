"""Runs whose folder is in a bucket: `--workdir=gs://BUCKET/RUN`.

Orbax writes checkpoints to buckets itself. Each process writes all other files to a
local folder. It uploads those that changed at every checkpoint, before the checkpoint
refers to them, and when it ends. A resumed run first downloads its files, because it
may be on another machine. There is no lock, only a mark that a process leaves while it
writes.
"""

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any, Self

from cocodc_jax.buckets import fetch, fetch_file, here_of, in_bucket, is_in_bucket, send
from cocodc_jax.paths import cache_dir, without_tilde
from cocodc_jax.run.resume import CONFIG_FILE, FolderInUseError, only_writer

MARK = ".writer"


def folder_here(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Return the local folder that a run's files are first written to.

    A ~ in its path is the home folder.
    """
    if is_in_bucket(workdir):
        return here_of(workdir, cache_dir())
    return pathlib.Path(without_tilde(os.fspath(workdir)))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The remote and the local folder of a run's files."""

    folder: Any  # In the bucket, an `etils.epath.Path`.
    workdir: pathlib.Path
    # See `buckets.send`.
    sent: dict[str, tuple[int, int]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(cls, workdir: str | os.PathLike[str]) -> Self | None:
        """Open the bucket that `workdir` names, None if it names a folder."""
        if not is_in_bucket(workdir):
            return None
        return cls(in_bucket(workdir), folder_here(workdir))

    def begin(self, process: int) -> None:
        """Download a process's files of the run, and the configuration."""
        target, folder = self._folders_of(process)
        # A run that continues on this machine has newer files, and has them open.
        with contextlib.suppress(FolderInUseError), only_writer(folder):
            fetch(target, folder)

        config = self.folder / CONFIG_FILE
        if process and config.exists():
            fetch_file(config, self.workdir / CONFIG_FILE)

    def send(self, process: int) -> None:
        """Upload the files of a process that changed."""
        target, folder = self._folders_of(process)
        send(folder, target, self.sent)

    @contextlib.contextmanager
    def writing(self, process: int) -> Iterator[None]:
        """Mark that a process writes; upload its files when it ends or fails."""
        target, _ = self._folders_of(process)
        mark = target / MARK
        if mark.exists():
            print(
                f"warning: {target} was written to by {mark.read_text().strip()}, "
                "which has not ended by itself; see that it runs no more, as buckets "
                "have no locks",
                file=sys.stderr,
            )

        target.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            self.send(process)
            yield
        finally:
            self.send(process)
            mark.unlink(missing_ok=True)

    def _folders_of(self, process: int) -> tuple[Any, pathlib.Path]:
        """Return the remote and the local folder of a process."""
        if process == 0:
            return self.folder, self.workdir
        name = f"process_{process}"
        return self.folder / name, self.workdir / name
