"""Simulates training over a network: time, stalls, bytes, without running a model.

    python -m experiments.simulate --params=1e9 --step_time_s=0.1 --regions=4 \
        --bandwidth_gbps=1 --latency_ms=50 --method=streaming_diloco --workdir=DIR

prints a summary and writes simulation.json, timeline.json (open it in ui.perfetto.dev)
and timeline.png. `--plan` chooses K, H, N, tau and the collective for the network and
says why; `--table` holds the simulator against published numbers. All times are
simulated seconds. Exit code 2 and one line on standard error for bad flags.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import rich
import rich.console
from absl import flags
from rich.table import Table

from cocodc_jax.network import losses, plan, published, trace, world
from cocodc_jax.network.channel import SHARINGS
from cocodc_jax.network.collectives import COLLECTIVES
from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.network.simulator import Timeline, Workload, simulate
from cocodc_jax.network.syncs import AUTO, METHODS, Schedule


def define_flags() -> flags.FlagValues:
    """Returns this program's flags, apart from those of other programs."""
    values = flags.FlagValues()
    own = {"flag_values": values}
    positive = {"lower_bound": 1e-12, **own}
    flags.DEFINE_bool("help", False, "print this and exit", **own)
    flags.DEFINE_bool("plan", False, "choose K, H, N, tau and say why", **own)
    flags.DEFINE_bool("table", False, "compare with published numbers", **own)
    flags.DEFINE_string("workdir", None, "folder for results", **own)
    _define_network(own, positive)
    _define_job(own, positive)
    return values


def _define_network(own, positive) -> None:
    flags.DEFINE_integer("regions", 4, "regions, alike", lower_bound=1, **own)
    flags.DEFINE_float("bandwidth_gbps", 1.0, "of each ordered pair", **positive)
    flags.DEFINE_float("latency_ms", 50.0, "one way", lower_bound=0, **own)
    flags.DEFINE_float("jitter_ms", 0.0, "either way", lower_bound=0, **own)
    flags.DEFINE_float("loss", 0.0, "share of packets lost, below 1", 0, **own)
    flags.DEFINE_list(
        "world",
        None,
        f"cloud regions by name: {', '.join(world.world_regions())}",
        **own,
    )
    flags.DEFINE_string("links", None, "YAML file: regions, links, changes", **own)
    flags.DEFINE_enum("collective", "ring", sorted(COLLECTIVES), "of a sync", **own)
    flags.DEFINE_enum("sharing", "fair", SHARINGS, "of the links by syncs", **own)


def _define_job(own, positive) -> None:
    flags.DEFINE_float("params", 1e9, "parameters of the model", **positive)
    flags.DEFINE_float("bits_per_param", 32.0, "sent for each of them", **positive)
    flags.DEFINE_list("step_time_s", "0.1", "seconds, one or one per region", **own)
    flags.DEFINE_enum("method", "streaming_diloco", METHODS, "to simulate", **own)
    flags.DEFINE_integer("num_fragments", 4, "K", lower_bound=1, **own)
    flags.DEFINE_integer(
        "sync_interval", None, "H, steps; default 100, 1 for data_parallel", **own
    )
    flags.DEFINE_string(
        "delay_steps", None, "tau, or 'auto'; default 5, 0 for blocking methods", **own
    )
    flags.DEFINE_integer("syncs_per_interval", None, "N of cocodc; default K", **own)
    flags.DEFINE_integer(
        "num_layers", 1, "above 1, each layer is sent when ready", lower_bound=1, **own
    )
    flags.DEFINE_integer(
        "steps", None, "to simulate; default 3 H", lower_bound=1, **own
    )
    flags.DEFINE_string(
        "loss_curve", None, "metrics.jsonl, or a JSON list of [step, loss]", **own
    )
    flags.DEFINE_string("loss_key", "eval_loss", "entry of metrics.jsonl", **own)
    flags.DEFINE_float("target_loss", None, "report the seconds until here", **own)
    flags.DEFINE_float("network_share", 0.4, "gamma of --plan, in (0, 1]", **own)
    flags.DEFINE_integer("max_fragments", 32, "K allowed in --plan", 1, **own)


def build_topology(values: flags.FlagValues) -> Topology:
    """Returns the network the flags describe."""
    if values.links and values.world:
        raise ValueError(f"--links={values.links} and --world exclude each other")
    if values.links:
        return world.load_topology(values.links)
    if values.world:
        return world.world(tuple(values.world), values.bandwidth_gbps)
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
            f"--step_time_s={','.join(values.step_time_s)} must be one number or one "
            f"for each of {num_regions} regions"
        )
    num = values.num_fragments
    size = values.params * values.bits_per_param / 8 / num
    steps_s = times * num_regions if len(times) == 1 else times
    return Workload((size,) * num, steps_s, values.num_layers)


def _step_times(values: flags.FlagValues) -> tuple[float, ...]:
    try:
        return tuple(float(text) for text in values.step_time_s)
    except ValueError as error:
        given = ",".join(values.step_time_s)
        raise ValueError(f"--step_time_s={given} must be numbers") from error


