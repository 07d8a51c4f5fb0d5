"""A run whose folder is in a bucket: `--workdir=gs://BUCKET/RUN`.

Checkpoints are Orbax's, which writes to buckets itself, every process its own arrays.
All other files of a run grow, line by line or in place, which files of a bucket cannot:
each process writes its own to a folder of its machine, and sends those that changed at
every checkpoint, before that refers to them, and when it ends. Whoever goes on begins
by fetching its own: the bucket is what counts, and the machine may be another.

Given up against a folder that processes share: there is no lock. A process leaves a
mark while it writes; one that finds another's says so, and cannot know whether that is
alive. And checkpoints have no checksums of this package, as a bucket has its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

from cocodc_jax.buckets import fetch, fetch_file, here_of, in_bucket, is_in_bucket, send
from cocodc_jax.data.config import cache_dir
from cocodc_jax.run.resume import CONFIG_FILE

MARK = ".writer"


def folder_here(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Return the folder of this machine that a run's files are written to first."""
    if is_in_bucket(workdir):
        return here_of(workdir, cache_dir())
    return pathlib.Path(workdir)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Where the files of a run go, and where they are written first.

    Attributes:
      folder: of the run in the bucket, an `etils.epath.Path`.
      workdir: the folder here that stands for it.
      sent: see `buckets.send`, by folder.
    """

    folder: Any
    workdir: pathlib.Path
    sent: dict[str, dict[str, tuple[int, int]]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(cls, workdir: str | os.PathLike[str]) -> Bucket | None:
        """Open the bucket that `workdir` names, None where it names a folder.

        Raises:
          MissingExtraError: if what reaches buckets is not installed.
          ValueError: if it cannot be reached.
        """
        if not is_in_bucket(workdir):
            return None
        return cls(in_bucket(workdir), folder_here(workdir))

    def begin(self, process: int) -> None:
        """Fetch what a process needs of the run: its own files, and the configuration.

        Raises:
          OSError: if that cannot be.
        """
        fetch(*self._own(process))
        config = self.folder / CONFIG_FILE
        if process and config.exists():
            fetch_file(config, self.workdir / CONFIG_FILE)

    def send(self, process: int) -> None:
        """Send the files of a process that changed.

        Raises:
          OSError: if they cannot be written.
        """
        target, folder = self._own(process)
        send(folder, target, self.sent.setdefault(str(folder), {}))

    @contextlib.contextmanager
    def writing(self, process: int) -> Iterator[None]:
        """Mark that a process writes, and send its files however it ends."""
        target, folder = self._own(process)
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

    def _own(self, process: int) -> tuple[Any, pathlib.Path]:
        """Return the folders of a process, there and here."""
        name = f"process_{process}"
        if not process:
            return self.folder, self.workdir
        return self.folder / name, self.workdir / name
