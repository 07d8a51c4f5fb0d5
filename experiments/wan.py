r"""Runs a command once per region, in network namespaces joined by a slow network.

    python -m experiments.wan --regions=4 --bandwidth_mbit=100 --latency_ms=50 \
        -- python -m experiments.train --process_id={region} ...

The command needs no change. It has one network interface, over which TCP and UDP reach
the other regions with delay, limited bandwidth and losses. `{region}` in the command is
replaced by the region's number. The environment has COCODC_PROCESS_ID,
COCODC_NUM_PROCESSES, COCODC_COORDINATOR_ADDRESS (region 0, a free port) and
COCODC_LOCAL_ADDRESS. The host's name resolves to the region's address, and region0,
region1, ... to the addresses of all regions.

Region 0 writes to the terminal, region N to LOGDIR/region_N.log. LOGDIR/traffic.json
counts bytes and packets of every ordered pair of regions. If a region fails, the others
are ended, and its exit code is the program's. The exit code is 2, with one line on
standard error, for bad flags or missing permissions, and 1 if the lab itself failed.

The network is a relay in user space over TUN devices. `netem` would do the same inside
the kernel, but many kernels lack it, so the lab does not use it.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from absl.flags import FlagValues

from cocodc_jax.netlab import launch, region
from cocodc_jax.netlab.plan import Plan, make_plan
from cocodc_jax.network import world
from cocodc_jax.network.links import Topology
from cocodc_jax.run.config.command_line import check_numbers

from . import commands, program

_DEFAULT_MBIT = 100.0
_DEFAULT_LATENCY_MS = 50.0
_LONGEST_GRACE_S = 86_400.0
_LINK_FLAGS = ("regions", "latency_ms", "jitter_ms", "loss")


SECTIONS = {
    "The links": (
        ("regions", 2, "regions"),
        (
            "bandwidth_mbit",
            float,
            "Mbit/s of each ordered pair, and the most that a region sends or "
            f"receives; default {_DEFAULT_MBIT:g}. With --links the file sets the "
            "pairs, and this limits regions; default: no limit",
        ),
        ("latency_ms", _DEFAULT_LATENCY_MS, "milliseconds one way"),
        ("jitter_ms", 0.0, "milliseconds either way; packets keep their order"),
        ("loss", 0.0, "share of packets lost, in [0, 1)"),
        (
            "world",
            str,
            f"cloud regions, comma-separated, of {', '.join(world.REGIONS)}",
        ),
        (
            "links",
            pathlib.Path,
            "YAML file with regions, links, changes (network/world.py)",
        ),
        (
            "schedule",
            pathlib.Path,
            "YAML list of changes of the links (network/world.py)",
        ),
    ),
    "The lab": (
        (
            "logdir",
            pathlib.Path,
            "folder for logs and counters; default: a new one in /tmp",
        ),
        (
            "mtu",
            int,
            "bytes of a packet; default: what the slowest link carries in 1 ms, 1500 "
            "to 65000, and 1500 on lossy links",
        ),
        (
            "buffer_ms",
            float,
            "longest wait in a queue before packets are dropped; default: no limit, so "
            "that only --loss loses packets",
        ),
        (
            "congestion_control",
            "reno",
            "TCP's algorithm, one of /proc/sys/net/ipv4/tcp_allowed_congestion_control;"
            " every kernel has reno",
        ),
        (
            "slow_start_after_idle",
            False,
            "whether TCP restarts with a small window after a pause (the kernel's "
            "default; hosts on long links turn it off)",
        ),
        ("seed", 0, "seed of loss and jitter"),
        ("grace_s", 5.0, "seconds between asking a command to end and killing it"),
    ),
}
_NOT_NEGATIVE = (
    "bandwidth_mbit",
    "latency_ms",
    "jitter_ms",
    "loss",
    "buffer_ms",
    "grace_s",
)


def define_flags() -> FlagValues:
    """Return this program's flags, apart from those of other programs."""
    return program.own_flags(
        *itertools.chain(*SECTIONS.values()),
        **dict.fromkeys(_NOT_NEGATIVE, 0.0),
        regions=(1, region.MAX_REGIONS),
        mtu=(576, 65000),
    )


def build_topology(values: FlagValues) -> Topology:
    """Return the network the flags describe."""
    for source in ("links", "world"):
        others = (*_LINK_FLAGS, *({"links", "world"} - {source}))
        present = [name for name in others if values[name].present]
        if values[source].value and present:
            raise ValueError(
                f"--{present[0]}={values[present[0]].value} does not combine with "
                f"--{source}, which sets it; leave one out"
            )

    gbps = (values.bandwidth_mbit or _DEFAULT_MBIT) / 1000
    topology = program.topology(values, gbps)
    if topology.num_regions > region.MAX_REGIONS:
        raise ValueError(
            f"--links={values.links} has {topology.num_regions} regions; at most "
            f"{region.MAX_REGIONS} are possible"
        )
    if not values.schedule:
        return topology

    read = functools.partial(world.load_changes, regions=topology.regions)
    changes = program.named("schedule", values.schedule, read)
    return dataclasses.replace(topology, changes=topology.changes + changes)


def build_plan(values: FlagValues, command: Sequence[str]) -> Plan:
    """Return the lab's plan."""
    if values.bandwidth_mbit == 0:
        raise ValueError("bandwidth_mbit=0 must be positive")
    if not values.grace_s < _LONGEST_GRACE_S:
        raise ValueError(
            f"grace_s={values.grace_s} must be below {_LONGEST_GRACE_S:g}, a day"
        )

    check_numbers(values)
    known = region.congestion_controls()
    if values.congestion_control not in known:
        raise ValueError(
            f"congestion_control={values.congestion_control} is not allowed here; use "
            f"{' or '.join(known)}"
        )

    topology = build_topology(values)
    mbit = values.bandwidth_mbit
    if mbit is None:
        mbit = math.inf if values.links else _DEFAULT_MBIT

    return make_plan(
        topology,
        command,
        pathlib.Path(values.logdir or tempfile.mkdtemp(prefix="cocodc_wan_")),
        region_bps=mbit * 1e6,
        mtu_bytes=values.mtu,
        buffer_s=math.inf if values.buffer_ms is None else values.buffer_ms / 1000,
        congestion_control=values.congestion_control,
        restarts_slowly=values.slow_start_after_idle,
        seed=values.seed,
        grace_s=values.grace_s,
    )


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    values = define_flags()
    with program.usage_errors(values):
        command = program.parse(values, argv, __doc__, SECTIONS)
        if not command:
            raise ValueError("no command given; write it after --")
        if command[0].startswith("-"):
            train = commands.shown("python -m experiments.train")
            raise ValueError(
                f"the command begins with {command[0]!r}, which is a flag; write the "
                f"program before it, as in -- {train} {command[0]}"
            )
        if lacks := region.missing():
            raise ValueError(f"the network lab lacks {'; and '.join(lacks)}")

        plan = build_plan(values, command)

    print(
        f"wan: {len(plan.regions)} regions, packets of {plan.mtu_bytes} bytes; logs in "
        f"{plan.logdir}",
        file=sys.stderr,
    )

    try:
        code = launch.run(plan)
    except (launch.LabError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    print(plan.summary(), file=sys.stderr)
    return code


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
