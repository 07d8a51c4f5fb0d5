"""The setting that a sweep's losses recommend for a network.

Every cell of a sweep is a method, a precision, an interval and a delay whose losses
were measured. On other links its steps take longer if messages are late, so fewer steps
are done in the same time:

    T = S t_c                       seconds of the runs' S steps without a network
    s = the steps done in T         simulated, by the method's own schedule
    expected loss = curve(s)        measured, linear between two evaluations

The cell with the least expected loss is recommended. Messages grow with the model, by
the share of float32 parameters that the runs counted. Losses are those of the model and
the tokens of the runs: for another model the order may hold, but not the numbers. A run
that is planned with fewer steps would also end its learning rate earlier, and so reach
less loss than its curve has at that step.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cocodc_jax import methods
from cocodc_jax.network.links import Topology
from cocodc_jax.report.units import format_bytes
from cocodc_jax.run.config.train_config import TrainConfig

from .cells import label
from .networks import simulated
from .report import column_of, read_cells

# Arguments of methods that are always named; others only if they differ from the
# default.
TOLD = (
    "sync_interval",
    "num_fragments",
    "delay_steps",
    "syncs_per_interval",
    "compress",
    "transmission_score",
    "mixing_alpha",
    "compensation_strength",
    "outer_lr",
    "outer_momentum",
)
# The range of sizes on which the recommended recipe was measured (one or two bits with
# error feedback and a fragment at every step or two), over the sweeps in
# `experiments/results`, which a test reads; not every combination was run. Outside of
# the range the order of methods is a guess, and losses are those of other models.
MEASURED: Mapping[str, tuple[float, float]] = {
    "parameters": (49_952, 6_496_512),
    "regions": (2, 16),
    "tokens a parameter": (0.315, 80.01),
}
# Rounding of a division, not another size.
_SLACK = 1e-2


@dataclasses.dataclass(frozen=True)
class Choice:
    """A setting whose losses were measured."""

    label: str  # The cell, in short.
    config: TrainConfig  # Of one of its runs.
    # (step, loss in nats per token), means over the seeds, steps increasing.
    curve: Sequence[tuple[int, float]]
    seeds: int  # Their number.
    parameters: int  # Of the model that was run.
    fragment_bytes: Sequence[float]  # A region's message for each fragment, as counted.
    bytes_per_step: float  # Sent by a region, the mean over the run.

    @property
    def steps(self) -> int:
        """S, steps of the run."""
        return self.curve[-1][0]

    @property
    def size(self) -> tuple[int, int, int]:
        """Parameters, steps and tokens of its runs."""
        return self.parameters, self.steps, self.steps * self.config.tokens_per_step

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `experiments.train`."""
        name = self.config.method.method
        values = self.config.method.values
        chosen = {key: values[key] for key in TOLD if values.get(key) is not None}
        for key, default in methods.defaults(name).items():
            if key not in chosen and values[key] != default:
                chosen[key] = values[key]

        optimizer = self.config.optimizer
        inner: dict[str, Any] = {"inner_lr": optimizer.inner_lr}
        if optimizer.inner_optimizer:
            inner["inner_optimizer"] = optimizer.inner_optimizer

        return {"method": name} | chosen | inner


