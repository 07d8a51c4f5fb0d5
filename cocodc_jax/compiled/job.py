"""Starting the process that compiles, and reading what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from cocodc_jax.compiled.targets import Target
from cocodc_jax.run.config import TrainConfig


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
        self, begins: Callable[[str], None] = lambda name: None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Compile, in a process with the target's environment.

        Args:
          begins: called with each program as it begins.

        Returns:
          What holds for all programs, and a record of each, as `child` writes them.

        Raises:
          CompileError: with the last lines that the process wrote.
          UnknownProgramError: if no program has such a name.
        """
        with tempfile.TemporaryDirectory() as folder:
            job, records = (pathlib.Path(folder) / name for name in ("job", "records"))
            records.touch()
            job.write_text(
                json.dumps(
                    dict(
                        config=self.config.to_json(),
                        target=str(self.target),
                        slices=self.target.slices,
                        programs=self.programs,
                        hlo_dir=self.hlo_dir and str(self.hlo_dir),
                    )
                )
            )
            log = pathlib.Path(folder) / "log"
            command = (sys.executable, "-m", "cocodc_jax.compiled.child", job, records)
            with log.open("w") as output:
                process = subprocess.Popen(
                    [str(part) for part in command],
                    env=os.environ | self.target.environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                lines = _follow(process, records, begins)
            if process.returncode:
                raise CompileError(_why(process.returncode, lines, log.read_text()))
        found = [json.loads(line) for line in lines]
        about = next(line["about"] for line in found if "about" in line)
        programs = [line["program"] for line in found if "program" in line]
        if not programs:
            names = next(line["names"] for line in found if "names" in line)
            raise UnknownProgramError(
                f"programs={self.programs!r} is found in none of {', '.join(names)}"
            )
        return about, programs


def _follow(
    process: subprocess.Popen, records: pathlib.Path, begins: Callable[[str], None]
) -> list[str]:
    """Read lines as they come, until the process has ended."""
    lines, part = [], ""
    try:
        with records.open() as stream:
            while True:
                has_ended = process.poll() is not None
                for line in stream:
                    part += line
                    if not part.endswith("\n"):  # The rest is still being written.
                        continue
                    lines.append(part)
                    if name := json.loads(part).get("begins"):
                        begins(name)
                    part = ""
                if has_ended:
                    return lines
                time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def _why(code: int, lines: list[str], log: str) -> str:
    started = [json.loads(line).get("begins") for line in lines]
    name = next((name for name in reversed(started) if name), "what comes first")
    tail = "\n".join(log.strip().splitlines()[-12:])
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"the process that compiles {how} at {name!r}; its last lines:\n{tail}"
