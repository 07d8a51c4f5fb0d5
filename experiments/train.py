"""Trains one model in several regions with one method.

    python -m experiments.train --preset=tiny --method=cocodc --workdir=DIR

The same command resumes an interrupted run, bit for bit. It may change devices,
placement and intervals, or add steps; changes.jsonl records what changed at which step.
Writes to DIR: config.json, metrics.jsonl, timing.jsonl, TensorBoard events,
checkpoints, and summary.json, which `--json` prints. Exit code 2 for errors that a
restart cannot repair, such as wrong flags, the folder of another run, or an elastic
region that was started again elsewhere; 1 for errors during the run.
"""

import sys

import jax

from cocodc_jax.elastic.link import SupersededError
from cocodc_jax.run import attend
from cocodc_jax.run.attend import Tracking
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import TrainConfig, dumps
from cocodc_jax.run.monitor import Monitoring
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.processes import failing_alone
from cocodc_jax.run.resume import ResumeError
from cocodc_jax.run.session import RUN_ERRORS

from . import planned, program


def main() -> int:
    """Read the flags, train, and print how it ended."""
    with flags.usage_errors():
        config, workdir = read_flags()
        processes = flags.processes()
        flags.check_processes([config], processes.num_processes)
        processes.start(config.run.own_regions, config.run.devices_per_region)
        tracking = flags.read(Tracking)
        session = prepare(
            config,
            workdir,
            processes=processes,
            tracking=tracking,
            elastic=flags.elastic(),
            monitoring=flags.read(Monitoring),
        )

    try:
        summary = session.train()
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        # A folder that does not fit is refused next time too, like a wrong flag, and a
        # region that was started elsewhere is not needed: a launcher must not restart.
        is_vain = isinstance(error, ResumeError | SupersededError)
        sys.exit(flags.USAGE_ERROR if is_vain else 1)

    step = summary["steps"]
    reports = jax.process_index() == 0
    if step < config.run.steps:
        if reports:
            print(f"stopped at step {step}; the same command resumes there")
        return flags.STOPPED

    if reports and flags.value("json"):
        print(dumps(summary), end="")
    elif reports:
        lines = attend.ending(summary, session.workdir, config.run.steps)
        print(program.shown("\n".join(lines)))

    return 0


def read_flags(says_plan: bool = True) -> tuple[TrainConfig, str]:
    """Return the run's configuration and folder; print the choices of --plan=auto."""
    config = planned.planned(flags.config(), says_plan)
    default = f"runs/{config.preset}_{config.method.method}"
    return config, flags.value("workdir") or default


def define() -> None:
    """Define the program's flags."""
    flags.define()
    planned.define()
    flags.define_fields(Tracking)
    flags.define_fields(Monitoring)
    program.define(("json", False, "Print summary.json in place of the last lines."))


cli = program.with_run_flags(failing_alone()(main), __doc__, define)

if __name__ == "__main__":
    cli()
