r"""Simulates training over a network: time, stalls, bytes, without running a model.

    python -m experiments.simulate --params=1e9 --step_time_s=0.1 --regions=4 \
        --bandwidth_gbps=1 --latency_ms=50 --method=streaming_diloco --workdir=DIR

prints a summary and writes simulation.json, timeline.json (for ui.perfetto.dev) and
timeline.png. All times are simulated seconds.

- `--method` is any method of training, with its arguments and its own schedule.
- `--plan` recommends method, messages, intervals and rates for the network, with
  reasons, and prints the command that trains with them (experiments/recommend.py).
- `--plan --compress=none` plans for float32 messages: K, H, N, tau and the collective.
- `--frontier` recommends by the losses that a sweep measured instead
  (experiments/sweeps/advice.py).
- `--stages` first assigns the stages of a pipeline to sites. `--swarm_s` simulates that
  pipeline, with batches routed by throughput (SWARM), with `--failures`, and with moves
  between stages every `--rebalance_s`.
- `--links` may describe links that change; the output names those that appear faulty
  (network/faults.py).
- `--hours_between_failures`, with `--repair_s`, predicts goodput: the share of time
  spent in steps that count, for one job that resumes from its last checkpoint, and for
  regions that are separate jobs.

The flags describe a network, not a model, so they are not those of training.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence

import rich
from absl.flags import FlagValues

from cocodc_jax.engine.collectives import ALL_REDUCES
from cocodc_jax.files import write_whole
from cocodc_jax.network import exchanges, placement, plan, swarm, trace
from cocodc_jax.network.faults import Finding, watch_links
from cocodc_jax.network.links import Topology
from cocodc_jax.network.placement import Placement
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.report.comparison import steps_to_loss
from cocodc_jax.run.resume import make_folder

from . import program, recipe, recommend
from .program import named
from .simulation import described
from .simulation.described import read_curve
from .sweeps import advice

ADVICE_LINES = 5


def run_simulation(values: FlagValues) -> None:
    """Simulate, print the summary and write the files."""
    topology = program.topology(values, values.bandwidth_gbps)
    method = described.build_method(values)
    work = described.build_workload(values, method, topology.num_regions)
    schedule = exchanges.schedule_of(method)
    interval = schedule.sync_interval if schedule else 0
    steps = values.steps or 3 * max(interval, 10)
    folder = _folder(values)

    timeline = simulate_method(
        topology,
        work,
        method,
        steps,
        values.collective,
        sharing=values.sharing,
        effective_rank=values.effective_rank,
    )
    summary: dict[str, float | str | None] = {"method": values.method}
    summary |= timeline.summary()
    interval_s = timeline.sim_s / steps * interval
    summary |= described.goodput_of(
        values, topology.num_regions, interval_s, timeline.utilization()
    )

    if values.loss_curve is not None:
        read = functools.partial(read_curve, key=values.loss_key)
        curve = named("loss_curve", values.loss_curve, read)
        needed = steps_to_loss(curve, values.target_loss)
        seconds = None if needed is None else timeline.seconds_until(needed)
        summary["target_loss"] = values.target_loss
        summary["sim_s_to_target"] = seconds

    _print_summary(summary)
    named_s = watch_links(topology, timeline)
    for time_s, finding in named_s:
        print(f"- Faulty at {time_s:.4g} s: {finding.explain(topology.regions)}.")
    if folder:
        _write(folder, values, summary, timeline, named_s)


def _print_summary(summary: dict[str, float | str | None]) -> None:
    rows = [
        (name, f"{value:,.6g}" if isinstance(value, int | float) else str(value))
        for name, value in summary.items()
    ]
    rich.print(program.table(("quantity", "value"), rows, title="simulated"))


def _folder(values: FlagValues) -> pathlib.Path | None:
    """Return the folder for results; create it before the work begins."""
    folder = pathlib.Path(values.workdir) if values.workdir else None
    if folder:
        make_folder(folder)
    return folder


def _write_json(folder: pathlib.Path | None, name: str, value: dict) -> None:
    """Write a result, if there is a folder for results."""
    if folder:
        write_whole(folder / name, json.dumps(value, indent=1))


def _write(
    folder: pathlib.Path,
    values: FlagValues,
    summary: dict,
    timeline: Timeline,
    faulty: Sequence[tuple[float, Finding]],
) -> None:
    flags = {
        name: value
        for name, value in values.flag_values_dict().items()
        if name != "help" and value != math.inf
    }

    result = {
        "flags": flags,
        "summary": summary,
        "stall_s": timeline.stall_s,
        "bytes_sent": timeline.bytes_sent,
        "syncs": [
            dataclasses.asdict(s) | {"stall_s": s.stall_s} for s in timeline.syncs
        ],
        "faulty": [{"time_s": at} | dataclasses.asdict(x) for at, x in faulty],
    }

    _write_json(folder, "simulation.json", result)
    trace.write_trace(timeline, folder / "timeline.json")
    title = f"{values.method}, simulated; utilization {timeline.utilization():.1%}"
    trace.plot_timeline(timeline, folder / "timeline.png", title)


def run_plan(values: FlagValues) -> None:
    """Choose a plan and print its reasons."""
    choices = None
    if values.frontier is not None:
        choices = named("frontier", values.frontier, advice.read)
    folder = _folder(values)

    topology = program.topology(values, values.bandwidth_gbps)
    times = described.step_times(values, topology.num_regions)
    failures = described.failures(values, topology.regions)
    job = _job(values, max(times))
    if values.stages > 1:
        placed = _place(values, topology, job, folder)
        if values.swarm_s is not None:
            _report_swarm(values, topology, placed.stages, job, times, failures)
        # A site averages its stage with the sites that run the same stage.
        sites = placed.stages[placed.slowest_stage]
        topology = topology.subset(sites)
        times = tuple(times[i] for i in sites)
        job = dataclasses.replace(job, model_bytes=job.model_bytes / values.stages)

        if topology.num_regions == 1:
            print("- No average is needed: every site has a stage of its own.")
            return
    if values.compress is None and values.stages == 1:
        _recommend(values, topology, times, choices, folder)
        return
    chosen = plan.make_plan(topology, job)
    print(chosen.explain())
    request = {"parameters": values.params, "regions": topology.num_regions}
    if warning := advice.warning(request):
        print(f"- {warning[0].upper()}{warning[1:]}.")
    _write_json(folder, "plan.json", dataclasses.asdict(chosen))

    if choices is not None:
        _report_advice(values, choices, topology, times, folder)
    elif values.stages == 1:
        names = ("num_fragments", "sync_interval", "delay_steps")
        flags = {name: getattr(chosen, name) for name in names}
        preset = recommend.nearest_preset(values.params)
        streaming = {"method": "streaming_diloco"} | flags
        print(recommend.command(preset, topology.num_regions, streaming))


def _recommend(
    values: FlagValues,
    topology: Topology,
    times: Sequence[float],
    choices: Sequence[advice.Choice] | None,
    folder: pathlib.Path | None,
) -> None:
    """Print the recommended setting, and its command."""
    for name in ("sync_interval", "network_share", "max_fragments"):
        if values[name].present:
            raise ValueError(
                f"{name}={values[name].value} is for plans of float32 messages; add "
                "--compress=none, or leave it out"
            )

    num = values.num_fragments or recipe.FRAGMENTS
    recommended = recommend.recommend(
        topology, values.params, times, num, values.collective
    )
    print(recommended.explain())
    _write_json(folder, "plan.json", dataclasses.asdict(recommended))

    if choices is not None:
        _report_advice(values, choices, topology, times, folder)
    else:
        print(recommended.command)


def _place(
    values: FlagValues, topology: Topology, job: plan.Job, folder: pathlib.Path | None
) -> Placement:
    """Place stages on sites, print them, and write placement.json to `folder`."""
    if values.activation_mb is None:
        raise ValueError(f"stages={values.stages} needs --activation_mb too")
    pipeline = placement.Pipeline(
        values.stages,
        values.activation_mb * 1e6,
        job.model_bytes / values.stages,
        job.sync_interval,
    )
    placed = placement.place(topology.at(), pipeline)

    sites = [[topology.regions[i] for i in stage] for stage in placed.stages]
    for stage, names in enumerate(sites):
        print(f"- Stage {stage} on {', '.join(names)}.")
    how = "the best placement" if placed.is_exact else "the best that a search found"
    print(
        f"- That is {how}: {placed.pipeline_s:.3g} s of activations a step, "
        f"{placed.sync_s:.3g} s of averaging spread over the steps of an interval."
    )
    _write_json(folder, "placement.json", dataclasses.asdict(placed) | {"sites": sites})

    return placed


def _report_swarm(
    values: FlagValues,
    topology: Topology,
    stages: placement.Stages,
    job: plan.Job,
    times: Sequence[float],
    failures: Sequence[swarm.Failure],
) -> None:
    """Simulate the pipeline: in fixed chains, routed by throughput, and rebalanced."""
    names = topology.regions
    batch_s = [time / len(stages) for time in times]
    rates = [1 / seconds for seconds in batch_s]
    pipeline = swarm.Swarm(
        stages,
        tuple(batch_s),
        values.activation_mb * 1e6,
        job.model_bytes / len(stages),
    )
    simulated = functools.partial(
        swarm.simulate_swarm,
        pipeline,
        topology.at(),
        values.swarm_s,
        failures=failures,
    )

    runs = {"in fixed chains": simulated(wiring="fixed"), "wired anew": simulated()}
    if values.rebalance_s is not None:
        runs["and rebalanced"] = simulated(rebalance_s=values.rebalance_s)

    for how, run in runs.items():
        moved = f", {len(run.moves)} moves" if run.moves else ""
        per_s = run.batches_per_s(0, values.swarm_s)
        print(f"- Batches a second {how}: {per_s:.4g}{moved}.")

    rebalanced = placement.rebalanced(stages, rates)
    for title, sites in (("", stages), ("rebalanced: ", rebalanced)):
        pace = min(sum(rates[i] for i in group) for group in sites)
        texts = "; ".join(", ".join(names[i] for i in group) for group in sites)
        print(f"- Without links and failures at most {pace:.4g}, {title}{texts}.")


def _report_advice(
    values: FlagValues,
    choices: Sequence[advice.Choice],
    topology: Topology,
    times: Sequence[float],
    folder: pathlib.Path | None,
) -> None:
    """Print the best settings of a sweep's frontier on these links."""
    params = values.params / values.stages
    advices = advice.advise(choices, topology, params, times, values.collective)
    print("By measured losses, in the time of the run's steps without a network:")
    for rank, advised in enumerate(advices[:ADVICE_LINES], 1):
        print(f"{rank}. {advised.explain()}.")
    best = advices[0].choice
    print(recommend.command(best.config.preset, topology.num_regions, best.flags))
    _write_json(folder, "advice.json", {"choices": [x.to_json() for x in advices]})


def _job(values: FlagValues, step_time_s: float) -> plan.Job:
    wishes = {name: getattr(values, name) for name in described.WISHES}
    # By default those of processes, see `--all_reduce` of `experiments.train`.
    collectives = (values.collective,) if values.collective else ALL_REDUCES

    return plan.Job(
        model_bytes=described.model_bytes(values),
        step_time_s=step_time_s,
        max_fragments=values.max_fragments,
        collectives=collectives,
        **{name: value for name, value in wishes.items() if value is not None},
    )


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    values = described.define_flags()
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, described.SECTIONS, has_words=False)
        described.check(values)
        if values.plan:
            run_plan(values)
        else:
            run_simulation(values)

    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
