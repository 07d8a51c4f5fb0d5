"""Compiles a run's programs in a separate process, and reads its records.

`Job.run` starts `python -m cocodc_jax.aot.job JOB RECORDS`, because JAX reads a
target's environment when it starts. JOB is JSON. RECORDS gets two lines of JSON for
each program, one when its compilation begins and one when it is done, so a crash shows
which program it was.

The estimate of a program's time is a roofline, a lower bound. A device computes, reads
and writes its memory, and takes part in collectives inside its slice at the same time,
each at its full published rate; the longest of the three counts. Messages between
regions add to it unless the schedule shows that they span the steps. A program that
takes longer is slowed by something that is not counted here: latencies, operations
other than matrix products, padding.
"""

import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax

from cocodc_jax.aot import costs, hlo, programs
from cocodc_jax.aot.collectives import BETWEEN_SLICES, Collective, collectives
from cocodc_jax.aot.programs import Built, device_of
from cocodc_jax.aot.targets import Target
from cocodc_jax.chips import Chip
from cocodc_jax.engine.devices import LoweredProgram
from cocodc_jax.engine.mesh import REGION
from cocodc_jax.netlab import children
from cocodc_jax.run.config.train_config import TrainConfig

Begins = Callable[[str, int, int], None]
Record = dict[str, Any]
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BETWEEN = {REGION, BETWEEN_SLICES}  # axes that messages between regions cross


class CompileError(Exception):
    """The process that compiles ended without an answer."""


class UnknownProgramError(ValueError):
    """No program of the run has such a name."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What to compile."""

    config: TrainConfig  # Of the run, as `programs.place` gives it.
    target: Target
    programs: str = ""  # Regular expression found in the names of those to compile.
    hlo_dir: pathlib.Path | None = None  # Folder for the scheduled programs.

    def run(
        self, begins: Begins = lambda name, number, total: None
    ) -> tuple[Record, list[Record]]:
        """Compile, in a process with the target's environment.

        Args:
          begins: called as the compilation of each program begins, with the program's
            name, its number from 1, and the number of programs.

        Returns:
          What holds for all programs, and a record of each, as `main` writes them.

        Raises:
          CompileError: if the process ended without an answer.
          UnknownProgramError: if `programs` matches no name.
        """
        with tempfile.TemporaryDirectory() as folder:
            job = pathlib.Path(folder, "job")
            records = pathlib.Path(folder, "records")
            log = pathlib.Path(folder, "log")
            description = dict(
                config=self.config.to_json(),
                target=str(self.target),
                slices=self.target.slices,
                programs=self.programs,
                hlo_dir=self.hlo_dir and str(self.hlo_dir),
            )
            job.write_text(json.dumps(description))
            records.touch()

            lines: list[Record] = []
            words = ("-m", "cocodc_jax.aot.job", str(job), str(records))
            with records.open() as stream:
                code = children.run(
                    [sys.executable, *words],
                    os.environ | self.target.environment(),
                    log,
                    lambda: _follow(stream, lines, begins),
                )
            if code:
                raise CompileError(_why(code, lines, log.read_text()))

        about = next(line["about"] for line in lines if "about" in line)
        programs = [line["program"] for line in lines if "program" in line]
        if not programs:
            names = next(line["names"] for line in lines if "names" in line)
            raise UnknownProgramError(
                f"programs={self.programs!r} is found in none of {', '.join(names)}"
            )

        return about, programs


def _follow(stream: TextIO, lines: list[Record], begins: Begins) -> None:
    """Read the lines written since the last call, and report programs that begin."""
    at = stream.tell()
    while (line := stream.readline()).endswith("\n"):
        lines.append(json.loads(line))
        at = stream.tell()
        if "begins" in lines[-1]:
            begins(*lines[-1]["begins"])
    stream.seek(at)  # The rest of a line is still being written.


def _why(code: int, lines: list[Record], log: str) -> str:
    started = [line["begins"] for line in lines if "begins" in line]
    name = started[-1][0] if started else "what comes first"
    tail = "\n".join(log.strip().splitlines()[-12:])
    how = f"ended with code {code}"
    if code > 128:
        how = f"was killed by signal {code - 128}"
    return f"the process that compiles {how} at {name!r}; its last lines:\n{tail}"


def main(job_file: str, records_file: str) -> None:
    """Compile the programs of a job, and write a record of each."""
    job = json.loads(pathlib.Path(job_file).read_text())
    config = TrainConfig.from_json(job["config"])
    built = programs.build(config, Target.parse(job["target"], job["slices"]))
    num_devices = built.mesh.size
    chip = device_of(built.target, built.mesh)
    about = dict(
        num_devices=num_devices,
        mesh=dict(built.mesh.shape),
        hbm_bytes=chip.hbm_bytes,
        peak_flops=chip.flops,
        scan_steps=built.scan_steps,
        syncs_per_step=built.syncs_per_step,
        num_fragments=len(built.program.fragments),
        model_flops=programs.model_flops(config, num_devices),
        recomputed_flops=programs.recomputed_flops(built, config),
        least_bytes_inside=programs.least_bytes_inside(built, config),
    )

    with open(records_file, "w", buffering=1) as records:

        def write(**values: Any) -> None:
            records.write(json.dumps(values) + "\n")

        write(about=about)
        write(names=[listed.name for listed in built.listed])

        chosen = [x for x in built.listed if re.search(job["programs"], x.name)]
        for number, listed in enumerate(chosen, 1):
            write(begins=[listed.name, number, len(chosen)])
            write(program=compile_one(built, listed, job["hlo_dir"]))


