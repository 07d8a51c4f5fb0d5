"""A method: how regions are kept together, as a value.

A method is a composition of parts and never a subclass. Regions exchange a message at
every step (`per_step`), or now and then fragments of their parameters (`sync`), or
nothing. A `Sync` is a schedule (when), a message (what is sent), an outer optimizer
(what is made of it) and a merge (what a region does with it). A part that does nothing
is left at its default. What does not go together is refused by the part that knows why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cocodc_jax.sync import needs
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.messages import AsIs, Message
from cocodc_jax.sync.moments import Moments
from cocodc_jax.sync.outer import Outer
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.sync.regions import Regions, Weigh
from cocodc_jax.sync.robust import Robust
from cocodc_jax.sync.schedules.base import Schedule
from cocodc_jax.transforms.compressor import Compressor, identity

WEIGHTS = ("equal", "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """An exchange of parameters, now and then.

    Attributes:
      schedule: when fragments start and are applied.
      outer: what is made of the mean pseudo-gradient (old minus new).
      merge: what a region does with an arriving fragment.
      message: what a region sends.
      weigh: weights of the regions in a mean; None weighs them alike.
      fragment_strategy: how units are dealt to fragments, see `fragments.cut`.
      moments: how often the inner optimizer's moments are averaged too; None leaves
        them to the regions.
      robust: whom a mean leaves out; None has every region count as it is.
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
        """Have the parts refuse one another."""
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
        """Why messages can cross in a compiled program only; None if they need not."""
        alone = "a region that comes alone is answered at once"
        return (
            self.outer.only_in_program
            or self.message.only_in_program
            or (alone if self.schedule.is_by_region else None)
        )

    @property
    def copies(self) -> frozenset[str]:
        """What is kept of a fragment in flight, see `sync.needs`."""
        return needs.copies(self.merge.needs | self.outer.needs)

    def bind(self, regions: Regions) -> Sync:
        """Return the sync for these regions, whose clocks its schedule may go by.

        Raises:
          ValueError: naming what does not fit.
        """
        looks_midway = needs.HALFWAY in self.copies
        schedule = self.schedule.bind(regions, looks_midway)
        message = self.message.bind(regions.num)
        return dataclasses.replace(self, schedule=schedule, message=message)


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a method expects of the inner optimizer.

    Attributes:
      optimizer: name of the inner optimizer that belongs to it.
      steps_by_sign: whether what the optimizer is given is a sign, whose length says
        nothing; its learning rate is then another one.
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
      inner: the inner optimizer that belongs to it.
      num_regions: how many regions it is for; None is any number.
      min_regions: how many it needs at least.
    """

    name: str
    sync: Sync | None = None
    per_step: PerStep | None = None
    inner: Inner = Inner()
    num_regions: int | None = None
    min_regions: int = 1

    @property
    def can_restore(self) -> bool:
        """Whether regions that send nonsense begin anew from the outer parameters."""
        return self.sync is not None and self.sync.robust is not None

    @property
    def num_fragments(self) -> int:
        """K; 1 for methods that never exchange parameters."""
        return self.sync.schedule.num_fragments if self.sync else 1

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of its syncs, if it has any."""
        return self.sync and self.sync.schedule

    @property
    def needs(self) -> frozenset[str]:
        """All that its parts need to know, see `sync.needs`."""
        if self.sync is None:
            return frozenset()
        parts = (self.sync.merge, self.sync.outer, self.sync.schedule)
        return frozenset().union(*(part.needs for part in parts))

    def compressed(self, compressor: Compressor) -> Method:
        """Return the same method with its messages compressed.

        Raises:
          ValueError: if it sends nothing, or what it sends is small already.
        """
        try:
            if self.num_regions == 1:
                raise ValueError("a region alone sends nothing")
            if self.sync:
                message = self.sync.message.compressed(compressor)
                return self.with_sync(message=message)
            if self.per_step:
                per_step = self.per_step.compressed(compressor)
                return dataclasses.replace(self, per_step=per_step)
            raise ValueError("nothing is sent")
        except ValueError as why:
            raise ValueError(
                f"compress={compressor.name!r} has no meaning for method="
                f"{self.name!r}: {why}; leave it out"
            ) from None

    def placed(self, outer_placement: str) -> Method:
        """Return the same method with its outer state elsewhere.

        Args:
          outer_placement: see `outer.SharedOuter`.

        Raises:
          ValueError: if it has no one outer model, or no such place is known.
        """
        if self.sync is None and outer_placement == "host":
            return self
        try:
            if self.sync is None:
                raise ValueError("it has no one outer model to divide")
            outer = self.sync.outer.placed(outer_placement)
        except ValueError as why:
            if "unknown" in str(why):
                raise
            raise ValueError(
                f"outer_placement={outer_placement!r} has no meaning for method="
                f"{self.name!r}: {why}; leave it out"
            ) from None
        return self.with_sync(outer=outer)

    def weighted(self, region_weights: str | None) -> Method:
        """Return the same method with regions weighted in a mean.

        Args:
          region_weights: "tokens" weighs a region by what it trained on since the sync
            before, "equal" weighs all alike, None leaves it to the method.

        Raises:
          ValueError: for another name, or a method that has no mean of parameters.
        """
        if region_weights is None:
            return self
        if region_weights not in WEIGHTS:
            raise ValueError(
                f"region_weights={region_weights!r} is unknown; use 'equal' or 'tokens'"
            )
        if self.sync is None or self.sync.schedule.is_by_region:
            raise ValueError(
                f"region_weights={region_weights!r} has no meaning for method="
                f"{self.name!r}, which takes no mean of pseudo-gradients; leave it out"
            )
        weigh = (lambda steps, tokens: tokens) if region_weights == "tokens" else None
        try:
            return self.with_sync(weigh=weigh)
        except ValueError as why:
            raise ValueError(
                f"region_weights={region_weights!r} has no meaning for method="
                f"{self.name!r}: {why}; leave it out"
            ) from None

    def guarded(self, exclude_above: float | None, robust_mean: str | None) -> Method:
        """Return the same method with nonsense left out of its means.

        Args:
          exclude_above: see `robust.Robust`; None leaves nobody out, but with a
            `robust_mean` those whose messages are not finite.
          robust_mean: "clip" or "trim:b", see `robust.Robust.of`; None is a weighted
            mean.

        Raises:
          ValueError: for other values, or a method that can have none of it.
        """
        if exclude_above is None and robust_mean is None:
            return self
        robust = Robust.of(exclude_above, robust_mean)
        try:
            if self.num_regions == 1:
                raise ValueError("a region alone has nobody to be judged by")
            if self.sync is None:
                raise ValueError("it has no outer parameters to restore a region from")
            message = self.sync.message
            if robust.mean == "trim" and message.compressor() is None:
                if message.only_weighted is None:  # Gathered, and not summed.
                    message = message.compressed(identity())
            return self.with_sync(robust=robust, message=message)
        except ValueError as why:
            raise ValueError(
                f"exclude_above={exclude_above}, robust_mean={robust_mean!r} have no "
                f"meaning for method={self.name!r}: {why}; leave them out"
            ) from None

    def bind(self, regions: Regions) -> Method:
        """Return the method for these regions, whose clocks its schedule may go by.

        Raises:
          ValueError: naming the flag, its value and what would be right.
        """
        if self.num_regions not in (None, regions.num):
            raise ValueError(
                f"regions={regions.num} must be {self.num_regions} for method="
                f"{self.name!r} and its arguments"
            )
        if regions.num < self.min_regions:
            raise ValueError(
                f"regions={regions.num} must be at least {self.min_regions} for method="
                f"{self.name!r} and its arguments"
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
