"""Stages of a pipeline on the sites of a network: placement, and throughput."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from absl import flags

from cocodc_jax.network import placement, plan, swarm
from cocodc_jax.network.links import Topology

from .files import write_json


def place(
    values: flags.FlagValues, topology: Topology, job: plan.Job
) -> placement.Placement:
    """Place stages on sites, for the interval of averages that the job has."""
    if values.activation_mb is None:
        raise ValueError(f"stages={values.stages} needs --activation_mb too")
    pipeline = placement.Pipeline(
        values.stages,
        values.activation_mb * 1e6,
        job.model_bytes / values.stages,
        job.sync_interval,
    )
    return placement.place(topology.at(), pipeline)


def report_placement(
    topology: Topology, placed: placement.Placement, folder: pathlib.Path | None
) -> None:
    """Print which site runs which stage; write placement.json to `folder`."""
    sites = [[topology.regions[i] for i in stage] for stage in placed.stages]
    for stage, names in enumerate(sites):
        print(f"- Stage {stage} on {', '.join(names)}.")
    how = "the best placement" if placed.is_exact else "the best that a search found"
    print(
        f"- That is {how}: {placed.pipeline_s:.3g} s of activations a step, "
        f"{placed.sync_s:.3g} s of averaging spread over the steps of an interval."
    )
    if folder:
        write_json(
            folder / "placement.json", dataclasses.asdict(placed) | {"sites": sites}
        )


def report_swarm(
    values: flags.FlagValues,
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
    sizes = (values.activation_mb * 1e6, job.model_bytes / len(stages))
    simulated = functools.partial(
        swarm.simulate_swarm,
        swarm.Swarm(stages, tuple(batch_s), *sizes),
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
    for title, sites in (("", stages), ("rebalanced: ", None)):
        sites = sites or placement.rebalanced(stages, rates)
        pace = min(sum(rates[i] for i in group) for group in sites)
        texts = "; ".join(", ".join(names[i] for i in group) for group in sites)
        print(f"- Without links and failures at most {pace:.4g}, {title}{texts}.")
