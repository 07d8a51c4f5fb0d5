"""Refuse flags that would have no effect in a run.

Presets and grids may set such flags, because they serve several kinds of runs. `RULES`
has the rules. Which flags a method or an inner optimizer takes is checked with its
configuration (`method_config.check_taken`, `optimizer_config.check_taken`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cocodc_jax.run.config import optimizer_config
from cocodc_jax.run.config.train_config import TrainConfig


class Rule(NamedTuple):
    """When flags have an effect."""

    names: tuple[str, ...]
    has_effect: Callable[[TrainConfig], bool]
    repair: str  # What the error says after "has no effect".


def _compensates(config: TrainConfig) -> bool:
    return config.method.values.get("curvature") != "none"


RULES = (
    Rule(
        (
            "balance_loss",
            "router_z_loss",
            "experts_per_token",
            "expert_dispatch",
            "moe_every",
        ),
        lambda config: config.model.num_experts > 0,
        "for a model without experts; leave it out, or add --num_experts=8",
    ),
    Rule(
        ("lora_alpha", "lora_targets"),
        lambda config: config.model.lora_rank > 0,
        "without adapters; leave it out, or add --lora_rank=8",
    ),
    Rule(
        ("compensation_strength", "curvature_units"),
        _compensates,
        "with --curvature=none, which compensates nothing; leave out one of them",
    ),
    Rule(
        ("random_routing",),
        lambda config: config.run.stages > 1,
        "with one stage, which passes activations to no other; leave it out, or add "
        "--stages=2",
    ),
)
# Rules for numbers of processes, which they receive in place of a configuration.
OF_PROCESSES = ("heartbeat_timeout_s", "start_timeout_s")


def check(arguments: Mapping[str, Any], configs: Sequence[TrainConfig]) -> None:
    """Raise ValueError for a flag that has an effect in none of the runs.

    Args:
      arguments: values of the flags on the command line.
      configs: of the runs.

    Raises:
      ValueError: naming the flag, its value and what would be right.
    """
    for rule in RULES:
        names = [name for name in rule.names if name in arguments]
        if names and not any(rule.has_effect(config) for config in configs):
            raise ValueError(_refusal(names[0], arguments[names[0]], rule.repair))

    methods = [config.method.build() for config in configs]
    optimizers = [
        config.optimizer.name(method)
        for config, method in zip(configs, methods, strict=True)
    ]
    steps_by_sign = any(method.inner.steps_by_sign for method in methods)
    optimizer_config.check_taken(arguments, optimizers, steps_by_sign)


def check_processes(
    arguments: Mapping[str, Any], configs: Iterable[TrainConfig], num_processes: int
) -> None:
    """Refuse a flag that has no effect with so many processes; see `check`."""
    if num_processes != 1:  # 0 asks the cluster.
        return
    for name in OF_PROCESSES:
        if name in arguments:
            repair = "with one process, which waits for no other; leave it out"
            raise ValueError(_refusal(name, arguments[name], repair))

    is_any_outer = any(config.run.exchange == "outer" for config in configs)
    if "all_reduce" in arguments and not is_any_outer:
        repair = (
            "where messages cross in the program; leave it out, or add --exchange=outer"
        )
        raise ValueError(_refusal("all_reduce", arguments["all_reduce"], repair))


def _refusal(name: str, value: Any, repair: str) -> str:
    return f"{name}={value} has no effect {repair}"
