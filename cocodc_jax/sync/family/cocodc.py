"""CoCoDC: delay compensation and adaptive transmission."""

from __future__ import annotations

import dataclasses
from typing import Any

from cocodc_jax.sync import merge, paced
from cocodc_jax.sync.family.nesterov import nesterov
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.curvature import Curvature, isotropic
from cocodc_jax.transforms.curvature import get as get_curvature
from cocodc_jax.transforms.secant import secant


def cocodc(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    syncs_per_interval: int | str | None = None,
    transmission_score: str = "pseudo_gradient",
    curvature: str | Curvature = "isotropic",
    curvature_units: str | None = None,
    compensation_strength: float = 0.3,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
) -> Method:
    """CoCoDC (arXiv 2504.17672): delay compensation and adaptive transmission.

    The published curvature is numerically nothing in its units (`cocodc_paper`). The
    default here is the isotropic one, theta^m <- theta^g - c (theta^g - staged) +
    progress with c = 0.3, which did best among the rules that need nothing else in the
    ablation of BUILD_NOTES.md.

    Args:
      sync_interval: H; every fragment starts at least once in so many steps.
      num_fragments: K.
      delay_steps: tau; "auto" is what syncs turn out to take, see `paced`.
      syncs_per_interval: N, syncs in one interval, at least K; None is 2 K, the
        paper's 8 for 4, "auto" as many as the network turns out to carry.
      transmission_score: what the adaptive choice ranks by, see `schedule.adaptive`.
      curvature: name or value of a Hessian-vector approximation, see
        `transforms.curvature`; or "secant", the isotropic one with a weight for each
        tensor from the two halves of the overlap (a strength of 0.5 to 1 did best).
      curvature_units: for a curvature given by name, its `units`; None is the paper's
        "parameter" for the diagonal forms and "adam" for products of the loss itself.
      compensation_strength: lambda, the weight of the correction.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is about H.
      network_share: gamma in (0, 1], the share of the network that N "auto" may use;
        None is 0.4.
    """
    chosen = _curvature(curvature, curvature_units, sync_interval)
    if syncs_per_interval is None:
        syncs_per_interval = min(2 * num_fragments, sync_interval)
    return Method(
        "cocodc",
        paced.adaptive(
            sync_interval,
            num_fragments,
            delay_steps,
            syncs_per_interval,
            transmission_score,
            max_delay_steps,
            network_share,
        ),
        merge.compensate(
            delay_compensation(chosen, compensation_strength), chosen.needs
        ),
        nesterov(outer_lr, outer_momentum),
        fragment_strategy,
    )


def cocodc_paper(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    syncs_per_interval: int | str | None = None,
    compensation_strength: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
) -> Method:
    """CoCoDC to the letter (arXiv 2504.17672): g * g * D / H, in parameter units.

    In these units the correction is numerically nothing (see `correction_ratio`), so
    it amounts to replaying the local progress on the outer fragment.

    Args:
      sync_interval: H.
      num_fragments: K.
      delay_steps: tau, or "auto".
      syncs_per_interval: N, or "auto"; None is 2 K.
      compensation_strength: lambda.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is about H.
      network_share: gamma in (0, 1], the share of the network that N "auto" may use;
        None is 0.4.
    """
    method = cocodc(
        sync_interval,
        num_fragments,
        delay_steps,
        syncs_per_interval,
        curvature="outer_product",
        compensation_strength=compensation_strength,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        fragment_strategy=fragment_strategy,
        max_delay_steps=max_delay_steps,
        network_share=network_share,
    )
    return dataclasses.replace(method, name="cocodc_paper")


def _curvature(
    curvature: str | Curvature, units: str | None, sync_interval: int
) -> Curvature:
    """A curvature whose product is in parameter units, as the merge wants it."""
    if not isinstance(curvature, str):
        if units is not None:
            raise ValueError(
                f"curvature_units={units!r} was given, but curvature="
                f"{curvature.name!r} is made already; choose its units there"
            )
        return curvature
    if curvature == "secant" and units is None:
        # More than the whole of D would go past the staged point.
        return secant(isotropic(), max_weight=1.0)
    options: dict[str, Any] = {}
    if curvature == "outer_product":
        options["sync_interval"] = sync_interval
    if curvature in ("hessian_vector", "gauss_newton", "hutchinson"):
        options["units"] = units or "adam"
    elif units is not None:
        options["units"] = units
    try:
        return get_curvature(curvature, **options)
    except TypeError:
        raise ValueError(
            f"curvature_units={units!r} was given, but curvature={curvature!r} has no "
            "choice of units; leave it out"
        ) from None
