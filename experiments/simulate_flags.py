"""Flags of `experiments.simulate`, and what they describe: a network, a method, a job.

A method takes its arguments under the names that training has for them; of those, the
ones that decide when something is sent, and how much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import flags

from cocodc_jax import methods
from cocodc_jax.methods import METHODS, Method
from cocodc_jax.network import exchanges, goodput, world
from cocodc_jax.network.channel import SHARINGS
from cocodc_jax.network.collectives import COLLECTIVES
from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.network.swarm import Failure
from cocodc_jax.network.workload import Workload

Value = TypeVar("Value")

AUTO = "auto"

# Arguments of methods: what they are.
COUNTS = {
    "sync_interval": "H, steps",
    "num_fragments": "K",
    "max_delay_steps": "the longest that --delay_steps=auto may choose",
    "rank": "first rank of low-rank messages",
    "min_rank": "smallest rank",
    "quorum": "answers that are waited for",
    "num_rings": "rings at once",
}
STEPS = {"grace_steps": "steps waited for more answers than the quorum"}
COUNTS_OR_AUTO = {
    "delay_steps": "tau, or 'auto'",
    "syncs_per_interval": "N, or 'auto'",
}
TEXTS = {
    "answer_steps": "steps each region's answer takes, as 1,1,2,9",
    "compress": "compressor of the messages, as int8 or ef+topk:0.1",
}
ARGUMENTS = (*COUNTS, *STEPS, *COUNTS_OR_AUTO, *TEXTS, "network_share")

# Of those, what a plan takes as given.
WISHES = ("num_fragments", "sync_interval", "network_share")

# Flags that another one leaves without a meaning; beside --table, that is all of them.
UNREAD = {
    "plan": (
        "method", *(name for name in ARGUMENTS if name not in WISHES), "effective_rank",
        "sharing", "host_mb_per_s", "num_layers", "steps", "loss_curve", "loss_key",
        "target_loss", "hours_between_failures", "repair_s", "checkpoint_s",
        "least_regions",
    ),
    "links": ("world", "regions", "bandwidth_gbps", "latency_ms", "jitter_ms", "loss"),
    "world": ("regions", "latency_ms", "jitter_ms", "loss"),
}  # fmt: skip

# Flags that mean something beside another one alone.
NEED = {
    "plan": (
        "frontier", "max_fragments", "stages", "activation_mb", "swarm_s",
        "rebalance_s", "failures",
    ),
    "stages": ("activation_mb", "swarm_s"),
    "swarm_s": ("rebalance_s", "failures"),
    "loss_curve": ("target_loss", "loss_key"),
    "target_loss": ("loss_curve",),
    "hours_between_failures": ("repair_s", "checkpoint_s", "least_regions"),
}  # fmt: skip

# What is simulated where nothing is said, so that methods can be laid side by side.
DEFAULTS: dict[str, dict[str, Any]] = {
    "diloco": {"sync_interval": 100},
    "streaming_diloco": {"delay_steps": 5},
}


def define_flags() -> flags.FlagValues:
    """Return this program's flags, apart from those of other programs."""
    values = flags.FlagValues()
    for define in SECTIONS.values():
        define(values)
    return values


def _define_program(values: flags.FlagValues) -> None:
    boolean = functools.partial(flags.DEFINE_bool, flag_values=values)
    boolean("help", False, "print this and exit")
    boolean("plan", False, "choose K, H, N and tau for the network and say why")
    boolean("table", False, "compare with published numbers")
    note = (
        "cells.json of a sweep, or of several with commas: --plan recommends a method, "
        "precision and H from it"
    )
    flags.DEFINE_string("frontier", None, note, flag_values=values)
    flags.DEFINE_string("workdir", None, "folder for results", flag_values=values)


