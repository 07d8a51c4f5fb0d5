"""Flags of `experiments.simulate`, and what they describe: a method, a job, a curve.

Arguments of methods have the names that training uses. Only those that decide when a
method sends, and how much, are flags.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from absl.flags import FlagValues

from cocodc_jax import methods
from cocodc_jax.files import without_mark
from cocodc_jax.methods import METHODS, Method
from cocodc_jax.network import exchanges, goodput, world
from cocodc_jax.network.collectives import COLLECTIVES
from cocodc_jax.network.flights import SHARINGS
from cocodc_jax.network.swarm import Failure
from cocodc_jax.network.workload import Workload
from cocodc_jax.report.records import read_records
from cocodc_jax.run.config.command_line import check_numbers

from .. import program

AUTO = "auto"
# Defaults of the simulation, so that methods can be compared.
DEFAULTS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 100},
    "streaming_diloco": {"delay_steps": 5},
}

# Help of the methods' arguments.
COUNTS = {
    "sync_interval": "H, steps",
    "num_fragments": "K",
    "max_delay_steps": "the longest that --delay_steps=auto may choose",
    "rank": "first rank of low-rank messages",
    "min_rank": "smallest rank",
    "quorum": "number of answers to wait for",
    "num_rings": "rings at once",
}
STEPS = {"grace_steps": "steps to wait for more answers after the quorum"}
COUNTS_OR_AUTO = {"delay_steps": "tau, or 'auto'", "syncs_per_interval": "N, or 'auto'"}
TEXTS = {
    "answer_steps": "steps until each region answers, as 1,1,2,9",
    "compress": "compressor of the messages, as int8 or ef+topk:0.1",
}
ARGUMENTS = (*COUNTS, *STEPS, *COUNTS_OR_AUTO, *TEXTS, "network_share")

# Arguments that a plan does not choose.
WISHES = ("num_fragments", "sync_interval", "network_share")

# Flags that have no meaning with another one.
UNREAD = {
    "plan": (
        "method",
        *(name for name in ARGUMENTS if name not in (*WISHES, "compress")),
        "effective_rank",
        "sharing",
        "host_mb_per_s",
        "num_layers",
        "steps",
        "loss_curve",
        "loss_key",
        "target_loss",
        "hours_between_failures",
        "repair_s",
        "checkpoint_s",
        "least_regions",
    ),
    "links": ("world", "regions", "bandwidth_gbps", "latency_ms", "jitter_ms", "loss"),
    "world": ("regions", "latency_ms", "jitter_ms", "loss"),
}

# Flags that need another one.
NEED = {
    "plan": (
        "frontier",
        "max_fragments",
        "stages",
        "activation_mb",
        "swarm_s",
        "rebalance_s",
        "failures",
    ),
    "stages": ("activation_mb", "swarm_s"),
    "swarm_s": ("rebalance_s", "failures"),
    "loss_curve": ("target_loss", "loss_key"),
    "target_loss": ("loss_curve",),
    "answer_steps": ("grace_steps",),
    "hours_between_failures": ("repair_s", "checkpoint_s", "least_regions"),
}

SECTIONS = {
    "What to do": (
        (
            *("plan", False),
            "recommend what to train with on the network, say why, and print the "
            "command; with --compress=none for float32 messages",
        ),
        ("table", False, "compare with published numbers"),
        (
            "frontier",
            pathlib.Path,
            "cells.json of a sweep, or of several with commas: --plan recommends a "
            "method, precision and H from it",
        ),
        ("workdir", pathlib.Path, "folder for results"),
    ),
    "The network": (
        ("regions", 4, "regions"),
        ("bandwidth_gbps", 1.0, "Gbit/s of each ordered pair of regions"),
        ("latency_ms", 50.0, "milliseconds one way"),
        ("jitter_ms", 0.0, "milliseconds in either direction"),
        ("loss", 0.0, "share of packets lost, in [0, 1)"),
        (
            "world",
            str,
            f"cloud regions, comma-separated, of {', '.join(world.REGIONS)}",
        ),
        ("links", pathlib.Path, "YAML file with regions, links, changes"),
        (
            "collective",
            (None, *sorted(COLLECTIVES)),
            "how messages cross regions; default ring, or gather for encoded ones; "
            "for plans what processes do",
        ),
        ("sharing", ("fair", *SHARINGS), "how concurrent syncs share the links"),
    ),
    "The method: its arguments, where it has them": (
        ("method", ("streaming_diloco", *sorted(METHODS)), "to simulate"),
        *((name, int, note) for name, note in (COUNTS | STEPS).items()),
        *((name, str, note) for name, note in (COUNTS_OR_AUTO | TEXTS).items()),
        (
            "network_share",
            float,
            "gamma, the share of the network for --plan (default 0.4) and N 'auto'",
        ),
        (
            "effective_rank",
            float,
            "of the means, for methods whose rank follows it; default: above --rank",
        ),
    ),
    "The model, its hosts and how they train": (
        ("params", 1e9, "parameters of the model"),
        ("bits_per_param", 32.0, "of each parameter, before a method's encoding"),
        ("step_time_s", "0.1", "seconds of a step: one number or one per region"),
        ("host_mb_per_s", math.inf, "10^6 bytes that a host prepares per second"),
        ("num_layers", 1, "above 1, each layer is sent once it is ready"),
        ("steps", int, "inner steps to simulate; default 3 H"),
        ("loss_curve", pathlib.Path, "metrics.jsonl, or a JSON list of [step, loss]"),
        ("loss_key", "eval_loss", "entry of metrics.jsonl to read"),
        ("target_loss", float, "report the seconds until this loss"),
        ("hours_between_failures", float, "mean of a region, for goodput"),
        ("repair_s", 600.0, "seconds until a failed region resumes"),
        ("checkpoint_s", 1800.0, "seconds between checkpoints"),
        ("least_regions", 1, "fewest regions with which the run continues"),
        ("max_fragments", 32, "K that --plan may choose"),
        ("stages", 1, "pipeline stages that --plan places on sites"),
        ("activation_mb", float, "10^6 bytes that a stage passes on in a step"),
        ("swarm_s", float, "simulated seconds of the pipeline (network/swarm.py)"),
        ("rebalance_s", float, "seconds between moves of sites between stages (SWARM)"),
        ("failures", "", "outages of sites in seconds, as us-east@600-1200,asia@900"),
    ),
}
_AT_LEAST_1 = (
    "regions",
    *COUNTS,
    "num_layers",
    "steps",
    "least_regions",
    "max_fragments",
    "stages",
)
_NOT_NEGATIVE = (
    "latency_ms",
    "jitter_ms",
    "loss",
    *STEPS,
    "repair_s",
    "checkpoint_s",
)


def define_flags() -> FlagValues:
    """Return this program's flags, apart from those of other programs."""
    bounds = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_NOT_NEGATIVE, 0)
    return program.own_flags(*itertools.chain(*SECTIONS.values()), **bounds)


