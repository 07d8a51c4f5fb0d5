"""Flags of `experiments.chaos`, and their checks."""

import math
from typing import Any

from absl import flags as absl_flags

from . import scenarios

# Flags that have a meaning only with or only without --scenario.
_OF_KILLS = (
    "kills",
    "gap_s",
    "restart_s",
    "tolerance",
    "unbroken",
    "only_members",
)
_OF_SCENARIOS = ("at_s", "fault_s")


def define_flags() -> absl_flags.FlagValues:
    """Return this program's flags, apart from those of the training."""
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("regions", 4, "regions that train"),
        ("kills", 8, "how many times to kill a region"),
        ("seed", 0, "seed of the choice of regions and moments"),
    ):
        absl_flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, default, text in (
        ("gap_s", 8.0, "seconds between two kills, on average"),
        ("restart_s", 1.0, "seconds after which a killed region is restarted"),
        ("tolerance", 0.1, "largest difference from the unbroken run's loss, in nats"),
    ):
        absl_flags.DEFINE_float(name, default, text, flag_values=values)
    absl_flags.DEFINE_enum(
        "scenario",
        None,
        scenarios.SCENARIOS,
        "a fault of the network in place of kills",
        flag_values=values,
    )
    for name, default, text in (
        (
            "at_s",
            20.0,
            "with --scenario: seconds from the first merge that all regions have to "
            "the fault",
        ),
        ("fault_s", 60.0, "with --scenario: seconds that the fault lasts"),
    ):
        absl_flags.DEFINE_float(name, default, text, flag_values=values)
    absl_flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    absl_flags.DEFINE_bool(
        "unbroken", True, "also train a run without kills", flag_values=values
    )
    absl_flags.DEFINE_bool(
        "only_members",
        True,
        "wait with a kill until all regions take part",
        flag_values=values,
    )
    absl_flags.DEFINE_bool("help", False, "print this and exit", flag_values=values)
    return values


def check_own(own: Any) -> None:
    """Refuse numbers out of range, and flags that would have no effect."""
    for name in ("gap_s", "restart_s", "tolerance", "at_s", "fault_s"):
        if not 0 <= own[name].value < math.inf:
            raise ValueError(
                f"--{name}={own[name].value} must be 0 or more, and finite"
            )
    others = _OF_KILLS if own.scenario else _OF_SCENARIOS
    for name in others:
        if own[name].present:
            why = "with" if own.scenario else "without"
            raise ValueError(
                f"--{name}={str(own[name].value).lower()} has no meaning {why} "
                "--scenario; leave it out"
            )


def check_kills(kills: int, regions: int) -> None:
    """Refuse kills that would leave no region with the run in memory."""
    if kills < 0:
        raise ValueError(f"--kills={kills} must be 0 or more")
    if kills and regions < 2:
        raise ValueError(
            f"regions={regions} leaves no region when one is killed; use 2 or more, or "
            "--kills=0"
        )
