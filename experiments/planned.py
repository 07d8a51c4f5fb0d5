r"""Chooses a run's method, precision, interval and rates for its links.

    python -m experiments.train --plan=auto --plan_gbps=0.1 --plan_latency_ms=50 \
        --plan_step_s=0.5 --workdir=DIR

The choice is that of `simulate --plan` on the same links (`recommend.py`), for the
run's own regions and model. With `--plan_frontier=cells.json` it is that of a sweep's
losses (`simulate --plan --frontier`, `sweeps/advice.py`); settings with more fragments
than the model has blocks are skipped. The same flags give the same plan, so the same
command resumes a run.
"""

import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from cocodc_jax import models
from cocodc_jax.network import world
from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.run.config import flags
from cocodc_jax.run.config.train_config import TrainConfig

from . import program, recipe, recommend
from .program import named
from .sweeps import advice

AUTO = "auto"
NONE = "none"
# Always; of other arguments those that what is recommended does not leave alone.
_CHOSEN = ("method", *advice.TOLD, "inner_lr")
# Flags for `--plan=auto`: default, or the type if there is none, and help.
_FLAGS: dict[str, tuple[Any, str]] = {
    "plan_frontier": (
        pathlib.Path,
        "cells.json of a sweep, or of several: choose by their losses.",
    ),
    "plan_step_s": (float, "Seconds of an inner step."),
    "plan_links": (pathlib.Path, "YAML file with regions and links."),
    "plan_gbps": (1.0, "Gbit/s of each ordered pair of regions, without plan_links."),
    "plan_latency_ms": (50.0, "Milliseconds one way, without plan_links."),
}


def define() -> None:
    """Define `--plan` and the flags that it needs."""
    program.define(
        ("plan", NONE, "'auto': choose method, precision, interval and rates."),
        *((name, x, f"With plan=auto: {text}") for name, (x, text) in _FLAGS.items()),
    )


def planned(config: TrainConfig, says_why: bool = True) -> TrainConfig:
    """Return the configuration with the plan's choices; print why if asked to."""
    if not _is_wanted():
        return config
    if flags.value("plan_frontier") is None:
        recommendation = _recommended(config)
        chosen = recommendation.flags
        said = [*recommendation.reasons, recipe.words(chosen)]
    else:
        chosen, said = _by_losses(config)
    _refuse(chosen)

    region = flags.value("region_id") or 0
    if says_why and max(flags.processes().process_id, region) <= 0:
        for line in said:
            print(f"plan: {line}", file=sys.stderr)
    return config.replace(**chosen)


def _is_wanted() -> bool:
    """Return whether a plan is requested; refuse flags that need one otherwise."""
    passed = [name for name in _FLAGS if flags.given(name)]
    plan = flags.value("plan")
    if plan not in (AUTO, NONE):
        raise ValueError(f"plan={plan!r} is unknown; use {AUTO!r} or {NONE!r}")

    if plan == NONE:
        for name in passed:
            raise ValueError(
                f"{name}={flags.value(name)} has no meaning without --plan=auto"
            )
        return False

    _check(passed)
    return True


def _recommended(config: TrainConfig) -> recommend.Recommendation:
    return recommend.recommend(
        _topology(config.run.regions),
        models.num_params(config.model),
        [flags.value("plan_step_s")],
        num_fragments=min(recipe.FRAGMENTS, config.model.num_layers),
    )


def _by_losses(config: TrainConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that a sweep's losses recommend, and why."""
    best = _best(config)
    num_params = models.num_params(config.model)
    tokens = config.run.steps * config.tokens_per_step

    reasons = [best.explain(), recipe.words(best.choice.flags)]
    if config.run.steps > 2 * best.choice.steps:
        reasons.append(
            f"these losses are of runs of {best.choice.steps} steps, and this one has "
            f"{config.run.steps}: with more, syncing often gains less"
        )

    request = {"parameters": num_params, "regions": config.run.regions}
    request |= {"tokens a parameter": tokens / num_params}
    if warning := advice.warning(request):
        reasons.append(warning)

    return best.choice.flags, reasons


def _best(config: TrainConfig) -> advice.Advice:
    path = flags.value("plan_frontier")
    num_layers = config.model.num_layers
    choices = named("plan_frontier", path, advice.read)

    fit = [x for x in choices if x.config.method.build().num_fragments <= num_layers]
    if not fit:
        raise ValueError(
            f"plan_frontier={path} has no setting with num_fragments at most "
            f"num_layers={num_layers}, the blocks of the model; give the file of a "
            "sweep that has one"
        )
    topology = _topology(config.run.regions)
    num_params = models.num_params(config.model)
    return advice.advise(fit, topology, num_params, [flags.value("plan_step_s")])[0]


def _refuse(chosen: Iterable[str]) -> None:
    for name in chosen:
        if flags.given(name):
            raise ValueError(
                f"{name}={flags.value(name)} is what --plan=auto chooses; leave out one"
                " of the two"
            )


def _check(passed: list[str]) -> None:
    if "plan_step_s" not in passed:
        raise ValueError(f"plan=auto needs --plan_step_s: {_FLAGS['plan_step_s'][1]}")
    if not 0 < flags.value("plan_step_s") < math.inf:
        raise ValueError(
            f"plan_step_s={flags.value('plan_step_s')} must be positive, in seconds"
        )

    _refuse(_CHOSEN)
    for name in {"plan_gbps", "plan_latency_ms"}.intersection(passed):
        if "plan_links" in passed:
            raise ValueError(
                f"{name}={flags.value(name)} and --plan_links exclude each other"
            )


def _topology(num_regions: int) -> Topology:
    path = flags.value("plan_links")
    if path is None:
        gbps = flags.value("plan_gbps")
        ms = flags.value("plan_latency_ms")
        with program.about(f"plan_gbps={gbps}, plan_latency_ms={ms}"):
            return uniform(num_regions, Link(gbps, ms / 1000))

    topology = named("plan_links", path, world.load_topology)
    if topology.num_regions != num_regions:
        raise ValueError(
            f"plan_links={path} has {topology.num_regions} regions, the run has "
            f"{num_regions}"
        )

    return topology
