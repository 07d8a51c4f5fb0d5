"""What the flags of `experiments.simulate` describe: a network, a method, a job.

And loss curves, which they name.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from absl.flags import FlagValues

from cocodc_jax import methods
from cocodc_jax.methods import Method
from cocodc_jax.network import exchanges, goodput
from cocodc_jax.network.links import Topology
from cocodc_jax.network.swarm import Failure
from cocodc_jax.network.workload import Workload
from cocodc_jax.report.records import read_records

from .. import program
from .options import ARGUMENTS, COUNTS_OR_AUTO

AUTO = "auto"

# Defaults of the simulation, so that methods can be compared.
DEFAULTS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 100},
    "streaming_diloco": {"delay_steps": 5},
}


def build_topology(values: FlagValues) -> Topology:
    """Return the network the flags describe."""
    return program.topology(values, values.bandwidth_gbps)


def build_method(values: FlagValues) -> Method:
    """Return the method the flags describe."""
    name = values.method
    taken = methods.defaults(name)
    given = dict(DEFAULTS.get(name, {}))
    for argument in ARGUMENTS:
        value = getattr(values, argument)
        if value is None:
            continue
        if argument not in taken:
            raise ValueError(
                f"{argument}={value} has no meaning for {name}; leave it out"
            )
        given[argument] = value
        if argument in COUNTS_OR_AUTO and value != AUTO:
            if not value.isdecimal():
                raise ValueError(
                    f"--{argument}={value} must be a whole number or {AUTO!r}"
                )
            given[argument] = int(value)
    method, rank = methods.get(name, **given), values.effective_rank
    if rank is not None and "effective_rank" not in method.needs:
        raise ValueError(
            f"effective_rank={rank} has no meaning for {name}; leave it out"
        )
    return method


def build_workload(values: FlagValues, method: Method, num_regions: int) -> Workload:
    """Return the workload: bytes and step times, with fragments of equal bytes."""
    times = step_times(values, num_regions)
    num, share = method.num_fragments, exchanges.message_share(method)
    size = model_bytes(values) * share / num
    host = values.host_mb_per_s
    if not host > 0:
        raise ValueError(f"--host_mb_per_s={host} must be positive")
    return Workload((size,) * num, times, values.num_layers, host * 1e6, 1 / share)


def goodput_of(
    values: FlagValues, num_regions: int, sync_s: float, utilization: float
) -> dict[str, float]:
    """Return the predicted goodput by policy; `{}` without a rate of failures."""
    if values.hours_between_failures is None:
        return {}
    hours, repair_s = values.hours_between_failures, values.repair_s
    with program.about(f"--hours_between_failures={hours}, --repair_s={repair_s}"):
        failing = goodput.Failures(3600 * hours, repair_s)
    if values.least_regions > num_regions:
        raise ValueError(
            f"least_regions={values.least_regions} must be at most the number of "
            f"regions, {num_regions}"
        )
    if values.least_regions == 1:
        apart = goodput.alone(failing, sync_s)
    else:  # Some thousand failures are drawn.
        seconds = 1000 * (failing.between_s + failing.repair_s)
        apart = goodput.simulated(
            failing, num_regions, values.least_regions, sync_s, seconds
        )
    one = goodput.together(failing, num_regions, values.checkpoint_s)
    return {
        "goodput_together": one * utilization,
        "goodput_alone": apart * utilization,
    }


def failures(values: FlagValues, names: Sequence[str]) -> list[Failure]:
    """Return outages of sites, given as `name@start` or `name@start-end`."""
    found = []
    for text in filter(None, values.failures.split(",")):
        name, _, when = text.partition("@")
        start, _, end = when.partition("-")
        try:
            site, times = names.index(name), (float(start), float(end or math.inf))
        except ValueError as error:
            raise ValueError(
                f"--failures={values.failures}: {text!r} must be a site of "
                f"{', '.join(names)}, and from when to when, as {names[0]}@60-90"
            ) from error
        with program.about(f"--failures={values.failures}: {text!r}"):
            found.append(Failure(site, *times))
    return found


def model_bytes(values: FlagValues) -> float:
    """Return the bytes of all parameters, before a method's encoding."""
    for name in ("params", "bits_per_param"):
        value = getattr(values, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}={value} must be positive")
    return values.params * values.bits_per_param / 8


def step_times(values: FlagValues, num_regions: int) -> tuple[float, ...]:
    """Return the seconds of a step in each region."""
    text = values.step_time_s
    try:
        times = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"--step_time_s={text} must be numbers") from error
    if not all(0 < time < math.inf for time in times):
        raise ValueError(f"--step_time_s={text} must be positive")
    if len(times) not in (1, num_regions):
        raise ValueError(
            f"--step_time_s={text} must be one number or one for each of {num_regions} "
            "regions"
        )
    return times * num_regions if len(times) == 1 else times


def read_curve(
    path: str | pathlib.Path, key: str = "eval_loss"
) -> list[tuple[float, float]]:
    """Read (step, loss) pairs from JSON lines or from a JSON list of pairs."""
    text = pathlib.Path(path).read_bytes()
    try:
        if text.lstrip().startswith(b"["):
            pairs = json.loads(text)
        else:
            rows = read_records(path)
            pairs = [(row["step"], row[key]) for row in rows if key in row]
        curve = [(float(step), float(loss)) for step, loss in pairs]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a loss curve: {error!r}") from error
    if not curve:
        raise ValueError(f"{path} has no line with both 'step' and {key!r}")
    steps = [step for step, _ in curve]
    if any(later <= step for step, later in itertools.pairwise(steps)):
        raise ValueError(f"{path}: loss curve steps must increase, got {steps}")
    return curve
