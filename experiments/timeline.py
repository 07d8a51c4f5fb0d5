"""Shows when a run computed, waited, and had fragments in flight.

    python -m experiments.timeline --workdir=DIR

Reads timeline.json of every process of a run, as `experiments.train` writes it. Writes
trace.json (for ui.perfetto.dev) and timeline.png to DIR. Prints the stall, the seconds
of a sync and the utilization after the first two intervals, in which programs are
compiled. Names processes whose steps became slow, by robust z-scores
(network/faults.py).
"""

import pathlib
from collections.abc import Sequence

from cocodc_jax.network.faults import watch_steps
from cocodc_jax.run import timeline

from . import program

PRINTED = (
    "steps", "stall_s", "exposed_share", "mean_sync_s", "mean_delay_steps",
    "utilization",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    text = "First step. Default: after two intervals and a delay, if there are any."
    values = program.own_flags(
        ("workdir", pathlib.Path, "Folder of the run."), ("since_step", int, text)
    )
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        if values.workdir is None:
            raise ValueError("workdir=None is missing; name the folder of a run")
        workdir = pathlib.Path(values.workdir)
        since = values.since_step
        if since is None:
            since = timeline.first_warm_step(workdir)
        found, since = timeline.measured(workdir, since)
    summary = found.summary()
    timeline.write(workdir, found, f"{workdir.name}, measured from step {since}")
    told = {name: summary[name] for name in PRINTED} | {"seconds": summary["sim_s"]}
    told["seconds a step"] = max(found.step_time_s)
    busy, quiet = timeline.step_s_in_flight(found)
    if busy > 0 and quiet > 0:
        told |= {"  sync in flight": busy, "  none": quiet}
    for name, value in told.items():
        print(f"{name:18} {value:.4g}")
    for step, finding in watch_steps(found):
        print(f"after step {since + step}: {finding.explain(found.regions)}")
    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
