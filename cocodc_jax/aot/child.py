"""The process that compiles: `python -m cocodc_jax.aot.child JOB RECORDS`.

JOB is JSON as `job.Job` writes it; to RECORDS goes a line of JSON for each program,
one when it begins and one when it is done, so that a process that dies tells where.

What a program takes at least is a roofline of what a chip can do. A device computes,
reads and writes its memory, and takes part in collectives inside its slice at the same
time, each at its full published rate; the longest of the three is the estimate. What
crosses between regions adds to it unless the schedule shows it to span the steps.
Nothing runs faster; what runs slower has its reason in something not counted here
(latencies, other work than matrix products, padding).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from cocodc_jax.aot import costs, hlo
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
from cocodc_jax.chips import Chip
from cocodc_jax.exchange.programs import LoweredProgram
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.sharding.mesh import REGION

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(job_file: str, records_file: str) -> None:
    """Compile the programs of a job, and write what was found."""
    job = json.loads(pathlib.Path(job_file).read_text())
    config = TrainConfig.from_json(job["config"])
    built = build(config, Target.parse(job["target"], job["slices"]))
    num_devices, chip = built.mesh.size, device_of(built.target, built.mesh)
    about = dict(
        num_devices=num_devices,
        mesh=dict(built.mesh.shape),
        hbm_bytes=chip.hbm_bytes,
        peak_flops=chip.flops,
        scan_steps=built.scan_steps,
        syncs_per_step=built.syncs_per_step,
        num_fragments=len(built.program.fragments),
        model_flops=model_flops(config, num_devices),
        recomputed_flops=recomputed_flops(built, config),
        least_bytes_inside=least_bytes_inside(built, config),
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


def compile_one(
    built: Built, listed: LoweredProgram, hlo_dir: str | None
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
    options = {"lowering_platforms": (built.target.chip.platform,)}
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
    record |= _measured(text, built)
    peak = record["argument_bytes"] + record["output_bytes"] - record["alias_bytes"]
    peak += record["temp_bytes"] + record["code_bytes"] + record["held_bytes"]
    hbm_bytes = device_of(built.target, built.mesh).hbm_bytes
    return record | dict(peak_bytes=peak, fits=peak <= hbm_bytes)


def _measured(text: str, built: Built) -> dict[str, Any]:
    """Read what a scheduled program computes and moves."""
    module, mesh_shape = hlo.parse(text), dict(built.mesh.shape)
    if built.target.slices > 1:  # One slice's module: it numbers its own devices only.
        mesh_shape[REGION] //= built.target.slices
    found = collectives(module, mesh_shape)
    flops = costs.flops(module, built.even_share)
    moved = costs.hbm_bytes(module)
    least = estimate(device_of(built.target, built.mesh), flops, moved, found)
    return dict(
        flops=flops,
        hbm_moved_bytes=moved,
        estimate=dataclasses.asdict(least)
        | dict(seconds=least.seconds, limit=least.limit),
        collectives=_grouped(found),
    )


def _is_between(each: Collective) -> bool:
    return bool(BETWEEN & set(each.axes))


def _grouped(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Sum collectives that are alike; those that move most come first."""
    rows: dict[tuple, dict[str, Any]] = {}
    most: dict[tuple, int] = {}
    for each in found:
        alike = dict(
            kind=each.kind,
            where="between" if _is_between(each) else "inside",
            axes=each.axes,
            is_async=each.is_async,
            spans=each.spans,
        )
        key = tuple(alike.values())
        row = rows.setdefault(key, alike | dict(count=0, executions=0, num_bytes=0.0))
        row["count"] += 1
        row["executions"] += each.times
        row["num_bytes"] += each.num_bytes * each.times
        if each.array.num_bytes > most.get(key, -1):
            most[key] = each.array.num_bytes
            row["largest"] = (
                f"{each.array.dtype}[{','.join(map(str, each.array.dims))}]"
            )
    return sorted(rows.values(), key=lambda row: -row["num_bytes"])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one call of a program.

    Attributes:
      compute_s: of matrix products.
      hbm_s: of main memory.
      link_s: of collectives inside regions.
      network_s: of collectives between regions that nothing hides.
      hidden_s: of those that span the inner steps.
    """

    compute_s: float
    hbm_s: float
    link_s: float
    network_s: float
    hidden_s: float

    @property
    def seconds(self) -> float:
        """The least time: what spans the steps may take longer than they do."""
        beside = max(self.compute_s, self.hbm_s, self.link_s, self.hidden_s)
        return beside + self.network_s

    @property
    def limit(self) -> str:
        """What it is limited by most."""
        parts = {
            "compute": self.compute_s,
            "memory": self.hbm_s,
            "links": self.link_s,
            "network": max(self.network_s, self.hidden_s),
        }
        return max(parts, key=lambda name: parts[name])


def estimate(
    chip: Chip, flops: float, hbm_bytes: float, found: Sequence[Collective]
) -> Estimate:
    """Estimate one call of a program by what one device computes and moves in it."""

    def seconds(rate: float, is_between: bool, spans: bool | None = None) -> float:
        return sum(
            each.num_bytes * each.times / rate
            for each in found
            if _is_between(each) == is_between and spans in (None, each.spans)
        )

    return Estimate(
        flops / chip.flops,
        hbm_bytes / chip.hbm_bps,
        seconds(chip.link_bps, False),
        seconds(chip.network_bps, True, False),
        seconds(chip.network_bps, True, True),
    )


def needed_bytes(message: str) -> int | None:
    """Read from a compiler's refusal how much memory a program needs.

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