def check(values: FlagValues) -> None:
    """Refuse flags that would have no effect, and numbers out of range."""
    for mode, names in UNREAD.items():
        for name in names:
            if values[mode].value and values[name].present:
                raise ValueError(
                    f"{name}={values[name].value} has no meaning with --{mode}; "
                    "leave it out"
                )
    if values.plan and values.compress not in (None, "none"):
        raise ValueError(
            f"compress={values.compress} is what --plan chooses; leave it out, or use "
            "--compress=none for float32 messages"
        )
    for needed, names in NEED.items():
        how = "--stages of 2 or more" if needed == "stages" else f"--{needed} too"
        for name in names:
            is_there = values[needed].value != values[needed].default
            if values[name].present and not is_there:
                raise ValueError(f"{name}={values[name].value} needs {how}")

    for name in ("activation_mb", "swarm_s", "rebalance_s", "effective_rank"):
        value = values[name].value
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")

    names = ("latency_ms", "jitter_ms", "checkpoint_s", "target_loss")
    check_numbers({name: values[name] for name in names})


def build_method(values: FlagValues) -> Method:
    """Return the method the flags describe."""
    name = values.method
    taken = methods.defaults(name)
    arguments = dict(DEFAULTS.get(name, {}))

    for argument in ARGUMENTS:
        value = getattr(values, argument)
        if value is None:
            continue
        if argument not in taken:
            raise ValueError(
                f"{argument}={value} has no meaning for {name}; leave it out"
            )

        arguments[argument] = value
        if argument in COUNTS_OR_AUTO and value != AUTO:
            if not value.isdecimal():
                raise ValueError(
                    f"--{argument}={value} must be a whole number or {AUTO!r}"
                )
            arguments[argument] = int(value)

    method = methods.get(name, **arguments)
    rank = values.effective_rank
    if rank is not None and "effective_rank" not in method.needs:
        raise ValueError(
            f"effective_rank={rank} has no meaning for {name}; leave it out"
        )

    return method


def build_workload(values: FlagValues, method: Method, num_regions: int) -> Workload:
    """Return the workload: bytes and step times, with fragments of equal bytes."""
    times = step_times(values, num_regions)
    num = method.num_fragments
    share = exchanges.message_share(method)
    # The length of a compressor's message does not depend on the parameters' values.
    sent = (4 * values.params if share < 1 else model_bytes(values)) * share

    host = values.host_mb_per_s
    if not host > 0:
        raise ValueError(f"--host_mb_per_s={host} must be positive")
    answer = model_bytes(values) / sent

    return Workload((sent / num,) * num, times, values.num_layers, host * 1e6, answer)


def goodput_of(
    values: FlagValues, num_regions: int, sync_s: float, utilization: float
) -> dict[str, float]:
    """Return the predicted goodput by policy; `{}` without a rate of failures."""
    if values.hours_between_failures is None:
        return {}

    hours = values.hours_between_failures
    repair_s = values.repair_s
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
    return {"goodput_together": one * utilization, "goodput_alone": apart * utilization}


def failures(values: FlagValues, names: Sequence[str]) -> list[Failure]:
    """Return outages of sites, given as `name@start` or `name@start-end`."""
    outages = []
    for text in filter(None, values.failures.split(",")):
        name, _, when = text.partition("@")
        start, _, end = when.partition("-")
        try:
            site = names.index(name)
            start_s = float(start)
            end_s = float(end) if end else math.inf
        except ValueError as error:
            raise ValueError(
                f"--failures={values.failures}: {text!r} must be a site of "
                f"{', '.join(names)}, and from when to when, as {names[0]}@60-90"
            ) from error

        with program.about(f"--failures={values.failures}: {text!r}"):
            outages.append(Failure(site, start_s, end_s))

    return outages


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
        times = tuple(float(number) for number in text.split(","))
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
    text = without_mark(pathlib.Path(path).read_bytes())
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
