r"""Simulates training over a network: time, stalls, bytes, without running a model.

    python -m experiments.simulate --params=1e9 --step_time_s=0.1 --regions=4 \
        --bandwidth_gbps=1 --latency_ms=50 --method=streaming_diloco --workdir=DIR

prints a summary and writes simulation.json, timeline.json (open it in ui.perfetto.dev)
and timeline.png. `--plan` chooses K, H, N, tau and the collective (or takes the one
given, such as "direct", this package's own between processes) for the network and says
why; `--table` holds the simulator against published numbers. All times are simulated
seconds. Exit code 2 and one line on standard error for bad flags.

Its flags are its own, apart from those of a training run (experiments/flags.py), which
would refuse most of them: a network is described here, not a model.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import rich
import rich.console
from absl import flags
from rich.table import Table

from cocodc_jax.network import losses, plan, published, trace, world
from cocodc_jax.network.channel import SHARINGS
from cocodc_jax.network.collectives import COLLECTIVES
from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.network.simulator import Workload, simulate
from cocodc_jax.network.syncs import AUTO, METHODS, Schedule
from cocodc_jax.network.timeline import Timeline
from experiments.messages import one_line

Value = TypeVar("Value")


def define_flags() -> flags.FlagValues:
    """Returns this program's flags, apart from those of other programs."""
    values = flags.FlagValues()
    boolean = functools.partial(flags.DEFINE_bool, flag_values=values)
    boolean("help", False, "print this and exit")
    boolean("plan", False, "choose K, H, N and tau for the network and say why")
    boolean("table", False, "compare with published numbers")
    flags.DEFINE_string("workdir", None, "folder for results", flag_values=values)
    _define_network(values)
    _define_job(values)
    return values


def _define_network(values: flags.FlagValues) -> None:
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    flags.DEFINE_integer("regions", 4, "regions", lower_bound=1, flag_values=values)
    number("bandwidth_gbps", 1.0, "Gbit/s of each ordered pair of regions")
    number("latency_ms", 50.0, "milliseconds one way", lower_bound=0)
    number("jitter_ms", 0.0, "milliseconds, either way", lower_bound=0)
    number("loss", 0.0, "share of packets lost, in [0, 1)", lower_bound=0)
    known = ", ".join(world.world_regions())
    text("world", None, f"cloud regions by name, with commas: {known}")
    text("links", None, "YAML file with regions, links, changes")
    choice("collective", "ring", sorted(COLLECTIVES), "how a mean crosses regions")
    choice("sharing", "fair", SHARINGS, "how syncs under way share the links")


