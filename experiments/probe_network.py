r"""Measures how fast this framework's exchanges cross a network between CPU devices.

    python -m experiments.wan --regions=4 --bandwidth_mbit=100 --latency_ms=50 -- \
        python -m experiments.probe_network --bandwidth_mbit=100 --latency_ms=50

Run the same command in every region, under a launcher that sets COCODC_PROCESS_ID,
COCODC_NUM_PROCESSES and COCODC_COORDINATOR_ADDRESS, as the lab does. A float32 vector
crosses as a fragment does in training, on one CPU device a process: uncompressed by
both all-reduces (`engine/collectives.py`), compressed by both all-gathers. The
processes pause before each exchange, as between two fragments, because TCP restarts
slowly after a pause. Large vectors are sent first and open TCP's windows for the
others. On new connections small vectors take longer, up to a fifth in the lab.

Process 0 prints the slowest process's median over the repeats. If flags describe the
links, it also prints the prediction of `cocodc_jax/network`; the ratio shows the time
that TCP and the machines add. The prediction is for regions that start an exchange at
different times. If they start together, a collective may take less. WORKDIR/probe.json
has all measured seconds. Exit code 2 and one line on standard error for bad flags.
"""

import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl.flags import FlagValues
from rich.console import Console

from cocodc_jax.engine.transfer import gather
from cocodc_jax.files import write_whole
from cocodc_jax.netlab import plan
from cocodc_jax.netlab.probe import (
    COLLECTIVES,
    make_exchange,
    measure,
    outer_devices,
    predict,
)
from cocodc_jax.network import gloo, world
from cocodc_jax.network.links import Link, LinkState, uniform
from cocodc_jax.run.config.command_line import check_numbers
from cocodc_jax.run.exits import while_writable
from cocodc_jax.run.processes import COUNT, Processes, failing_alone
from cocodc_jax.run.resume import make_folder

from . import program

FILE = "probe.json"
_LEAST_MTU_BYTES = 68  # of IPv4


def define_flags() -> FlagValues:
    """Return this program's flags, apart from those of other programs."""
    return program.own_flags(
        ("sizes_mb", "16,4,1,0.1", "vectors of a process in 10^6 bytes, in this order"),
        ("collectives", ",".join(COLLECTIVES), "comma-separated"),
        ("repeats", 5, "timed exchanges of each size, after one that is not counted"),
        ("pause_s", 1.0, "seconds of pause before each exchange"),
        ("bandwidth_mbit", float, "Mbit/s of each link; with --links a region's most"),
        ("latency_ms", 50.0, "milliseconds one way; needs --bandwidth_mbit"),
        ("links", pathlib.Path, "YAML file with regions and links (network/world.py)"),
        ("mtu", int, "bytes of a packet; default: the lab's choice for such links"),
        ("workdir", pathlib.Path, f"folder for {FILE}"),
        **dict.fromkeys(("pause_s", "bandwidth_mbit", "latency_ms"), 0.0),
        repeats=1,
        mtu=_LEAST_MTU_BYTES,
    )


def read_exchanges(values: FlagValues) -> list[tuple[str, int]]:
    """Return the collectives to measure, each at all sizes, in float32 values."""
    try:
        sizes = [round(float(word) * 1e6 / 4) for word in values.sizes_mb.split(",")]
    except (ValueError, OverflowError):  # No number; infinity.
        sizes = []

    if not sizes or min(sizes) < 1:
        raise ValueError(
            f"sizes_mb={values.sizes_mb!r} must be positive numbers, comma-separated"
        )

    names = values.collectives.split(",")
    for name in names:
        if name not in COLLECTIVES:
            raise ValueError(
                f"collectives={name!r} is unknown; use {', '.join(COLLECTIVES)}"
            )

    return list(itertools.product(names, sizes))


def read_links(values: FlagValues, num: int) -> LinkState | None:
    """Return the links between `num` processes, None if no flag describes them.

    Bandwidths of flags include headers, as in the lab. Process k is the k-th region.
    """
    if values.bandwidth_mbit == 0:
        raise ValueError("bandwidth_mbit=0 must be positive")
    if values["latency_ms"].present and (values.links or not values.bandwidth_mbit):
        why = "needs --bandwidth_mbit"
        if values.links:
            why = f"does not go with --links={values.links}, which says it already"
        raise ValueError(f"latency_ms={values.latency_ms:g} {why}")
    if values.mtu and not (values.links or values.bandwidth_mbit):
        raise ValueError(f"mtu={values.mtu} needs --bandwidth_mbit or --links")

    gbps = (values.bandwidth_mbit or 0) / 1000
    if values.links:
        topology = program.named("links", values.links, world.load_topology)
        if topology.num_regions != num:
            raise ValueError(
                f"links={values.links} has {topology.num_regions} regions, but there "
                f"are {num} processes; start one for each"
            )
    elif gbps:
        topology = uniform(num, Link(gbps, values.latency_ms / 1000))
    else:
        return None

    # As the lab, which caps regions, and takes links as they are without changes.
    topology = topology.undisturbed
    cap_bps = gbps * 1e9 or math.inf
    conditions = plan.conditions_over_time(topology, cap_bps)[0]
    mtu = values.mtu or plan.usual_mtu_bytes(conditions)
    state = topology.at()
    share = gloo.payload_share(mtu)
    rate, line = (
        share * np.minimum(x, cap_bps / 8)
        for x in (state.bytes_per_s, state.line_bytes_per_s)
    )

    return LinkState(rate, state.delay_s, float(line))


def probe(
    name: str, num_values: int, repeats: int, pause_s: float, links: LinkState | None
) -> dict[str, Any]:
    """Measure one collective and size; every process gets the same row."""
    num_bytes = 4 * num_values
    send = make_exchange(name, outer_devices(), num_values)
    seconds = gather(measure(send, repeats, pause_s))
    row = {
        "collective": name,
        "num_bytes": num_bytes,
        "measured_s": max(map(statistics.median, seconds)),
        "seconds": seconds,
    }

    return row if links is None else row | predict(name, num_bytes, links)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table of the rows of `probe`."""
    heads = ("collective", "MB", "measured s", "predicted s", "ratio", "at once s")
    lines = []
    for row in rows:
        measured_s = row["measured_s"]
        cells = [row["collective"], f"{row['num_bytes'] / 1e6:g}", f"{measured_s:.3f}"]
        if "predicted_s" in row:
            predicted_s = row["predicted_s"]
            cells += [f"{predicted_s:.3f}", f"{measured_s / predicted_s:.2f}"]
            cells.append(f"{row['at_once_s']:.3f}")
        lines.append(cells)

    console.print(program.table(heads, lines, is_ruled=True))


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    values = define_flags()
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        processes = Processes.from_environment()
        if processes.num_processes < 2:
            raise ValueError(
                f"{COUNT} in the environment must be at least 2; run under "
                "experiments.wan, or set it in every region"
            )

        check_numbers(values)
        links = read_links(values, processes.num_processes)
        exchanges = read_exchanges(values)

        if values.workdir and processes.process_id < 1:
            make_folder(pathlib.Path(values.workdir))
        processes.start(processes.num_processes)

    with failing_alone(), while_writable():
        rows = [
            probe(name, num_values, values.repeats, values.pause_s, links)
            for name, num_values in exchanges
        ]

        if jax.process_index() == 0:
            show(rows, Console())
            if values.workdir:
                own_flags = {n: values[n].value for n in values if n != "help"}
                text = json.dumps({"flags": own_flags, "rows": rows}, indent=1)
                write_whole(pathlib.Path(values.workdir) / FILE, text + "\n")

    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
