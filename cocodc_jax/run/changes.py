"""Resume a run with a changed configuration: what is refused, and what is recorded.

See `kinds` for the kinds of fields. `changes.jsonl` has a line for each time that a run
was resumed with changes, with the step.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cocodc_jax.kinds import Kind
from cocodc_jax.run.config import TrainConfig, kind_of

CHANGES_FILE = "changes.jsonl"

Changes = Mapping[str, tuple[Any, Any]]

_OR_ELSE = {
    Kind.COMPUTED: " as before, or train in another workdir with --adopt_from={}, "
    "which goes on from the last checkpoint",
    Kind.MODEL: " as before, or begin in another workdir: it makes another model",
    Kind.BEGINNING: ", which the run began with",
}


def check(
    found: TrainConfig, config: TrainConfig, workdir: pathlib.Path, done: int
) -> None:
    """Refuse changes that a run that has begun cannot be resumed with.

    Raises:
      ValueError: naming the folder and, for each field, what to do.
    """
    changes = found.changes(config)
    names = {kind: [n for n in changes if kind_of(n) is kind] for kind in Kind}
    told = []
    for kind, other in _OR_ELSE.items():
        if names[kind]:
            pairs = ((n, changes[n][0]) for n in names[kind])
            before = " ".join(f"--{n}={x}" for n, x in pairs if x is not None)
            told.append(
                f"for {', '.join(names[kind])} give {before}{other.format(workdir)}"
            )
    if names[Kind.LENGTH]:
        if config.run.steps < done:
            told.append(f"for steps give {done} or more, as so many are done")
        elif config.optimizer.follows_length and not config.run.change_schedule:
            told.append(
                "for steps add --change_schedule, as the learning rate follows their "
                "number and becomes that of the new length"
            )
    if told:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a run of another configuration "
            f"({found.differences(config)}): {'; '.join(told)}"
        )


def note(
    found: TrainConfig, config: TrainConfig, workdir: pathlib.Path, step: int
) -> None:
    """Record and print that a run is resumed with a changed configuration."""
    changes = dict(found.changes(config))
    line = {"step": step, "changes": {n: list(pair) for n, pair in changes.items()}}
    with (workdir / CHANGES_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"goes on from step {step} with {_listed(changes)}", file=sys.stderr)
    if "steps" in changes and config.optimizer.follows_length:
        method = config.method.build()
        before, after = (
            np.asarray(each.optimizer.learning_rate(each.run.steps, method)(step))
            for each in (found, config)
        )
        print(
            f"  the learning rate of its next step is {after:.3g}, not {before:.3g}",
            file=sys.stderr,
        )


def say_unused(changes: Changes, workdir: pathlib.Path) -> None:
    """Print that the changes make no difference to a finished run."""
    if changes:
        print(
            f"note: the run in {workdir} is finished; it was not run again with "
            f"{_listed(changes)}",
            file=sys.stderr,
        )


def has(kind: Kind, changes: Collection[str]) -> bool:
    """Return whether a field of a kind is among the changes."""
    return any(kind_of(name) is kind for name in changes)


def _listed(changes: Changes) -> str:
    return ", ".join(f"{name}={b} (was {a})" for name, (a, b) in changes.items())
