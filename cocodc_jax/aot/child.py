"""The process that compiles: `python -m cocodc_jax.aot.child JOB RECORDS`.

JOB is JSON as `job.Job` writes it; to RECORDS goes a line of JSON for each program,
one when it begins and one when it is done, so that a process that dies tells where.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import time
from typing import Any, TextIO

import jax

from cocodc_jax.aot import costs, hlo, roofline
from cocodc_jax.aot.collectives import Collective, collectives
from cocodc_jax.aot.programs import (
    BETWEEN,
    Built,
    build,
    device_of,
    held_bytes,
    least_bytes_inside,
    model_flops,
    recomputed_flops,
)
from cocodc_jax.aot.targets import Target
from cocodc_jax.exchange.programs import LoweredProgram
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.sharding.mesh import REGION

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(job_file: str, records_file: str) -> None:
    """Compile the programs of a job."""
    job = json.loads(pathlib.Path(job_file).read_text())
    config = TrainConfig.from_json(job["config"])
    target = Target.parse(job["target"], job["slices"])
    with open(records_file, "w", buffering=1) as records:
        compile_all(config, target, records, job["programs"], job["hlo_dir"])


def compile_all(
    config: TrainConfig,
    target: Target,
    records: TextIO,
    programs: str,
    hlo_dir: str | None,
) -> None:
    """Compile the programs of a run, and write what was found.

    Args:
      config: as `programs.place` gives it.
      target: the machine.
      records: where to.
      programs: regular expression that is found in the names of those to compile.
      hlo_dir: folder for the scheduled programs, or None.
    """
    built = build(config, target)
    num_devices, chip = built.mesh.size, device_of(target, built.mesh)

    def write(**values: Any) -> None:
        records.write(json.dumps(values) + "\n")

    write(
        about=dict(
            num_devices=num_devices,
            mesh={name: int(size) for name, size in built.mesh.shape.items()},
            hbm_bytes=chip.hbm_bytes,
            peak_flops=chip.flops,
            scan_steps=built.scan_steps,
            syncs_per_step=built.syncs_per_step,
            num_fragments=len(built.program.fragments),
            model_flops=model_flops(config, num_devices),
            recomputed_flops=recomputed_flops(built, config),
            least_bytes_inside=least_bytes_inside(built, config),
        )
    )
    write(names=[listed.name for listed in built.listed])
    chosen = [each for each in built.listed if re.search(programs, each.name)]
    for number, listed in enumerate(chosen, 1):
        write(begins=[listed.name, number, len(chosen)])
        write(program=compile_one(built, listed, target, hlo_dir))


def compile_one(
    built: Built, listed: LoweredProgram, target: Target, hlo_dir: str | None
) -> dict[str, Any]:
    """Compile a program; returns its record, with `refused` where it does not fit."""
    began = time.perf_counter()
    record: dict[str, Any] = dict(
        name=listed.name,
        calls_steps=listed.num_steps or None,
        sent_bytes=listed.sent_bytes,
        options=dict(listed.options),
        held_bytes=held_bytes(built, listed),
    )
    options = {"lowering_platforms": (target.chip.platform,)}
    lowered = listed.program.trace(*listed.arguments).lower(**options)
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
    return record | measure(text, built, target) | _fits(record, built, target)


def _fits(record: dict[str, Any], built: Built, target: Target) -> dict[str, Any]:
    peak = record["argument_bytes"] + record["output_bytes"] - record["alias_bytes"]
    peak += record["temp_bytes"] + record["code_bytes"] + record["held_bytes"]
    return dict(peak_bytes=peak, fits=peak <= device_of(target, built.mesh).hbm_bytes)


def measure(text: str, built: Built, target: Target) -> dict[str, Any]:
    """Read a scheduled program.

    Args:
      text: HLO.
      built: whose program it is.
      target: the machine.
    """
    module = hlo.parse(text)
    mesh_shape = {name: int(size) for name, size in built.mesh.shape.items()}
    if target.slices > 1:  # One slice's module: it numbers its own devices only.
        mesh_shape[REGION] //= target.slices
    found = collectives(module, mesh_shape)
    flops, moved = costs.flops(module), costs.hbm_bytes(module)
    estimate = roofline.estimate(
        device_of(target, built.mesh), flops, moved, found, BETWEEN
    )
    return dict(
        flops=flops,
        hbm_moved_bytes=moved,
        estimate=dataclasses.asdict(estimate)
        | dict(seconds=estimate.seconds, limit=estimate.limit),
        collectives=_grouped(found),
    )


def _grouped(found: list[Collective]) -> list[dict[str, Any]]:
    """Sum collectives that are alike; those that move most come first."""
    rows: dict[tuple, dict[str, Any]] = {}
    for each in found:
        largest = f"{each.array.dtype}[{','.join(map(str, each.array.dims))}]"
        where = "between" if BETWEEN & set(each.axes) else "inside"
        key = (each.kind, where, each.axes, each.is_async, each.spans)
        names = ("kind", "where", "axes", "is_async", "spans")
        row = rows.setdefault(
            key,
            dict(zip(names, key, strict=True))
            | dict(count=0, executions=0, num_bytes=0.0, largest=largest, most=0),
        )
        row["count"] += 1
        row["executions"] += each.times
        row["num_bytes"] += each.num_bytes * each.times
        if each.array.num_bytes > row["most"]:
            row |= dict(most=each.array.num_bytes, largest=largest)
    for row in rows.values():
        del row["most"]
    return sorted(rows.values(), key=lambda row: -row["num_bytes"])


def needed_bytes(message: str) -> int | None:
    """Read from a compiler's refusal how much memory a program needs.

    >>> needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    ...              "required for HLO temporaries (36.57G) exceeds (15.75G).") >> 20
    37447

    Args:
      message: of the error.

    Returns:
      None if it is no such refusal; 0 if it gives no number.
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
        if found := re.search(around, message):
            return int(float(found[1]) * _UNITS[found[2]])
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
