"""A method, a way to train in several regions, as a value.

A method is a composition of parts and never a subclass. Regions exchange a message at
every step (`per_step`), or fragments of their parameters from time to time (`sync`), or
nothing. A part refuses others that it cannot be combined with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args

from cocodc_jax.sync import needs
from cocodc_jax.sync.expert_mean import with_expert_mean
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.messages import AsIs, Compressed, Message
from cocodc_jax.sync.moments import Moments
from cocodc_jax.sync.outer import PLACEMENTS, Outer
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.sync.regions import Regions, Weigh
from cocodc_jax.sync.robust import Robust, without
from cocodc_jax.sync.schedules.base import Schedule
from cocodc_jax.transforms.compressor import Compressor, check_compressor, identity
from cocodc_jax.transforms.numerics import check_choice
from cocodc_jax.transforms.sparsify import SparseCompressor

Weights = Literal["equal", "tokens"]
WEIGHTS = get_args(Weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """An exchange of parameters from time to time.

    Attributes:
      schedule: when fragments start and are applied.
      outer: applies the mean pseudo-gradient (old minus new).
      merge: how a region applies an arriving fragment.
      message: what a region sends.
      weigh: weights of the regions in a mean; None is equal weights.
      fragment_strategy: how units are assigned to fragments, see `cutting.cut`.
      moments: how often the inner optimizer's moments are averaged too; None is never.
      robust: which regions a mean leaves out; None is a plain weighted mean.
    """

    schedule: Schedule
    outer: Outer
    merge: Merge
    message: Message = AsIs()
    weigh: Weigh | None = None
    fragment_strategy: str = "strided"
    moments: Moments | None = None
    robust: Robust | None = None

    def __post_init__(self):
        for name, kind, made_by in (
            ("schedule", Schedule, "schedules.staggered(...)"),
            ("outer", Outer, "nesterov(...), or SharedOuter(an Optax optimizer)"),
            ("merge", Merge, "merge.replace(), or merge.mix(0.5)"),
            ("message", Message, "AsIs(), or Compressed(a compressor)"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a part such as {made_by}"
                )

        self.outer.check(self)
        if self.merge.has_feedback and self.schedule.init().in_flight:
            raise ValueError(
                "merge.remembering(...) with a schedule that is one sync late would "
                "send the same progress twice; use one of them"
            )

        if self.moments:
            self.moments.check(self.schedule)
        if self.robust:
            self.robust.check(self)
            if self.moments:
                raise ValueError("it averages the inner optimizer's moments too")

        if ("effective_rank" in self.schedule.needs) != self.message.is_ranked:
            raise ValueError(
                f"{type(self.schedule).__name__} and {type(self.message).__name__} do "
                "not go together: ranked rounds and ranked messages need one another"
            )

    @property
    def only_in_program(self) -> str | None:
        """Why messages must cross inside a compiled program; None if they need not."""
        why = self.outer.only_in_program or self.message.only_in_program
        if why is None and self.schedule.is_by_region:
            why = "a region that comes alone is answered at once"
        return why

    @property
    def has_weights(self) -> bool:
        """Whether regions may have other weights in a mean than their share, or 0."""
        some = getattr(self.schedule, "participating", None) is not None
        return some or self.schedule.is_by_region or self.weigh is not None

    def counted(self, messages: Any, weights: Any) -> Any:
        """Replace messages `[M, ...]` of weight 0 by zeros, if there may be such."""
        return without(messages, weights) if self.has_weights else messages

    @property
    def copies(self) -> frozenset[str]:
        """Names of the copies kept of a fragment in flight, see `sync.needs`."""
        return needs.copies(self.merge.needs | self.outer.needs)

    def bind(self, regions: Regions) -> Sync:
        """Return the sync for these regions, whose speeds its schedule may use."""
        schedule = self.schedule.bind(regions, needs.HALFWAY in self.copies)
        return dataclasses.replace(self, schedule=schedule)


@dataclasses.dataclass(frozen=True)
class Inner:
    """A method's requirements of the inner optimizer.

    Attributes:
      optimizer: name of the method's inner optimizer.
      steps_by_sign: whether the optimizer receives a sign instead of a gradient, which
        needs another learning rate.
    """

    optimizer: str = "adamw"
    steps_by_sign: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train in several regions, as a value.

    Attributes:
      name: as in `methods.METHODS`.
      sync: how parameters are exchanged; None if they never are.
      per_step: what regions exchange at every step; None is nothing.
      inner: the method's inner optimizer.
      num_regions: required number of regions; None is any number.
      min_regions: minimum number of regions.
    """

    name: str
    sync: Sync | None = None
    per_step: PerStep | None = None
    inner: Inner = Inner()
    num_regions: int | None = None
    min_regions: int = 1

    def __post_init__(self):
        if self.sync is not None and self.per_step is not None:
            raise ValueError(
                f"method={self.name!r} has a sync and exchanges at every step too; "
                "leave sync or per_step out"
            )

    @property
    def can_restore(self) -> bool:
        """Whether regions with bad updates restart from the outer parameters."""
        return self.sync is not None and self.sync.robust is not None

    @property
    def num_fragments(self) -> int:
        """K; 1 for methods that never exchange parameters."""
        return self.sync.schedule.num_fragments if self.sync else 1

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of its syncs, if any."""
        return self.sync and self.sync.schedule

    @property
    def needs(self) -> frozenset[str]:
        """All needs of its parts, see `sync.needs`."""
        if self.sync is None:
            return frozenset()
        parts = (self.sync.merge, self.sync.outer, self.sync.schedule)
        return frozenset().union(*(part.needs for part in parts))

    def compressed(self, compressor: Compressor) -> Method:
        """Return the same method with its messages compressed."""
        check_compressor("compressor", compressor)
        with self._refusing(f"compress={compressor.name!r}"):
            if self.num_regions == 1:
                raise ValueError("a region alone sends nothing")
            if self.sync:
                return self.with_sync(message=self.sync.message.compressed(compressor))
            if self.per_step:
                per_step = self.per_step.compressed(compressor)
                return dataclasses.replace(self, per_step=per_step)
            raise ValueError("nothing is sent")

    def placed(self, outer_placement: str) -> Method:
        """Return the same method with its outer state placed as `SharedOuter` says."""
        if self.sync is None and outer_placement == "host":
            return self
        check_choice("outer_placement", outer_placement, PLACEMENTS)
        with self._refusing(f"outer_placement={outer_placement!r}"):
            if self.sync is None:
                raise ValueError("it has no one outer model to divide")
            return self.with_sync(outer=self.sync.outer.placed(outer_placement))

    def weighted(self, region_weights: str | None) -> Method:
        """Return the same method with other weights of the regions in a mean.

        "tokens" weights them by their tokens since the last sync, "equal" equally; None
        is the method's default.
        """
        if region_weights is None:
            return self
        check_choice("region_weights", region_weights, WEIGHTS)
        weigh = (lambda steps, tokens: tokens) if region_weights == "tokens" else None
        with self._refusing(f"region_weights={region_weights!r}"):
            if self.sync is None or self.sync.schedule.is_by_region:
                raise ValueError("it takes no mean of pseudo-gradients")
            return self.with_sync(weigh=weigh)

    def expert_weighted(self, expert_weights: str | None) -> Method:
        """Return the same method with other weights of a mixture's experts in a mean.

        "tokens" weights an expert by the tokens that it saw in a region since the last
        sync, see `sync.expert_mean`; "equal" and None as all other parameters.
        """
        check_choice("expert_weights", expert_weights or "equal", WEIGHTS)
        if expert_weights != "tokens":
            return self
        with self._refusing(f"expert_weights={expert_weights!r}"):
            if self.sync is None:
                raise ValueError("it takes no mean of parameters")
            return self.with_sync(message=with_expert_mean(self.sync.message))

    def guarded(self, exclude_above: float | None, robust_mean: str | None) -> Method:
        """Return the same method with bad updates left out of its means.

        For `exclude_above` see `robust.Robust`; None leaves out no region, or with a
        `robust_mean` those whose messages are not finite. For `robust_mean` see
        `robust.Robust.of`; None is a weighted mean.
        """
        if exclude_above is None and robust_mean is None:
            return self

        robust = Robust.of(exclude_above, robust_mean)
        arguments = f"exclude_above={exclude_above}, robust_mean={robust_mean!r}"
        with self._refusing(arguments, has="have", it="them"):
            if self.num_regions == 1:
                raise ValueError("a region alone has no others to be compared with")
            if self.sync is None:
                raise ValueError("it has no outer parameters to restore a region from")

            message = self.sync.message
            is_sparse = isinstance(message.compressor(), SparseCompressor)
            if robust.mean == "clip" and isinstance(message, Compressed) and is_sparse:
                message = dataclasses.replace(message, clip=True)  # By tensors.
                robust = dataclasses.replace(robust, mean="weighted")

            is_summed = message.compressor() is None and message.only_weighted is None
            if robust.mean == "trim" and is_summed:  # Gathered, not all-reduced.
                message = message.compressed(identity())
            return self.with_sync(robust=robust, message=message)

    def bind(self, regions: Regions) -> Method:
        """Return the method for these regions, whose speeds its schedule may use."""
        whose = f"for method={self.name!r} and its arguments"
        if self.num_regions not in (None, regions.num):
            raise ValueError(
                f"regions={regions.num} must be {self.num_regions} {whose}"
            )
        if regions.num < self.min_regions:
            raise ValueError(
                f"regions={regions.num} must be at least {self.min_regions} {whose}"
            )
        if self.per_step and not regions.are_even:
            raise ValueError(
                f"step_times={regions.step_times} must all be 1 for method="
                f"{self.name!r}, whose regions exchange at every step: all are as slow "
                "as the slowest"
            )
        if self.sync is None:
            return self

        needs.check_known(self.needs, f"method={self.name!r}")
        return dataclasses.replace(self, sync=self.sync.bind(regions))

    def with_sync(self, **parts: Any) -> Method:
        """Return the same method with parts of its sync replaced, by name."""
        assert self.sync is not None
        return dataclasses.replace(self, sync=dataclasses.replace(self.sync, **parts))

    @contextlib.contextmanager
    def _refusing(
        self, argument: str, has: str = "has", it: str = "it"
    ) -> Iterator[None]:
        """Say of a part's refusal which argument it is about."""
        try:
            yield
        except ValueError as why:
            raise ValueError(
                f"{argument} {has} no meaning for method={self.name!r}: {why}; leave "
                f"{it} out"
            ) from None
