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

from cocodc_jax.network import trace
from cocodc_jax.network.faults import watch_steps
from cocodc_jax.run import timeline

from . import program

PRINTED = (
    "steps",
    "stall_s",
    "exposed_share",
    "mean_sync_s",
    "mean_delay_steps",
    "utilization",
)


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
        measured, since = timeline.measured(workdir, since)

    title = f"{workdir.name}, measured from step {since}"
    trace.write_trace(measured, workdir / "trace.json")
    trace.plot_timeline(measured, workdir / "timeline.png", title, clock="measured")

    summary = measured.summary()
    numbers = {name: summary[name] for name in PRINTED}
    numbers["seconds"] = summary["sim_s"]
    numbers["seconds a step"] = max(measured.step_time_s)
    busy_s, quiet_s = timeline.step_s_in_flight(measured)
    if busy_s > 0 and quiet_s > 0:
        numbers["  sync in flight"] = busy_s
        numbers["  none"] = quiet_s

    for name, value in numbers.items():
        print(f"{name:18} {value:.4g}")
    for step, finding in watch_steps(measured):
        print(f"after step {since + step}: {finding.explain(measured.regions)}")

    return 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
