"""The merge rules that `delay_cost` judges, each with the strengths that are tried.

A strength is the weight of a rule's correction. Where a correction's size grows with
the delay, so that a sensible strength falls as 1 / tau, the table says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from cocodc_jax.sync import merge
from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.secant import secant


@dataclasses.dataclass(frozen=True)
class Rule:
    """One merge rule."""

    name: str  # As on the command line and in the results.
    # Of a strength, which may be traced, and is None for a rule without one.
    make: Callable[[Any], merge.Merge]
    strengths: tuple[float, ...] = ()  # What is tried; empty for a rule without one.
    falls_with_delay: bool = False  # Strengths are divided by the delay.
    least_delay: int = 0  # Delay in steps below which the rule has no meaning.

    def strengths_at(self, delay_steps: int) -> tuple[float, ...]:
        """Return the strengths to try at this delay."""
        divisor = max(1, delay_steps) if self.falls_with_delay else 1
        return tuple(strength / divisor for strength in self.strengths)


def _mix(alpha: float) -> Rule:
    return Rule(f"mix_{alpha:g}", lambda _: merge.mix(alpha))


def _taylor(
    name: str,
    kind: curvature.Curvature,
    strengths: tuple[float, ...] = (),
    **fields: Any,
) -> Rule:
    """Delay compensation; its strength is lambda, 0.5 where none is tried."""

    def make(strength):
        lambda_ = strength if strengths else 0.5
        return merge.compensate(delay_compensation(kind, lambda_), kind.needs)

    return Rule(name, make, strengths, **fields)


def table(sync_interval: int) -> dict[str, Rule]:
    """Return all rules by name."""
    isotropic, falling = curvature.isotropic(), {"falls_with_delay": True}
    in_gradient_units = curvature.outer_product(units="gradient")
    normalized = curvature.normalized_outer_product()
    rules = [
        # Alpha on local; 0.5 is Streaming DiLoCo.
        *map(_mix, (0.0, 0.25, 0.5, 0.75)),
        # No curvature: all progress is kept.
        _taylor("replay", curvature.none()),
        # The outer product in parameter units, with 1/H.
        _taylor("paper", curvature.outer_product(sync_interval)),
        # c / tau times the identity.
        _taylor("isotropic", isotropic, (0.15, 0.3, 0.5, 0.75)),
        _taylor(  # Isotropic; c is measured from the overlap's two halves.
            *("secant", secant(isotropic, max_weight=1.0), (0.25, 0.5, 1.0, 2.0)),
            least_delay=2,
        ),
        # g * g * D; then the same scaled to lambda_0 of g.
        _taylor("outer_product", in_gradient_units, (30.0, 300.0, 1e3, 3e3), **falling),
        _taylor("normalized_outer_product", normalized, (0.1, 0.2, 0.5, 1.0)),
        # lr * sqrt(nu) * D.
        _taylor(
            *("adam_second_moment", curvature.adam_second_moment()),
            (1e3, 2e3, 4e3, 8e3),
            **falling,
        ),
        # An exact product through Adam's scale. A batch of one region is a noisy
        # Hessian: Taylor's own strength, 1, diverges at a delay of 4 and more.
        _taylor(
            "hessian_vector", curvature.hessian_vector("adam"), (0.4, 1.2), **falling
        ),
    ]
    return {rule.name: rule for rule in rules}