def compile_one(built: Built, listed: LoweredProgram, hlo_dir: str | None) -> Record:
    """Compile a program; return its record, with `refused` if it does not fit."""
    began = time.perf_counter()
    record: Record = dict(
        name=listed.name,
        calls_steps=listed.num_steps or None,
        sent_bytes=listed.sent_bytes,
        options=dict(listed.options),
        held_bytes=programs.held_bytes(built, listed),
    )

    traced = listed.program.trace(*listed.arguments)
    lowered = traced.lower(lowering_platforms=(built.target.chip.platform,))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return record | dict(
            fits=False,
            seconds=time.perf_counter() - began,
            refused=str(error).splitlines()[0],
            temp_bytes=needed,
        )

    record["seconds"] = time.perf_counter() - began

    text = compiled.as_text()
    if hlo_dir:
        name = listed.name.replace(" ", "_") + ".txt"
        (pathlib.Path(hlo_dir) / name).write_text(text)

    memory = compiled.memory_analysis()
    record |= dict(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
    )
    record |= _measured(text, built)
    peak = costs.peak_bytes(memory, record["held_bytes"])
    hbm_bytes = device_of(built.target, built.mesh).hbm_bytes

    return record | dict(peak_bytes=peak, fits=peak <= hbm_bytes)


def _measured(text: str, built: Built) -> Record:
    """Read what a scheduled program computes and moves."""
    module = hlo.parse(text)
    mesh_shape = dict(built.mesh.shape)
    if built.target.slices > 1:  # The module of one slice numbers only its devices.
        mesh_shape[REGION] //= built.target.slices

    exchanges = collectives(module, mesh_shape)
    flops = costs.flops(module, built.even_share)
    moved_bytes = costs.hbm_bytes(module)
    chip = device_of(built.target, built.mesh)
    least = estimate(chip, flops, moved_bytes, exchanges)
    return dict(
        flops=flops,
        hbm_moved_bytes=moved_bytes,
        estimate=dict(
            dataclasses.asdict(least), seconds=least.seconds, limit=least.limit
        ),
        collectives=_grouped(exchanges),
    )


def _is_between(collective: Collective) -> bool:
    return bool(_BETWEEN & set(collective.axes))


def _grouped(exchanges: Sequence[Collective]) -> list[Record]:
    """Sum collectives of one kind and place; those that move most come first."""
    groups: dict[tuple, list[Collective]] = {}
    for collective in exchanges:
        where = "between" if _is_between(collective) else "inside"
        key = (
            collective.kind,
            where,
            collective.axes,
            collective.is_async,
            collective.spans,
        )
        groups.setdefault(key, []).append(collective)

    rows = []
    for (kind, where, axes, is_async, spans), group in groups.items():
        largest = max((c.array for c in group), key=lambda array: array.num_bytes)
        row = dict(
            kind=kind,
            where=where,
            axes=axes,
            is_async=is_async,
            spans=spans,
            count=len(group),
            executions=sum(c.times for c in group),
            num_bytes=sum(c.num_bytes * c.times for c in group),
            largest=f"{largest.dtype}[{','.join(map(str, largest.dims))}]",
        )
        rows.append(row)

    return sorted(rows, key=lambda row: -row["num_bytes"])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one call of a program."""

    compute_s: float  # Matrix products.
    hbm_s: float  # Reads and writes of main memory.
    link_s: float  # Collectives inside regions.
    network_s: float  # Collectives between regions that do not overlap the inner steps.
    hidden_s: float  # Collectives between regions that span the inner steps.

    @property
    def seconds(self) -> float:
        """The least time of a call.

        Computation, memory traffic, links, and messages that span the steps run at the
        same time, so the longest counts; other messages between regions add to it.
        """
        concurrent_s = max(self.compute_s, self.hbm_s, self.link_s, self.hidden_s)
        return concurrent_s + self.network_s

    @property
    def limit(self) -> str:
        """The largest term; messages that span the steps count as network."""
        parts = {
            "compute": self.compute_s,
            "memory": self.hbm_s,
            "links": self.link_s,
            "network": max(self.network_s, self.hidden_s),
        }
        return max(parts, key=parts.__getitem__)


def estimate(
    chip: Chip, flops: float, hbm_bytes: float, exchanges: Sequence[Collective]
) -> Estimate:
    """Estimate the time of one call from what one device computes and moves."""

    def seconds(rate: float, is_between: bool, spans: bool | None = None) -> float:
        return sum(
            collective.num_bytes * collective.times / rate
            for collective in exchanges
            if _is_between(collective) == is_between
            and spans in (None, collective.spans)
        )

    return Estimate(
        compute_s=flops / chip.flops,
        hbm_s=hbm_bytes / chip.hbm_bps,
        link_s=seconds(chip.link_bps, is_between=False),
        network_s=seconds(chip.network_bps, is_between=True, spans=False),
        hidden_s=seconds(chip.network_bps, is_between=True, spans=True),
    )


def needed_bytes(message: str) -> int | None:
    """Read from a compiler's error how much memory a program needs.

    None if the error is not about memory; 0 if it gives no number.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None

    number = r"([\d.]+)\s?([KMGT]?)(?:iB|B)?"
    for around in (
        rf"temporaries \({number}\)",
        rf"Used {number} of",
        rf"allocate {number}",
        rf"requires? {number}",
    ):
        if match := re.search(around, message):
            return int(float(match[1]) * _UNITS[match[2]])

    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
