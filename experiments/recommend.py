"""Recommends a method, its messages and its rates for a network, as a command.

The choice is that of docs/start/choose.md. Each setting is simulated on the network,
with the exchanges of processes:

1. Data parallel, if a full gradient crosses within a small share of a step.
2. Else the recommended setting (`recipe.py`) with the shortest delay at which no region
   waits: one bit a value or, if that takes too long, the signs of low-rank factors.
3. Else a longer delay with the least waiting, whose loss was not measured.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from cocodc_jax import methods, models
from cocodc_jax.methods import Method
from cocodc_jax.network import exchanges
from cocodc_jax.network.links import Topology
from cocodc_jax.report.units import format_bytes, format_count
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.transforms.compressor import message_bytes

from . import recipe
from .commands import command_line
from .sweeps import advice
from .sweeps.networks import simulated

LOW_RANK = "ef+lowrank:32+sign"
LONGEST_STEPS = 1024  # The longest delay that is tried.
# Shares of a run's time spent waiting: what counts as none, and the most for data
# parallel.
NO_WAIT = 0.01
LITTLE_WAIT = 0.05
_STEPS = 4 * LONGEST_STEPS  # At most simulated.
# Dense models from the smallest up; a command starts from the nearest one.
_MODELS = ("smoke", "tiny", "mini", "small", "1b", "8b")


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A recommended setting, and the reasons.

    Attributes:
      flags: of `experiments.train`: method, its arguments and the inner learning rate.
      preset: the preset whose model is nearest in size.
      regions: their number.
      delay_steps: tau; 0 if regions wait for each exchange.
      message_bytes: of one region's message for a fragment.
      stall_share: share of the simulated time that regions wait for messages.
      reasons: one sentence or two for each choice.
    """

    flags: dict[str, Any]
    preset: str
    regions: int
    delay_steps: int
    message_bytes: float
    stall_share: float
    reasons: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that trains with it."""
        return command(self.preset, self.regions, self.flags)

    def explain(self) -> str:
        """Return the reasons as plain text, one line each."""
        return "\n".join(f"- {reason}" for reason in self.reasons)


def command(preset: str, regions: int, flags: dict[str, Any]) -> str:
    """Return the command that trains a preset's model with some flags."""
    words = [f"--preset={preset}", f"--regions={regions}"]
    batches = PRESETS[preset].run.eval_batches
    if batches % regions:  # Regions share them.
        words.append(f"--eval_batches={math.ceil(batches / regions) * regions}")
    words += recipe.words(flags).split()
    return command_line("train", [*words, "--workdir=runs/planned"])


def nearest_preset(num_params: float) -> str:
    """Return the preset whose model is nearest in size.

    >>> nearest_preset(1e6), nearest_preset(2e9)
    ('tiny', '1b')
    """

    def distance(name: str) -> float:
        preset_params = models.num_params(PRESETS[name].model)
        return abs(math.log(preset_params / num_params))

    return min(_MODELS, key=distance)


def recommend(
    topology: Topology,
    num_params: float,
    step_time_s: Sequence[float],
    num_fragments: int = recipe.FRAGMENTS,
    collective: str | None = None,
) -> Recommendation:
    """Recommend a setting for a model of `num_params` parameters on a network.

    `step_time_s` has one number or one for each region. Raises ValueError for a single
    region, which needs no network.
    """
    if topology.num_regions < 2:
        raise ValueError("a plan needs at least two regions")
    preset = nearest_preset(num_params)
    num_fragments = min(num_fragments, PRESETS[preset].model.num_layers)

    def tried(flags: dict[str, Any]) -> Recommendation:
        method = methods.get(**_arguments(flags))
        whole = 4 * num_params * _message_share(method, preset)
        size = whole / method.num_fragments
        share = _waiting(method, topology, size, step_time_s, collective)

        return Recommendation(
            flags=flags | {"inner_lr": _inner_lr(preset)},
            preset=preset,
            regions=topology.num_regions,
            delay_steps=flags.get("delay_steps", 0),
            message_bytes=size,
            stall_share=share,
            reasons=(),
        )

    plan = tried({"method": "data_parallel"})
    if plan.stall_share > LITTLE_WAIT:
        plan = _first_without_wait(map(tried, _settings(num_fragments)))
    return dataclasses.replace(plan, reasons=_reasons(plan, num_params))


