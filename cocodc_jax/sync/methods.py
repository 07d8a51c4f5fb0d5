"""The table of methods: each a composition of a schedule, an outer optimizer, a merge.

=================  ==============  ======================  =====================
method             schedule        outer optimizer         merge
=================  ==============  ======================  =====================
data_parallel      never           none                    none (mean gradients)
diloco             whole, H        Nesterov 0.7, 0.9       replace
streaming_diloco   staggered K, H  Nesterov 0.4, 0.9       mix(0.5)
cocodc             adaptive N      Nesterov 0.4, 0.9       compensate(isotropic)
cocodc_paper       adaptive N      Nesterov 0.4, 0.9       compensate(g * g * D / H)
=================  ==============  ======================  =====================

The limits tie them together: `streaming_diloco` with one fragment, no delay and
alpha 0 is `diloco`; `diloco` with H = 1, outer learning rate 1, no momentum and an
inner SGD is `data_parallel`; `cocodc` with `syncs_per_interval` = K and alpha mixing
in place of compensation is `streaming_diloco` up to the order of the fragments.

A new method is a function here that returns a `Method`, and a line in `METHODS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import optax

from cocodc_jax.sync import merge, schedule
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.curvature import Curvature
from cocodc_jax.transforms.curvature import get as get_curvature


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train in several regions, as a value.

    Attributes:
      name: as in `METHODS`.
      schedule: when fragments start and are applied; None if nothing but gradients
        is ever exchanged.
      merge: what a region does with an arriving fragment.
      outer_optimizer: takes the mean pseudo-gradient (old minus new) as its gradient,
        one independent state a fragment.
      fragment_strategy: how units are dealt to fragments, see `fragments.cut`.
      reduce_gradients: average gradients over the regions at every step.
    """

    name: str
    schedule: schedule.Schedule | None
    merge: merge.Merge
    outer_optimizer: optax.GradientTransformation
    fragment_strategy: str = "strided"
    reduce_gradients: bool = False

    @property
    def num_fragments(self) -> int:
        """K; 1 for methods that never exchange parameters."""
        return self.schedule.num_fragments if self.schedule else 1


def data_parallel() -> Method:
    """Gradients averaged over all regions at every step: the reference.

    M regions make one step on M times the batch; there is no outer optimizer.
    """
    return Method(
        "data_parallel", None, merge.replace(), optax.identity(), reduce_gradients=True
    )


def diloco(
    sync_interval: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9
) -> Method:
    """DiLoCo (arXiv 2311.08105, algorithm 1): the whole model, blocking, every H steps.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    return Method(
        "diloco",
        schedule.staggered(sync_interval),
        merge.replace(),
        _nesterov(outer_lr, outer_momentum),
    )


def streaming_diloco(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int = 1,
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
) -> Method:
    """Streaming DiLoCo (arXiv 2501.18512, algorithm 2): fragments, overlap, mixing.

    Args:
      sync_interval: H, a multiple of `num_fragments`.
      num_fragments: K.
      delay_steps: tau, inner steps between a sync's start and its application.
      mixing_alpha: weight on the local fragment, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
    """
    return Method(
        "streaming_diloco",
        schedule.staggered(sync_interval, num_fragments, delay_steps),
        merge.mix(mixing_alpha),
        _nesterov(outer_lr, outer_momentum),
        fragment_strategy,
    )


def cocodc(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int = 5,
    syncs_per_interval: int | None = None,
    transmission_score: str = "pseudo_gradient",
    curvature: str | Curvature = "isotropic",
    curvature_units: str | None = None,
    compensation_strength: float = 0.3,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
) -> Method:
    """CoCoDC (arXiv 2504.17672): delay compensation and adaptive transmission.

    The published curvature is numerically nothing in its units (`cocodc_paper`). The
    default here is the isotropic one, theta^m <- theta^g - c (theta^g - staged) +
    progress with c = 0.3, which did best among the rules that need nothing else in the
    ablation of BUILD_NOTES.md.

    Args:
      sync_interval: H; every fragment starts at least once in so many steps.
      num_fragments: K.
      delay_steps: tau.
      syncs_per_interval: N, syncs in one interval, at least K; None is 2 K, the
        paper's 8 for 4. `schedule.syncs_that_fit` gives the N a network allows.
      transmission_score: what the adaptive choice ranks by, see `schedule.adaptive`.
      curvature: name or value of a Hessian-vector approximation, see
        `transforms.curvature`.
      curvature_units: for a curvature given by name, its `units`; None is the paper's
        "parameter" for the diagonal forms and "adam" for products of the loss itself.
      compensation_strength: lambda, the weight of the correction.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
    """
    chosen = _curvature(curvature, curvature_units, sync_interval)
    if syncs_per_interval is None:
        syncs_per_interval = min(2 * num_fragments, sync_interval)
    return Method(
        "cocodc",
        schedule.adaptive(
            sync_interval,
            num_fragments,
            delay_steps,
            syncs_per_interval,
            transmission_score,
        ),
        merge.compensate(
            delay_compensation(chosen, compensation_strength), chosen.needs
        ),
        _nesterov(outer_lr, outer_momentum),
        fragment_strategy,
    )


def cocodc_paper(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int = 5,
    syncs_per_interval: int | None = None,
    compensation_strength: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
) -> Method:
    """CoCoDC to the letter (arXiv 2504.17672): g * g * D / H, in parameter units.

    In these units the correction is numerically nothing (see `correction_ratio`), so
    it amounts to replaying the local progress on the outer fragment.

    Args:
      sync_interval: H.
      num_fragments: K.
      delay_steps: tau.
      syncs_per_interval: N; None is 2 K.
      compensation_strength: lambda.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
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
    )
    return dataclasses.replace(method, name="cocodc_paper")


METHODS: dict[str, Callable[..., Method]] = {
    "data_parallel": data_parallel,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "cocodc": cocodc,
    "cocodc_paper": cocodc_paper,
}


def get(name: str, **overrides: Any) -> Method:
    """Builds a method by name.

    Args:
      name: a key of `METHODS`.
      **overrides: arguments of that method's function.

    Raises:
      ValueError: for an unknown name, or an argument that this method does not take.

    >>> get("streaming_diloco", sync_interval=20, delay_steps=2).num_fragments
    4
    """
    accepted = defaults(name)
    for key in overrides:
        if key not in accepted:
            raise ValueError(
                f"method={name!r} has no argument {key!r}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )
    return METHODS[name](**overrides)


def defaults(name: str) -> dict[str, Any]:
    """The arguments that method `name` takes, with their defaults.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown; use one of {sorted(METHODS)}")
    parameters = inspect.signature(METHODS[name]).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


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


def _nesterov(outer_lr: float, outer_momentum: float) -> optax.GradientTransformation:
    if outer_lr <= 0:
        raise ValueError(f"outer_lr={outer_lr} must be positive")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum={outer_momentum} must be in [0, 1)")
    return optax.sgd(outer_lr, outer_momentum or None, nesterov=outer_momentum > 0)
