"""Trains one model in several regions with one method.

    python -m experiments.train --preset=tiny --method=cocodc --workdir=DIR

The same command goes on where an interrupted run stopped, bit for bit. Writes to
DIR: config.json, metrics.jsonl, timing.jsonl, TensorBoard events, checkpoints,
summary.json.
"""

import pathlib
import sys

import jax

from cocodc_jax.sync.methods import defaults
from experiments import flags
from experiments.config import LEAVES, TrainConfig, dumps
from experiments.processes import failing_alone
from experiments.session import RUN_ERRORS, prepare


def main() -> None:
    """Reads the flags, trains, prints the summary."""
    with flags.usage_errors():
        config, workdir = read_flags()
        processes = flags.processes()
        processes.start(config.run.regions, config.run.devices_per_region)
        session = prepare(config, workdir, processes=processes)
    try:
        summary = session.train()
    except RUN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if jax.process_index() > 0:
        return  # Process 0 reports.
    if summary["steps"] < config.run.steps:
        step = summary["steps"]
        print(f"stopped at step {step}; the same command goes on from there")
        return
    print(dumps(summary), end="")


def read_flags() -> tuple[TrainConfig, pathlib.Path]:
    """What to train, and the folder of the run.

    Raises:
      ValueError: naming the flag, its value and what would be right.
    """
    config = flags.config()
    check_method_flags(config, [config.method.method])
    default = pathlib.Path("runs") / f"{config.preset}_{config.method.method}"
    return config, pathlib.Path(flags.value("workdir") or default)


def check_method_flags(config: TrainConfig, methods: list[str]) -> None:
    """Refuses a flag that none of the methods has a use for.

    Raises:
      ValueError: naming the flag and the methods.
    """
    taken = {name for method in methods for name in defaults(method)} | {"method"}
    for name, leaf in LEAVES.items():
        if leaf.section == "method" and name not in taken and flags.given(name):
            raise ValueError(
                f"{name}={getattr(config.method, name)} has no meaning for "
                f"{', '.join(methods)}; leave it out"
            )


if __name__ == "__main__":
    flags.define()
    flags.run_main(failing_alone()(main))