def _arguments(flags: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(flags)
    return {"name": arguments.pop("method"), **arguments}


def _settings(num_fragments: int) -> Iterator[dict[str, Any]]:
    """Yield settings in the order of preference."""
    short = range(1, recipe.SHORT_DELAY + 1)
    first = math.ceil((recipe.SHORT_DELAY + 1) / num_fragments) * num_fragments
    late = range(first, recipe.LONGEST_DELAY + 1, num_fragments)
    for compress in (recipe.COMPRESS, LOW_RANK):
        for delay_steps in itertools.chain(short, late):
            flags = recipe.setting(num_fragments, delay_steps).flags
            yield flags | {"compress": compress}

    delay_steps = 2 * recipe.LONGEST_DELAY
    while delay_steps <= LONGEST_STEPS:
        flags = recipe.setting(num_fragments, delay_steps).flags
        yield flags | {"compress": LOW_RANK}
        delay_steps *= 2


def _first_without_wait(plans: Iterable[Recommendation]) -> Recommendation:
    """Return the first plan without a wait, or else the one with the least."""
    tried = []
    for plan in plans:
        if plan.stall_share <= NO_WAIT:
            return plan
        tried.append(plan)
    return min(tried, key=lambda plan: plan.stall_share)


def _message_share(method: Method, preset: str) -> float:
    """Return the bytes of a message over those of float32, for a preset's tensors."""
    if method.sync is None:
        return 1.0
    init = functools.partial(models.init_params, PRESETS[preset].model)
    shapes = jax.eval_shape(init, jax.random.key(0))
    return method.sync.message.num_bytes(shapes, 1) / message_bytes(shapes)


def _waiting(
    method: Method,
    topology: Topology,
    size: float,
    step_time_s: Sequence[float],
    collective: str | None,
) -> float:
    """Return the share of time that regions wait for messages of `size` bytes."""
    regions = topology.num_regions
    times = tuple(step_time_s) * (regions if len(step_time_s) == 1 else 1)
    sizes = (size,) * method.num_fragments
    if exchanges.is_gathered(method):
        collective = None  # Encoded messages are gathered.
    timeline = simulated(method, topology, sizes, times, _STEPS, collective)
    # Waits for the slowest region's steps are not waits for messages.
    computing = timeline.utilization() * max(times) / (sum(times) / len(times))
    return max(0.0, 1 - computing)


def _inner_lr(preset: str) -> float:
    """Return twice the preset's rate if that was measured, else the preset's."""
    config = PRESETS[preset]
    _, most = advice.MEASURED["parameters"]
    is_measured = models.num_params(config.model) <= most
    factor = recipe.INNER_LR_FACTOR if is_measured else 1
    return factor * config.optimizer.inner_lr


def _reasons(plan: Recommendation, num_params: float) -> tuple[str, ...]:
    flags = plan.flags
    size = format_bytes(plan.message_bytes)
    waits = "No region waits, in simulation."
    if plan.stall_share >= 0.001:
        waits = f"Regions wait for {plan.stall_share:.1%} of the simulated time."
    if flags["method"] == "data_parallel":
        reasons = [
            f"data_parallel: a full gradient of {size} crosses within a small share of "
            "a step. It ends with the lowest loss, and sends the most.",
            waits,
        ]
    else:
        reasons = [
            f"{flags['method']} with {flags['compress']} (error feedback): "
            f"{_MESSAGES[flags['compress']]}, {size} a fragment.",
            _timing(flags),
            waits,
            f"Outer optimizer: learning rate {flags['outer_lr']:g}, momentum "
            f"{flags['outer_momentum']:g}.",
        ]
    reasons.append(
        f"Inner learning rate {flags['inner_lr']:g}: tune it first, as it decides more "
        "than the method."
    )

    preset_params = models.num_params(PRESETS[plan.preset].model)
    if not 0.9 < preset_params / num_params < 1.1:
        reasons.append(
            f"The command trains {plan.preset}, the nearest preset, with "
            f"{format_count(preset_params)} parameters; set your model's sizes by its "
            "flags."
        )
    request = {"parameters": num_params, "regions": plan.regions}
    remarks = [x for x in (advice.warning(request), *_delay_remarks(plan)) if x]
    reasons += [f"{text[0].upper()}{text[1:]}." for text in remarks]
    return tuple(reasons)


_MESSAGES = {
    recipe.COMPRESS: "one bit a value",
    LOW_RANK: "signs of factors of rank 32, as one bit a value takes too long",
}


def _timing(flags: dict[str, Any]) -> str:
    num, interval, delay = (
        flags[name] for name in ("num_fragments", "sync_interval", "delay_steps")
    )
    if interval == num:
        starts = "a fragment starts at every step"
    else:
        starts = "a fragment starts again once its last message has been merged"
    return (
        f"K = {num} fragments, H = {interval} steps, tau = {delay}: {starts}, and is "
        f"merged {delay} step{'s' if delay > 1 else ''} later."
    )


def _delay_remarks(plan: Recommendation) -> Iterator[str]:
    if plan.delay_steps > recipe.LONGEST_DELAY:
        yield (
            f"extrapolated, not measured: a delay of {plan.delay_steps} steps "
            f"(measured: up to {recipe.LONGEST_DELAY})"
        )
    if plan.delay_steps and plan.stall_share > NO_WAIT:
        yield "no known setting keeps regions from waiting on these links"