@dataclasses.dataclass(frozen=True)
class Advice:
    """A choice on a network."""

    choice: Choice
    loss: float  # Expected, nats per token.
    steps: float  # Done in the time.
    stall_share: float  # Share of the time that regions wait for messages.
    bytes_per_step: float  # Sent by a region, for the planned model.

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the loss is None before the first evaluation."""
        return {
            "cell": self.choice.label,
            "flags": self.choice.flags,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "steps": self.steps,
            "stall_share": self.stall_share,
            "bytes_per_step": self.bytes_per_step,
            "seeds": self.choice.seeds,
        }

    def explain(self) -> str:
        """Return its reasons in one line."""
        waits = "nothing waits for the network"
        if self.stall_share >= 0.005:
            waits = f"{self.stall_share:.0%} of the time is spent waiting"

        loss = "not evaluated so early,"
        if math.isfinite(self.loss):
            seeds = "1 seed" if self.choice.seeds == 1 else f"{self.choice.seeds} seeds"
            loss = f"loss {self.loss:.3f} (of {seeds})"

        return (
            f"{self.choice.label}: {loss} after {self.steps:.0f} "
            f"of {self.choice.steps:.0f} steps; {waits}; "
            f"{format_bytes(self.bytes_per_step)} a step"
        )


def read(paths: str | pathlib.Path) -> list[Choice]:
    """Return the choices of sweeps: the tuned column of each cell, or the only one."""
    choices: list[Choice] = []
    for path in str(paths).split(","):
        of_file = read_cells(path, _choices)
        if not of_file:
            raise ValueError(f"frontier={path} has no cell whose seeds all ended well")
        choices += of_file

    sizes = {choice.size for choice in choices}
    if len(sizes) > 1:
        several = " and ".join(
            "{} parameters, {} steps, {} tokens".format(*x) for x in sorted(sizes)[:2]
        )
        raise ValueError(
            f"frontier={paths} has runs of {several}: losses are comparable between "
            "runs of one size alone; give the files of one"
        )

    return choices


def _choices(cells: Iterable[Mapping[str, Any]]) -> list[Choice]:
    choices = [_choice(cell) for cell in cells]
    return [choice for choice in choices if choice is not None]


def _choice(cell: Mapping[str, Any]) -> Choice | None:
    """Return a cell's choice; None if a seed diverged or no run finished."""
    column = column_of(cell)
    if column is None or column["diverged"] or not column["curve"]:
        return None
    return Choice(
        label(cell["flags"]),
        TrainConfig.from_json(column["config"]),
        [(step, loss) for step, loss, _ in column["curve"]],
        len(column["seeds"]),
        column["parameters"],
        column["fragment_bytes"],
        column["bytes_per_step"],
    )


def advise(
    choices: Sequence[Choice],
    topology: Topology,
    num_params: float,
    step_time_s: Sequence[float],
    collective: str | None = None,
) -> list[Advice]:
    """Return the expected loss of each choice, the least first.

    Methods for another number of regions are left out.
    """
    regions = topology.num_regions
    times = tuple(step_time_s) * (regions if len(step_time_s) == 1 else 1)
    advices = []

    for choice in choices:
        scale = num_params / choice.parameters
        method = choice.config.method.build()
        if method.num_regions not in (None, regions):
            continue

        sizes = [scale * size for size in choice.fragment_bytes]
        timeline = simulated(method, topology, sizes, times, choice.steps, collective)
        # Those that all regions have done in the time.
        done = range(choice.steps + 1)
        seconds = [timeline.seconds_until(x) for x in done]
        steps = float(np.interp(choice.steps * max(times), seconds, done))
        loss = float(np.interp(steps, *np.transpose(choice.curve)))
        advices.append(
            Advice(
                choice,
                loss if steps >= choice.curve[0][0] else math.inf,
                steps,
                # Waits for the slowest region's steps are not waits for messages.
                1 - timeline.utilization() * max(times) / float(np.mean(times)),
                scale * choice.bytes_per_step,
            )
        )

    if not advices:
        raise ValueError(f"the frontier has no method for regions={regions}")
    return sorted(advices, key=lambda advice: (advice.loss, advice.bytes_per_step))


def warning(request: Mapping[str, float]) -> str | None:
    """Describe the part of a request that was not measured; None if all was."""
    outside = []
    for name, value in request.items():
        least, most = MEASURED[name]
        if not least * (1 - _SLACK) <= value <= most * (1 + _SLACK):
            measured = _size(least) + (f" to {_size(most)}" if most > least else "")
            outside.append(f"{name} {_size(value)} (measured: {measured})")

    if not outside:
        return None
    return (
        f"extrapolated, not measured: {', '.join(outside)}; see docs/results/recipe.md"
    )


def _size(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or math.isinf(value) else f"{value:.3g}"
