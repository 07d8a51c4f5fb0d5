"""How a region applies a fragment that arrives: replace, mix or compensate.

theta^g is the new outer value, theta^m the local one at arrival, and `staged` the local
one when the sync started, tau steps before. Each rule is a pure function of one
region's fragment; programs map it over regions.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.sync.averages import SharedMask
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_between,
    check_transform,
    check_unit_interval,
    is_number,
)

PyTree = Any
Metrics = dict[str, jax.Array]


class MergeApplyFn(Protocol):
    """The `apply` of a `Merge`: one region's fragment, pure, mapped over regions."""

    def __call__(
        self,
        local: Fragment,
        staged: Fragment | None,
        outer: Fragment,
        /,
        *,
        delay_steps: int | jax.Array,
        **extra: Any,
    ) -> tuple[Fragment, Metrics]:
        """Return the fragment that the region continues from.

        Args:
          local: theta^m, the region's fragment at arrival, a flat dict from path to
            array in the parameters' dtypes; *regional*.
          staged: the region's fragment when the sync started, likewise; None unless
            the rule needs "staged".
          outer: theta^g, the new outer fragment, at least float32; *replicated* unless
            each region has outer parameters of its own.
          delay_steps: tau, inner steps since the sync started; a traced int32 scalar
            where a compiled program chooses it.
          **extra: what `Merge.needs` names, see `sync.needs`. A rule names the ones
            that it uses, and swallows the rest.

        Returns:
          The merged fragment in the shapes and dtypes of `local`, and float32 scalars
          by name. A run records their mean over the regions: `correction_ratio` under
          this name, any other NAME as `merge_NAME`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Merge:
    """A merge rule and its needs.

    Attributes:
      name: for records and error messages.
      apply: merges one region's fragment; see `MergeApplyFn`.
      needs: names of the extra arguments, see `sync.needs`.
      feedback_weight: the fraction of a region's progress during the delay that is fed
        back into its next message, see `remembering`; 0 is none.
      reports_correction: whether its scalars have `correction_ratio`, the length of a
        correction relative to the progress.
    """

    name: str
    apply: MergeApplyFn
    needs: frozenset[str] = frozenset()
    feedback_weight: float | jax.Array = 0.0
    reports_correction: bool = False

    @property
    def has_feedback(self) -> bool:
        """Whether progress is fed back; True for a traced weight."""
        weight = self.feedback_weight
        return not is_number(weight) or weight != 0


def replace() -> Merge:
    """Take the outer fragment: theta^m <- theta^g (DiLoCo, arXiv 2311.08105)."""

    def apply(
        local: Fragment, staged: Fragment | None, outer: Fragment, **extra: Any
    ) -> tuple[Fragment, Metrics]:
        return cast_like(outer, local), {}

    return Merge("replace", apply)


def keep() -> Merge:
    """Keep the local fragment: the outer model corrects later inner steps (ADMM)."""

    def apply(
        local: Fragment, staged: Fragment | None, outer: Fragment, **extra: Any
    ) -> tuple[Fragment, Metrics]:
        return local, {}

    return Merge("keep", apply)


def mix(alpha: float | jax.Array) -> Merge:
    """Mix: theta^m <- alpha theta^m + (1 - alpha) theta^g.

    The merge of Streaming DiLoCo (arXiv 2501.18512, section 2.3).

    Args:
      alpha: weight on *local*, in [0, 1]: 1 never synchronizes, 0 drops what was
        learned during the overlap. Arrays are not checked.
    """
    check_between("mixing_alpha", alpha, 0, 1)

    def apply(
        local: Fragment, staged: Fragment | None, outer: Fragment, **extra: Any
    ) -> tuple[Fragment, Metrics]:
        wide = cast_like(local, outer)  # So that a merge rounds once.
        mixed = jax.tree.map(lambda x, o: alpha * x + (1 - alpha) * o, wide, outer)
        return cast_like(mixed, local), {}

    return Merge(f"mix({alpha})", apply)


def compensate(
    transform: optax.GradientTransformation, needs: frozenset[str] = frozenset()
) -> Merge:
    """Compensate for the delay: theta^m <- theta^g - tau g~.

        g = (staged - theta^m) / tau ;  g~ = g + Hessian(theta^g - staged)

    The merge of CoCoDC (arXiv 2504.17672, section 3.1). g is old minus new, as a
    gradient, so the Hessian term is added and g~ is subtracted.

    Args:
      transform: maps g (old minus new, parameter units per step) to g~; usually
        `transforms.delay_compensation(...)`, alone or in an `optax.chain`. Its `update`
        receives `params=theta^g` and `stale_params=staged`. If its state holds exactly
        one `correction_ratio`, that becomes a metric. It is initialized at every merge,
        so a schedule in it stays at its first value.
      needs: the extra arguments that `transform` takes, see `sync.needs`.
    """
    check_transform("transform", transform, "delay_compensation(NAME)")
    transform = with_named_extras(transform)

    def apply(
        local: Fragment,
        staged: Fragment | None,
        outer: Fragment,
        *,
        delay_steps: int | jax.Array,
        **extra: Any,
    ) -> tuple[Fragment, Metrics]:
        if isinstance(delay_steps, int) and delay_steps == 0:  # No local progress.
            return cast_like(outer, local), {}

        # The region's progress per step, old minus new as a gradient.
        g = jax.tree.map(
            lambda s, x: (s - x) / delay_steps,
            cast_like(staged, outer),
            cast_like(local, outer),
        )
        extra_args = {"stale_params": staged, "delay_steps": delay_steps} | extra
        state = transform.init(outer)
        compensated, state = transform.update(g, state, outer, **extra_args)
        merged = jax.tree.map(lambda o, u: o - delay_steps * u, outer, compensated)
        merged = cast_like(merged, local)

        ratios = optax.tree_utils.tree_get_all_with_path(state, "correction_ratio")
        if len(ratios) != 1:
            return merged, {}
        return merged, {"correction_ratio": jnp.asarray(ratios[0][1], jnp.float32)}

    needs = (needs - {"stale_params", "delay_steps"}) | {"staged"}  # Always passed.
    return Merge("compensate", apply, needs, reports_correction=True)


def replay() -> Merge:
    """Replay the region's own progress: theta^m <- theta^g + (theta^m - staged).

    The merge of LOSCAR-SGD (arXiv 2605.20866), and `compensate` without a curvature.
    """
    rule = compensate(optax.identity())
    return dataclasses.replace(rule, name="replay", reports_correction=False)


def remembering(rule: Merge, kept: float | jax.Array) -> Merge:
    """Feed the progress that a merge drops back into the region's next message.

    Error feedback of the merge, see `core.sync.remember`. The rule keeps a fixed share
    of the progress during the delay, `kept` in [0, 1): alpha of the mix.
    """
    if is_number(kept) and kept >= 1:
        raise ValueError(
            "merge_feedback=True has no effect where regions keep all of their "
            "progress; leave it out, or lower mixing_alpha or progress_weight"
        )
    check_unit_interval("kept", kept)  # Arrays are not checked.
    needs = rule.needs | {"staged"}
    return dataclasses.replace(rule, needs=needs, feedback_weight=1 - kept)


def where_drawn(rule: Merge, mask: SharedMask) -> Merge:
    """Merge the entries that `mask` drew by `rule`; leave the others unchanged."""

    def apply(
        local: Fragment,
        staged: Fragment | None,
        outer: Fragment,
        *,
        sync_key: jax.Array,
        **extra: Any,
    ) -> tuple[Fragment, Metrics]:
        merged, metrics = rule.apply(local, staged, outer, **extra)
        drawn = mask.mask(local, sync_key)
        return jax.tree.map(jnp.where, drawn, merged, local), metrics

    name = f"{rule.name} where drawn"
    needs = rule.needs | {"sync_key"}
    return dataclasses.replace(rule, name=name, apply=apply, needs=needs)