def read_loss_curve(path: str, key: str) -> list[tuple[float, float]]:
    """Reads (step, loss) pairs from metrics.jsonl or from a JSON list of pairs.

    Raises:
      ValueError: naming the flag, if there is no such pair in the file.
    """
    text = pathlib.Path(path).read_text()
    try:
        if text.lstrip().startswith("["):
            return [(float(step), float(loss)) for step, loss in json.loads(text)]
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        curve = [(row["step"], row[key]) for row in rows if key in row]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--loss_curve={path} is no loss curve: {error}") from error
    if not curve:
        raise ValueError(f"--loss_curve={path} has no entry --loss_key={key}")
    return curve


def summarize(timeline: Timeline) -> dict[str, float]:
    """Returns the numbers of a timeline, units in their names."""
    delays = [sync.merge_step - sync.start_step for sync in timeline.syncs]
    flights = [sync.arrival_s - sync.start_s for sync in timeline.syncs]
    compute_s = timeline.num_steps * max(timeline.step_time_s)
    return {
        "steps": timeline.num_steps,
        "sim_s": timeline.sim_s,
        "sim_s_per_step": timeline.sim_s / timeline.num_steps,
        "sim_s_without_network": compute_s,
        "slowdown": timeline.sim_s / compute_s,
        "utilization": timeline.utilization(),
        "stall_s": max(timeline.stall_s),
        "bytes_sent_per_region": max(timeline.bytes_sent),
        "syncs": len(timeline.syncs),
        "mean_sync_s": sum(flights) / len(flights) if flights else 0.0,
        "mean_delay_steps": sum(delays) / len(delays) if delays else 0.0,
        "max_delay_steps": max(delays, default=0),
    }


def run_simulation(values: flags.FlagValues) -> None:
    """Simulates, prints the summary and writes the files."""
    topology, schedule = build_topology(values), build_schedule(values)
    work = build_workload(values, topology.num_regions)
    steps = values.steps or 3 * max(schedule.sync_interval, 10)
    if (values.loss_curve is None) != (values.target_loss is None):
        given = "loss_curve" if values.loss_curve else "target_loss"
        missing = "target_loss" if values.loss_curve else "loss_curve"
        raise ValueError(f"--{given}={values[given].value} needs --{missing} too")
    timeline = simulate(
        topology, work, schedule, steps, values.collective, None, values.sharing
    )
    summary: dict[str, float | str | None] = {"method": values.method}
    summary |= summarize(timeline)
    if values.loss_curve is not None:
        curve = read_loss_curve(values.loss_curve, values.loss_key)
        target = values.target_loss
        summary["target_loss"] = target
        summary["sim_s_to_target"] = losses.seconds_to_loss(timeline, curve, target)
    _print_summary(summary)
    if values.workdir:
        _write(values, summary, timeline)


def _print_summary(summary: dict[str, float | str | None]) -> None:
    table = Table(title="simulated")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in summary.items():
        text = f"{value:,.6g}" if isinstance(value, int | float) else str(value)
        table.add_row(name, text)
    rich.print(table)


def _write(values: flags.FlagValues, summary: dict, timeline: Timeline) -> None:
    folder = pathlib.Path(values.workdir)
    folder.mkdir(parents=True, exist_ok=True)
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
    job = plan.Job(
        model_bytes=values.params * values.bits_per_param / 8,
        step_time_s=max(_step_times(values)),
        num_fragments=values.num_fragments,
        max_fragments=values.max_fragments,
        sync_interval=100 if values.sync_interval is None else values.sync_interval,
        network_share=values.network_share,
    )
    chosen = plan.make_plan(build_topology(values), job)
    print(chosen.explain())
    print(
        f"--num_fragments={chosen.num_fragments} --sync_interval={chosen.sync_interval} "
        f"--syncs_per_interval={chosen.syncs_per_interval} "
        f"--delay_steps={chosen.delay_steps} --collective={chosen.collective}"
    )
    if values.workdir:
        folder = pathlib.Path(values.workdir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(chosen), indent=1)
        (folder / "plan.json").write_text(text)


def run_table() -> None:
    """Prints simulated against published bandwidths, and DiLoCoX's speed-up."""
    table = Table(title="Gbit/s needed: simulated / published grid point = ratio")
    for name in ("model", "method", *(f"{t:.0%}" for t in published.TARGETS)):
        table.add_column(name)
    for (size, row), printed in published.PUBLISHED_GBPS.items():
        table.add_row(size, row, *_entries(size, row, printed, None))
        interval = published.FITTED_INTERVAL.get((size, row))
        if interval is not None:
            label = "  with a fragment every step"
            table.add_row("", label, *_entries(size, row, printed, interval))
    # Wide enough for every column, also where the output is no terminal.
    rich.console.Console(width=132).print(table)
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
        out.append(f"{gbps:.4g} / {grid:.4g} = {gbps / grid:.2f}")
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
    except (ValueError, flags.Error, OSError) as error:
        print(f"simulate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