def _define_job(values: flags.FlagValues) -> None:
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    count = functools.partial(flags.DEFINE_integer, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    number("params", 1e9, "parameters of the model")
    number("bits_per_param", 32.0, "bits sent for each parameter")
    text("step_time_s", "0.1", "seconds of a step: one number or one per region")
    flags.DEFINE_enum(
        "method", "streaming_diloco", METHODS, "to simulate", flag_values=values
    )
    count("num_fragments", 4, "K", lower_bound=1)
    count("sync_interval", None, "H, steps; default 100 (data_parallel: 1)")
    text("delay_steps", None, "tau, or 'auto'; default 5 (blocking methods: 0)")
    count("syncs_per_interval", None, "N, for cocodc only; default K")
    number(
        "host_mb_per_s", math.inf, "10^6 bytes of messages that hosts prepare a second"
    )
    count("num_layers", 1, "above 1, each layer is sent when ready", lower_bound=1)
    count("steps", None, "inner steps to simulate; default 3 H", lower_bound=1)
    text("loss_curve", None, "metrics.jsonl, or a JSON list of [step, loss]")
    text("loss_key", "eval_loss", "entry of metrics.jsonl to read")
    number("target_loss", None, "report the seconds until this loss")
    number("network_share", 0.4, "gamma of --plan, in (0, 1]")
    count("max_fragments", 32, "K that --plan may choose", lower_bound=1)


def build_topology(values: flags.FlagValues) -> Topology:
    """Returns the network the flags describe."""
    if values.links and values.world:
        raise ValueError(f"--links={values.links} and --world exclude each other")
    if values.links:
        return _named("links", values.links, world.load_topology)
    if values.world:
        try:
            return world.world(tuple(values.world.split(",")), values.bandwidth_gbps)
        except ValueError as error:
            raise ValueError(f"--world={values.world}: {error}") from error
    link = Link(
        values.bandwidth_gbps,
        values.latency_ms / 1000,
        values.jitter_ms / 1000,
        values.loss,
    )
    return uniform(values.regions, link)


def build_schedule(values: flags.FlagValues) -> Schedule:
    """Returns the schedule the flags describe."""
    is_blocking = values.method in ("data_parallel", "diloco")
    default_interval = 1 if values.method == "data_parallel" else 100
    if values.syncs_per_interval is not None and values.method != "cocodc":
        raise ValueError(
            f"--syncs_per_interval={values.syncs_per_interval} is for cocodc only, not "
            f"{values.method}"
        )
    delay = values.delay_steps
    if delay is None:
        delay = "0" if is_blocking else "5"
    if delay != AUTO and not delay.isdecimal():
        raise ValueError(f"--delay_steps={delay} must be a number of steps or 'auto'")
    return Schedule(
        values.method,
        values.num_fragments,
        default_interval if values.sync_interval is None else values.sync_interval,
        delay if delay == AUTO else int(delay),
        values.syncs_per_interval,
    )


def build_workload(values: flags.FlagValues, num_regions: int) -> Workload:
    """Returns bytes and step times, fragments of equal bytes."""
    times = _step_times(values)
    if len(times) not in (1, num_regions):
        raise ValueError(
            f"--step_time_s={values.step_time_s} must be one number or one for each of "
            f"{num_regions} regions"
        )
    for name in ("params", "bits_per_param"):
        value = getattr(values, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}={value} must be positive")
    num = values.num_fragments
    size = values.params * values.bits_per_param / 8 / num
    steps_s = times * num_regions if len(times) == 1 else times
    host = values.host_mb_per_s
    if not host > 0:
        raise ValueError(f"--host_mb_per_s={host} must be positive")
    return Workload((size,) * num, steps_s, values.num_layers, host * 1e6)


def _step_times(values: flags.FlagValues) -> tuple[float, ...]:
    try:
        times = tuple(float(text) for text in values.step_time_s.split(","))
    except ValueError as error:
        raise ValueError(
            f"--step_time_s={values.step_time_s} must be numbers"
        ) from error
    if not all(0 < time < math.inf for time in times):
        raise ValueError(f"--step_time_s={values.step_time_s} must be positive")
    return times


def _named(flag: str, path: str, read: Callable[[str], Value]) -> Value:
    """Returns read(path); an error of the file system names the flag."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"--{flag}={path}: {error.strerror}") from error


def run_simulation(values: flags.FlagValues) -> None:
    """Simulates, prints the summary and writes the files."""
    topology, schedule = build_topology(values), build_schedule(values)
    work = build_workload(values, topology.num_regions)
    steps = values.steps or 3 * max(schedule.sync_interval, 10)
    if (values.loss_curve is None) != (values.target_loss is None):
        given = "loss_curve" if values.loss_curve else "target_loss"
        missing = "target_loss" if values.loss_curve else "loss_curve"
        raise ValueError(f"--{given}={values[given].value} needs --{missing} too")
    folder = _folder(values)
    timeline = simulate(
        topology, work, schedule, steps, values.collective, None, values.sharing
    )
    summary: dict[str, float | str | None] = {"method": values.method}
    summary |= timeline.summary()
    if values.loss_curve is not None:
        read = functools.partial(losses.read_curve, key=values.loss_key)
        curve = _named("loss_curve", values.loss_curve, read)
        target = values.target_loss
        summary["target_loss"] = target
        summary["sim_s_to_target"] = losses.seconds_to_loss(timeline, curve, target)
    _print_summary(summary)
    if folder:
        _write(folder, values, summary, timeline)


def _print_summary(summary: dict[str, float | str | None]) -> None:
    table = Table(title="simulated")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in summary.items():
        text = f"{value:,.6g}" if isinstance(value, int | float) else str(value)
        table.add_row(name, text)
    rich.print(table)


def _folder(values: flags.FlagValues) -> pathlib.Path | None:
    """The folder for results, made if need be, before the work begins."""

    def make(path: str) -> pathlib.Path:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        return pathlib.Path(path)

    return _named("workdir", values.workdir, make) if values.workdir else None


def _write(
    folder: pathlib.Path, values: flags.FlagValues, summary: dict, timeline: Timeline
) -> None:
    result = {
        "flags": {k: v for k, v in values.flag_values_dict().items() if k != "help"},
        "summary": summary,
        "stall_s": timeline.stall_s,
        "bytes_sent": timeline.bytes_sent,
        "syncs": [dataclasses.asdict(sync) for sync in timeline.syncs],
    }
    (folder / "simulation.json").write_text(json.dumps(result, indent=1))
    trace.write_trace(timeline, folder / "timeline.json")
    title = f"{values.method}, simulated; utilization {timeline.utilization():.1%}"
    trace.plot_timeline(timeline, folder / "timeline.png", title)


def run_plan(values: flags.FlagValues) -> None:
    """Chooses a plan and prints why."""
    folder = _folder(values)
    job = plan.Job(
        model_bytes=values.params * values.bits_per_param / 8,
        step_time_s=max(_step_times(values)),
        num_fragments=values.num_fragments,
        max_fragments=values.max_fragments,
        sync_interval=100 if values.sync_interval is None else values.sync_interval,
        network_share=values.network_share,
        collectives=_collectives(values),
    )
    chosen = plan.make_plan(build_topology(values), job)
    print(chosen.explain())
    names = ("num_fragments", "sync_interval", "syncs_per_interval", "delay_steps")
    print(*(f"--{name}={getattr(chosen, name)}" for name in (*names, "collective")))
    if folder:
        text = json.dumps(dataclasses.asdict(chosen), indent=1)
        (folder / "plan.json").write_text(text)


def _collectives(values: flags.FlagValues) -> tuple[str, ...]:
    """Those to plan with: the one that was asked for, if any."""
    given = values["collective"].present
    return (values.collective,) if given else plan.Job.collectives


def run_table() -> None:
    """Prints simulated against published bandwidths, and DiLoCoX's speed-up."""
    table = Table(title="Gbit/s needed: simulated/published grid point = ratio")
    for name in ("model", "method", *(f"{t:.0%}" for t in published.TARGETS)):
        table.add_column(name, no_wrap=True)
    for (size, row), printed in published.PUBLISHED_GBPS.items():
        table.add_row(size, row, *_entries(size, row, printed, None))
        interval = published.FITTED_INTERVAL.get((size, row))
        if interval is not None:
            label = "  with a fragment every step"
            table.add_row("", label, *_entries(size, row, printed, interval))
    # Wide enough for every column, also where the output is no terminal.
    rich.console.Console(width=140).print(table)
    speedup = published.dilocox_speedup()
    print(
        "DiLoCoX, 107B over 1 Gbit/s, 32,768 tokens a step (assumed): all-reduce "
        f"{speedup.all_reduce_tokens_per_s:.1f} tokens/s (published 10.4), DiLoCoX "
        f"{speedup.dilocox_tokens_per_s:,.0f} (3,728), {speedup.factor:.0f} times "
        f"(357), utilization {speedup.dilocox.utilization():.1%}"
    )


def _entries(
    size: str, row: str, printed: Sequence[float], interval: int | None
) -> list[str]:
    out = []
    for target, value in zip(published.TARGETS, printed, strict=True):
        gbps = published.required_gbps(size, row, target, interval)
        grid = published.published_grid_gbps(value, gbps)
        out.append(f"{gbps:.3g}/{grid:.3g} = {gbps / grid:.2f}")
    return out


def main(argv: Sequence[str]) -> int:
    """Runs the program; returns its exit code."""
    values = define_flags()
    try:
        extra = values(argv)[1:]
        if extra:
            raise ValueError(f"argument {extra[0]!r} is no flag")
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
        elif values.table:
            run_table()
        elif values.plan:
            run_plan(values)
        else:
            run_simulation(values)
    except (ValueError, flags.Error) as error:
        print(f"error: {one_line(error, values)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
