"""The merge rules that are compared, each with the strengths that are tried.

A strength is the rule's lambda, in its own meaning: the weight of a correction, the
mean of a mix, or the radius of a trust region. Where a correction's size grows with the
delay, so that a sensible strength falls as 1 / tau, the table says so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cocodc_jax.sync import merge
from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.secant import secant

INNER_LR = 3e-3
"""Peak inner learning rate of the ablation, which sets the units of the capped rule."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One merge rule of the ablation."""

    name: str  # As on the command line and in the results.
    # `make(strength, delay_steps) -> Merge`; strength may be traced, and is None for a
    # rule without one.
    make: Callable[[Any, int], merge.Merge]
    strengths: tuple[float, ...] = ()  # What is tried; empty for a rule without one.
    falls_with_delay: bool = False  # Strengths are divided by the delay.
    least_delay: int = 0  # Delay in steps below which the rule has no meaning.
    note: str = ""  # What the rule is, in a few words.

    def strengths_at(self, delay_steps: int) -> tuple[float, ...]:
        """Return the strengths to try at this delay."""
        divisor = max(1, delay_steps) if self.falls_with_delay else 1
        return tuple(strength / divisor for strength in self.strengths)


def _mix(alpha: float) -> Rule:
    note = f"alpha mix, {alpha:g} on local" + " (Streaming DiLoCo)" * (alpha == 0.5)
    return Rule(f"mix_{alpha:g}", lambda *_: merge.mix(alpha), note=note)


def _taylor(
    name: str,
    kind: curvature.Curvature,
    note: str,
    strengths: tuple[float, ...] = (),
    lambda_: float | None = None,
    **fields: Any,
) -> Rule:
    """Delay compensation with `kind`.

    The strength is lambda; where `lambda_` is given, it is the radius of a trust
    region.
    """

    def make(strength, delay_steps):
        del delay_steps
        if lambda_ is None:
            transform = delay_compensation(kind, strength)
        else:
            radius = strength if strengths else None
            transform = delay_compensation(kind, lambda_, max_ratio=radius)
        return merge.compensate(transform, kind.needs)

    return Rule(name, make, strengths, note=note, **fields)


def _capped(strength, delay_steps):
    # At the cap the weight on D is strength * (u / inner_lr)**2, of order one.
    cap = 1 / (max(1, delay_steps) * INNER_LR**2)
    kind = curvature.normalized_outer_product(max_weight=cap)
    return merge.compensate(delay_compensation(kind, strength), kind.needs)


def _all(sync_interval: int) -> list[Rule]:
    # A batch of one region is a noisy Hessian: Taylor's own strength, 1, diverges at a
    # delay of 4 and more, so the grid falls with the delay. Fewer values than others:
    # these products cost the most.
    exact: dict[str, Any] = {"strengths": (0.4, 1.2), "falls_with_delay": True}
    isotropic, falling = curvature.isotropic(), {"falls_with_delay": True}
    return [
        *map(_mix, (0.0, 0.25, 0.5, 0.75)),
        Rule(
            "mix_feedback",
            lambda alpha, _: merge.remembering(merge.mix(alpha), alpha),
            (0.0, 0.25, 0.5, 0.75),
            note="alpha mix; what it takes of the progress goes into the next message",
        ),
        _taylor(
            *("replay", curvature.none(), "no curvature: keep all progress"),
            lambda_=0.0,
        ),
        _taylor(
            *("paper", curvature.outer_product(sync_interval)),
            "outer product, parameter units, 1/H, lambda 0.5: as published",
            lambda_=0.5,
        ),
        _taylor(
            *("isotropic", isotropic, "c / tau times identity"),
            (0.15, 0.3, 0.5, 0.75),
        ),
        _taylor(
            *("outer_product", curvature.outer_product(units="gradient")),
            "g * g * D in gradient units",
            (30.0, 300.0, 1000.0, 3000.0),
            **falling,
        ),
        _taylor(
            *("normalized_outer_product", curvature.normalized_outer_product()),
            "g * g * D scaled to lambda_0 of g",
            (0.1, 0.2, 0.5, 1.0),
        ),
        Rule(
            *("normalized_capped", _capped, (0.2, 0.5, 1.0, 2.0)),
            note="the same with a cap on the weight",
        ),
        _taylor(
            *("adam_second_moment", curvature.adam_second_moment()),
            "lr * sqrt(nu) * D",
            (1e3, 2e3, 4e3, 8e3),
            **falling,
        ),
        Rule(
            "curvature_mix",
            lambda strength, _: merge.curvature_mix(strength),
            (0.15, 0.3, 0.5, 0.75),
            note="weight per parameter by sqrt(nu), its mean tuned",
        ),
        _taylor(
            *("trust_isotropic", isotropic, "isotropic 0.75, clipped"),
            (0.1, 0.3, 1.0, 3.0),
            lambda_=0.75,
        ),
        _taylor(
            *("secant", secant(isotropic, max_weight=1.0)),
            "isotropic, c measured from the overlap's two halves",
            (0.25, 0.5, 1.0, 2.0),
            least_delay=2,
        ),
        _taylor(
            *("hessian_vector", curvature.hessian_vector("adam")),
            "exact product through Adam's scale",
            **exact,
        ),
        _taylor(
            *("gauss_newton", curvature.gauss_newton("adam")),
            "exact Gauss-Newton product through Adam's scale",
            **exact,
        ),
        _taylor(
            *("hutchinson", curvature.hutchinson(units="adam")),
            "one-sample diagonal through Adam's scale",
            **exact,
        ),
        _taylor(
            *("trust_hessian", curvature.hessian_vector("adam")),
            "exact product, lambda 1, clipped",
            (0.3, 1.0),
            lambda_=1.0,
        ),
    ]


def check_names(names: Sequence[str], sync_interval: int) -> None:
    """Refuse a rule that is unknown, or named twice."""
    known = table(sync_interval)
    for name in names:
        if name not in known:
            raise ValueError(f"rules={name!r} is unknown; use some of {sorted(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"rules={','.join(names)} names one twice")


def check_delays(delays: Sequence[int], sync_interval: int) -> None:
    """Refuse a delay that does not fit between two syncs, and none at all."""
    if not delays:
        raise ValueError("delays=() is empty; name at least one")
    for delay in delays:
        if not 1 <= delay <= sync_interval:
            raise ValueError(
                f"delays={delay} must be at least 1 and at most sync_interval="
                f"{sync_interval}"
            )


def table(sync_interval: int) -> dict[str, Rule]:
    """All rules by name."""
    return {rule.name: rule for rule in _all(sync_interval)}