def _define_network(values: flags.FlagValues) -> None:
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    choice = functools.partial(flags.DEFINE_enum, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    flags.DEFINE_integer("regions", 4, "regions", lower_bound=1, flag_values=values)
    number("bandwidth_gbps", 1.0, "Gbit/s of each ordered pair of regions")
    number("latency_ms", 50.0, "milliseconds one way", lower_bound=0)
    number("jitter_ms", 0.0, "milliseconds, either way", lower_bound=0)
    number("loss", 0.0, "share of packets lost, in [0, 1)", lower_bound=0)
    known = ", ".join(world.world_regions())
    text("world", None, f"cloud regions by name, with commas: {known}")
    text("links", None, "YAML file with regions, links, changes")
    choice(
        "collective",
        None,
        sorted(COLLECTIVES),
        "how messages cross regions; default ring, or gather for encoded ones",
    )
    choice("sharing", "fair", SHARINGS, "how syncs under way share the links")


def _define_method(values: flags.FlagValues) -> None:
    count = functools.partial(flags.DEFINE_integer, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    flags.DEFINE_enum(
        "method", "streaming_diloco", sorted(METHODS), "to simulate", flag_values=values
    )
    for name, note in COUNTS.items():
        count(name, None, note, lower_bound=1)
    for name, note in STEPS.items():
        count(name, None, note, lower_bound=0)
    for name, note in (COUNTS_OR_AUTO | TEXTS).items():
        text(name, None, note)
    note = "gamma, the share of the network for --plan (default 0.4) and N 'auto'"
    flags.DEFINE_float("network_share", None, note, flag_values=values)
    note = "of the means, for methods whose rank follows it; default: above --rank"
    flags.DEFINE_float("effective_rank", None, note, flag_values=values)


def _define_job(values: flags.FlagValues) -> None:
    number = functools.partial(flags.DEFINE_float, flag_values=values)
    count = functools.partial(flags.DEFINE_integer, flag_values=values)
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    number("params", 1e9, "parameters of the model")
    number("bits_per_param", 32.0, "bits of each parameter, before a method's encoding")
    text("step_time_s", "0.1", "seconds of a step: one number or one per region")
    number(
        "host_mb_per_s", math.inf, "10^6 bytes of messages that hosts prepare a second"
    )
    count("num_layers", 1, "above 1, each layer is sent when ready", lower_bound=1)
    count("steps", None, "inner steps to simulate; default 3 H", lower_bound=1)
    text("loss_curve", None, "metrics.jsonl, or a JSON list of [step, loss]")
    text("loss_key", "eval_loss", "entry of metrics.jsonl to read")
    number("target_loss", None, "report the seconds until this loss")
    number("hours_between_failures", None, "of each region on average, for goodput")
    number("repair_s", 600.0, "seconds until a failed region goes on", lower_bound=0)
    number("checkpoint_s", 1800.0, "seconds between checkpoints", lower_bound=0)
    count("least_regions", 1, "regions without which none goes on", lower_bound=1)
    count("max_fragments", 32, "K that --plan may choose", lower_bound=1)
    count("stages", 1, "pipeline stages that --plan puts on sites", lower_bound=1)
    number("activation_mb", None, "10^6 bytes a stage hands on in a step, for --stages")
    number(
        "swarm_s", None, "seconds of --stages' sites to simulate, see network/swarm.py"
    )
    number("rebalance_s", None, "seconds between moves of sites between stages (SWARM)")
    text(
        "failures",
        "",
        "sites that are gone, as us-east@600-1200,asia@900: name, seconds",
    )


SECTIONS = {
    "What to do": _define_program,
    "The network": _define_network,
    "The method: its arguments, where it has them": _define_method,
    "The model, its hosts and how they train": _define_job,
}


def check(values: flags.FlagValues) -> None:
    """Refuse flags that would be passed over, and numbers that are of no use.

    Raises:
      ValueError: naming the flag and its value.
    """
    others = [name for name in values if name not in ("table", "help")]
    for mode, names in ({"table": others} | UNREAD).items():
        for name in names:
            if values[mode].value and values[name].present:
                raise ValueError(
                    f"{name}={values[name].value} has no meaning beside --{mode}; "
                    "leave it out"
                )
    for needed, names in NEED.items():
        how = "--stages of 2 or more" if needed == "stages" else f"--{needed} too"
        for name in names:
            is_there = values[needed].value != values[needed].default
            if values[name].present and not is_there:
                raise ValueError(f"{name}={values[name].value} needs {how}")
    for name in ("activation_mb", "swarm_s", "rebalance_s"):
        value = values[name].value
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
    if values.target_loss is not None:
        _check_finite(values, "target_loss")


def _check_finite(values: flags.FlagValues, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")


def build_topology(values: flags.FlagValues) -> Topology:
    """Return the network the flags describe."""
    if values.links:
        return named("links", values.links, world.load_topology)
    if values.world:
        try:
            return world.world(tuple(values.world.split(",")), values.bandwidth_gbps)
        except ValueError as error:
            raise ValueError(f"--world={values.world}: {error}") from error
    _check_finite(values, "latency_ms", "jitter_ms")
    link = Link(
        values.bandwidth_gbps,
        values.latency_ms / 1000,
        values.jitter_ms / 1000,
        values.loss,
    )
    return uniform(values.regions, link)


def build_method(values: flags.FlagValues) -> Method:
    """Return the method the flags describe.

    Raises:
      ValueError: for an argument that it does not take, or refuses.
    """
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
        if argument in COUNTS_OR_AUTO:
            given[argument] = _count_or_auto(argument, value)
    return methods.get(name, **given)


def _count_or_auto(name: str, text: str) -> int | str:
    if text != AUTO and not text.isdecimal():
        raise ValueError(f"--{name}={text} must be a whole number or {AUTO!r}")
    return text if text == AUTO else int(text)


def build_workload(
    values: flags.FlagValues, method: Method, num_regions: int
) -> Workload:
    """Return bytes and step times, fragments of equal bytes."""
    times = step_times(values, num_regions)
    num, share = method.num_fragments, exchanges.message_share(method)
    size = model_bytes(values) * share / num
    host = values.host_mb_per_s
    if not host > 0:
        raise ValueError(f"--host_mb_per_s={host} must be positive")
    return Workload((size,) * num, times, values.num_layers, host * 1e6, 1 / share)


def goodput_of(
    values: flags.FlagValues, num_regions: int, sync_s: float, utilization: float
) -> dict[str, float]:
    """Return what is predicted of the share of time in steps that count, by policy.

    Args:
      values: with the rates of failures; `{}` without one.
      num_regions: M.
      sync_s: seconds between syncs.
      utilization: share of the time spent computing while nothing fails.
    """
    if values.hours_between_failures is None:
        return {}
    try:
        failing = goodput.Failures(
            3600 * values.hours_between_failures, values.repair_s
        )
    except ValueError as error:
        raise ValueError(
            f"--hours_between_failures={values.hours_between_failures}, --repair_s="
            f"{values.repair_s}: {error}"
        ) from error
    _check_finite(values, "checkpoint_s")
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


def failures(values: flags.FlagValues, names: Sequence[str]) -> list[Failure]:
    """Return sites that are gone, of `name@start` and `name@start-end`."""
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
        try:
            found.append(Failure(site, *times))
        except ValueError as error:
            raise ValueError(
                f"--failures={values.failures}: {text!r}: {error}"
            ) from error
    return found


def model_bytes(values: flags.FlagValues) -> float:
    """Return the bytes of all parameters, before a method's encoding."""
    for name in ("params", "bits_per_param"):
        value = getattr(values, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}={value} must be positive")
    return values.params * values.bits_per_param / 8


def step_times(values: flags.FlagValues, num_regions: int) -> tuple[float, ...]:
    """Return the seconds of a step in each region, of one number or as many.

    Raises:
      ValueError: naming the flag and its value.
    """
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


def named(flag: str, path: str, read: Callable[[str], Value]) -> Value:
    """Return read(path); an error of the file system names the flag."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"--{flag}={path}: {error.strerror}") from error
