"""The merge rules that are compared, each with the strengths that are tried.

A strength is the rule's lambda, in its own meaning: the weight of a correction, the
mean of a mix, or the radius of a trust region. Where a correction's size grows with the
delay, so that a sensible strength falls as 1 / tau, the table says so.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cocodc_jax.run import flags
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

    def strengths_at(self, delay_steps: int) -> tuple[float, ...]:
        """Return the strengths to try at this delay."""
        divisor = max(1, delay_steps) if self.falls_with_delay else 1
        return tuple(strength / divisor for strength in self.strengths)


def _mix(alpha: float) -> Rule:
    return Rule(f"mix_{alpha:g}", lambda *_: merge.mix(alpha))


def _taylor(
    name: str,
    kind: curvature.Curvature,
    strengths: tuple[float, ...] = (),
    lambda_: float | None = None,
    **fields: Any,
) -> Rule:
    """Delay compensation; its strength is lambda, or the radius of a trust region."""

    def make(strength, delay_steps):
        del delay_steps
        if lambda_ is None:
            transform = delay_compensation(kind, strength)
        else:
            radius = strength if strengths else None
            transform = delay_compensation(kind, lambda_, max_ratio=radius)
        return merge.compensate(transform, kind.needs)

    return Rule(name, make, strengths, **fields)


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
    hessian = curvature.hessian_vector("adam")
    as_published = curvature.outer_product(sync_interval)
    in_gradient_units = curvature.outer_product(units="gradient")
    normalized = curvature.normalized_outer_product()
    return [
        # Alpha on local; 0.5 is Streaming DiLoCo.
        *map(_mix, (0.0, 0.25, 0.5, 0.75)),
        Rule(  # What it takes of the progress goes into the next message.
            "mix_feedback",
            lambda alpha, _: merge.remembering(merge.mix(alpha), alpha),
            (0.0, 0.25, 0.5, 0.75),
        ),
        # No curvature: all progress is kept.
        _taylor("replay", curvature.none(), lambda_=0.0),
        # The outer product in parameter units, with 1/H.
        _taylor("paper", as_published, lambda_=0.5),
        # c / tau times the identity.
        _taylor("isotropic", isotropic, (0.15, 0.3, 0.5, 0.75)),
        # g * g * D; then the same scaled to lambda_0 of g, and with a cap.
        _taylor("outer_product", in_gradient_units, (30.0, 300.0, 1e3, 3e3), **falling),
        _taylor("normalized_outer_product", normalized, (0.1, 0.2, 0.5, 1.0)),
        Rule("normalized_capped", _capped, (0.2, 0.5, 1.0, 2.0)),
        # lr * sqrt(nu) * D; then a weight per parameter by sqrt(nu), its mean tuned.
        _taylor(
            *("adam_second_moment", curvature.adam_second_moment()),
            (1e3, 2e3, 4e3, 8e3),
            **falling,
        ),
        Rule(
            "curvature_mix",
            lambda strength, _: merge.curvature_mix(strength),
            (0.15, 0.3, 0.5, 0.75),
        ),
        _taylor("trust_isotropic", isotropic, (0.1, 0.3, 1.0, 3.0), lambda_=0.75),
        _taylor(  # Isotropic; c is measured from the overlap's two halves.
            *("secant", secant(isotropic, max_weight=1.0), (0.25, 0.5, 1.0, 2.0)),
            least_delay=2,
        ),
        # Products through Adam's scale: exact ones, and a diagonal of one sample.
        _taylor("hessian_vector", hessian, **exact),
        _taylor("gauss_newton", curvature.gauss_newton("adam"), **exact),
        _taylor("hutchinson", curvature.hutchinson(units="adam"), **exact),
        _taylor("trust_hessian", hessian, (0.3, 1.0), lambda_=1.0),
    ]


def asked(
    usual: Sequence[str], sync_interval: int
) -> tuple[list[str], tuple[int, ...]]:
    """Return the rules of --rules, or the usual ones, and the distinct --delays."""
    names, known = flags.value("rules") or [*usual], table(sync_interval)
    for name in names:
        if name not in known:
            raise ValueError(f"rules={name!r} is unknown; use some of {sorted(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"rules={','.join(names)} names one twice")
    delays = flags.numbers("delays", flags.value("delays"), int)
    if not delays:
        raise ValueError("delays=() is empty; name at least one")
    for delay in delays:
        if not 1 <= delay <= sync_interval:
            raise ValueError(
                f"delays={delay} must be at least 1 and at most sync_interval="
                f"{sync_interval}"
            )
    return names, tuple(dict.fromkeys(delays))


def table(sync_interval: int) -> dict[str, Rule]:
    """All rules by name."""
    return {rule.name: rule for rule in _all(sync_interval)}
