"""Starting the process that compiles, and reading what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, TextIO

from cocodc_jax.aot.targets import Target
from cocodc_jax.netlab import children
from cocodc_jax.run.config import TrainConfig

Begins = Callable[[str, int, int], None]


class CompileError(Exception):
    """The process that compiles ended without an answer."""


class UnknownProgramError(ValueError):
    """No program of the run has such a name."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to compile.

    Attributes:
      config: of the run, as `programs.place` gives it.
      target: the machine.
      programs: regular expression that is found in the names of those to compile.
      hlo_dir: folder for the scheduled programs, or None.
    """

    config: TrainConfig
    target: Target
    programs: str = ""
    hlo_dir: pathlib.Path | None = None

    def run(
        self, begins: Begins = lambda name, number, total: None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Compile, in a process with the target's environment.

        `begins` is called with each program as it begins: its name, its number from 1,
        and how many there are. Returns what holds for all programs, and a record of
        each, as `child` writes them.

        Raises:
          CompileError: with the last lines that the process wrote.
          UnknownProgramError: if no program has such a name.
        """
        with tempfile.TemporaryDirectory() as folder:
            job, records = (pathlib.Path(folder) / name for name in ("job", "records"))
            records.touch()
            told = dict(
                config=self.config.to_json(),
                target=str(self.target),
                slices=self.target.slices,
                programs=self.programs,
                hlo_dir=self.hlo_dir and str(self.hlo_dir),
            )
            job.write_text(json.dumps(told))
            log = pathlib.Path(folder) / "log"
            command = (sys.executable, "-m", "cocodc_jax.aot.child", job, records)
            found: list[dict[str, Any]] = []
            with records.open() as stream:
                code = children.run(
                    [str(part) for part in command],
                    os.environ | self.target.environment(),
                    log,
                    lambda: _follow(stream, found, begins),
                )
            if code:
                raise CompileError(_why(code, found, log.read_text()))
        about = next(line["about"] for line in found if "about" in line)
        programs = [line["program"] for line in found if "program" in line]
        if not programs:
            names = next(line["names"] for line in found if "names" in line)
            raise UnknownProgramError(
                f"programs={self.programs!r} is found in none of {', '.join(names)}"
            )
        return about, programs


def _follow(stream: TextIO, found: list[dict[str, Any]], begins: Begins) -> None:
    """Read the lines that have come since, and tell of programs that begin."""
    at = stream.tell()
    while (line := stream.readline()).endswith("\n"):
        found.append(json.loads(line))
        at = stream.tell()
        if "begins" in found[-1]:
            begins(*found[-1]["begins"])
    stream.seek(at)  # The rest of a line is still being written.


def _why(code: int, found: list[dict[str, Any]], log: str) -> str:
    started = [line["begins"] for line in found if "begins" in line]
    name = started[-1][0] if started else "what comes first"
    tail = "\n".join(log.strip().splitlines()[-12:])
    is_killed = code > 128
    how = (
        f"was killed by signal {code - 128}" if is_killed else f"ended with code {code}"
    )
    return f"the process that compiles {how} at {name!r}; its last lines:\n{tail}"
