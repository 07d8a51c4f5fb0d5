"""A method: how regions are kept together, as a value.

A method is a composition of parts and never a subclass: a schedule (when), a
compressor (what is sent), an outer optimizer (what is made of it), a merge (what a
region does with it). A part that does nothing is left at its default.
"""

from __future__ import annotations

import dataclasses

import optax

from cocodc_jax.sync.every_step import (
    StepExchange,
    compressed_gradients,
    mean_gradients,
)
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.sync.regions import Regions, Weigh
from cocodc_jax.sync.rings import Rings
from cocodc_jax.sync.rounds import RankedCompressors, RankedRounds
from cocodc_jax.sync.schedule import Schedule
from cocodc_jax.transforms.compressor import Compressor

PLACEMENTS = ("host", "divided")
EXCHANGES = ("auto", "program", "outer")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train in several regions, as a value.

    Attributes:
      name: as in `METHODS`.
      schedule: when fragments start and are applied; None if no parameters are ever
        exchanged.
      merge: what a region does with an arriving fragment.
      outer_optimizer: takes the mean pseudo-gradient (old minus new) as its gradient,
        one independent state a fragment; or a `RegionalOuter`, where every region has
        outer parameters of its own.
      fragment_strategy: how units are dealt to fragments, see `fragments.cut`.
      compressor: of what a region sends; None sends it as it is.
      ranked_compressors: for a schedule that sets the rank of every message;
        `compressor` is the one of its first rank.
      rings: by which pseudo-gradients are summed; None leaves it to the compiler's
        all-reduce.
      step_exchange: what regions exchange at every step; None is nothing.
      weigh: weights of the regions in a mean; None weighs them alike.
      is_asynchronous: whether a region sends and takes alone, whenever the schedule's
        event names it, and measures its pseudo-gradient from what it last took.
      needs_reference: whether the outer optimizer is given `stale_params`, the outer
        fragment that a pseudo-gradient was measured from.
      outer_placement: "host" keeps the outer state on a host device, "divided" divides
        it over the devices of each region, as ZeRO does.
      inner_optimizer: name of the inner optimizer that belongs to it.
      num_regions: how many regions it is for; None is any number.
      why_uncompressed: why its messages cannot be compressed further, if so.
    """

    name: str
    schedule: Schedule | None
    merge: Merge
    outer_optimizer: optax.GradientTransformation | RegionalOuter
    fragment_strategy: str = "strided"
    compressor: Compressor | None = None
    ranked_compressors: RankedCompressors | None = None
    rings: Rings | None = None
    step_exchange: StepExchange | None = None
    weigh: Weigh | None = None
    is_asynchronous: bool = False
    needs_reference: bool = False
    outer_placement: str = "host"
    inner_optimizer: str = "adamw"
    num_regions: int | None = None
    why_uncompressed: str | None = None

    def __post_init__(self):
        """Refuses parts that do not go together.

        Raises:
          ValueError: naming the part and what would be right.
        """
        is_regional = isinstance(self.outer_optimizer, RegionalOuter)
        if self.outer_placement not in PLACEMENTS:
            raise ValueError(
                f"outer_placement={self.outer_placement!r} is unknown; use one of "
                f"{PLACEMENTS}"
            )
        if self.outer_placement == "divided" and (is_regional or not self.schedule):
            raise ValueError(
                f"outer_placement='divided' has no meaning for method={self.name!r}, "
                "which has no one outer model to divide; leave it out"
            )
        if is_regional and (self.is_asynchronous or self.needs_reference or self.weigh):
            raise ValueError(
                f"method={self.name!r} has outer parameters in every region: it can "
                "neither weigh regions nor take them in alone"
            )
        if isinstance(self.schedule, RankedRounds) != bool(self.ranked_compressors):
            raise ValueError(
                f"method={self.name!r} must have both a schedule of ranked rounds and "
                "ranked_compressors, or neither"
            )
        if self.rings and (self.compressor or is_regional or not self.schedule):
            raise ValueError(
                f"rings={self.rings.num} has no meaning for method={self.name!r}: they "
                "sum pseudo-gradients on their way, uncompressed, for one outer model"
            )
        if self.is_asynchronous and self.schedule and self.schedule.delay_steps:
            raise ValueError(
                f"delay_steps={self.schedule.delay_steps} must be 0 for method="
                f"{self.name!r}: a region that comes alone is answered at once"
            )

    @property
    def num_fragments(self) -> int:
        """K; 1 for methods that never exchange parameters."""
        return self.schedule.num_fragments if self.schedule else 1

    def compressor_at(self, rank: int) -> Compressor | None:
        """The compressor of messages of `rank`; 0 is the first that there is."""
        if self.ranked_compressors is None or not rank:
            return self.compressor
        return self.ranked_compressors.of(rank)

    def compressed(self, compressor: Compressor) -> Method:
        """The same method with its messages compressed.

        Raises:
          ValueError: if it sends nothing, or what it sends is small already.
        """
        if self.why_uncompressed:
            raise ValueError(
                f"compress={compressor.name!r} has no meaning for method="
                f"{self.name!r}: {self.why_uncompressed}; leave it out"
            )
        exchange = self.step_exchange
        if exchange and exchange.name == mean_gradients().name:
            exchange = compressed_gradients()
        return dataclasses.replace(self, compressor=compressor, step_exchange=exchange)

    def crosses_outside(self, exchange: str, num_processes: int) -> bool:
        """Whether messages cross on the outer mesh, beside the inner steps.

        Args:
          exchange: "program", "outer" or "auto".
          num_processes: that the regions live in.

        Raises:
          ValueError: for another name, or "outer" for a method that cannot have it.
        """
        if exchange not in EXCHANGES:
            raise ValueError(
                f"exchange={exchange!r} is unknown; use one of {EXCHANGES}"
            )
        why = None
        if isinstance(self.outer_optimizer, RegionalOuter):
            why = "its outer parameters lie in the regions"
        elif self.rings:
            why = "its rings lie on the inner mesh"
        elif self.outer_placement == "divided":
            why = "its outer state is divided over the inner mesh"
        elif self.is_asynchronous:
            why = "a region that comes alone is answered at once"
        measures = self.schedule is not None and self.schedule.measures
        if measures and (why or exchange == "program"):
            raise ValueError(
                f"exchange={exchange!r} is not possible for method={self.name!r} with "
                "delay_steps='auto' or syncs_per_interval='auto': what regions measure "
                f"goes with messages on the outer mesh{why and f', but {why}' or ''}; "
                "use numbers"
            )
        if exchange == "outer" and why:
            raise ValueError(
                f"exchange='outer' is not possible for method={self.name!r}: {why}; "
                "use 'program'"
            )
        if exchange == "auto":
            return measures or (num_processes > 1 and why is None)
        return exchange == "outer"

    def check_lanes(self, outer_lanes: int, exchange: str, num_processes: int) -> None:
        """Refuses lanes that no message would take.

        Args:
          outer_lanes: outer meshes side by side, to which fragments are dealt.
          exchange: as of `crosses_outside`.
          num_processes: that the regions live in.

        Raises:
          ValueError: naming what makes the number of no use.
        """
        if outer_lanes < 1:
            raise ValueError(f"outer_lanes={outer_lanes} must be at least 1")
        if outer_lanes == 1:
            return
        if not self.schedule or not self.crosses_outside(exchange, num_processes):
            raise ValueError(
                f"outer_lanes={outer_lanes} has no meaning for method={self.name!r} "
                f"with exchange={exchange!r} and processes={num_processes}: its "
                "messages do not cross on the outer mesh; use 1"
            )
        if outer_lanes > self.num_fragments:
            raise ValueError(
                f"outer_lanes={outer_lanes} must be at most num_fragments="
                f"{self.num_fragments}: a fragment crosses on one lane"
            )

    def weighted(self, region_weights: str | None) -> Method:
        """The same method with regions weighted in a mean.

        Args:
          region_weights: "tokens" weighs a region by what it trained on since the sync
            before, "equal" weighs all alike, None leaves it to the method.

        Raises:
          ValueError: for another name, or a method that has no mean of parameters.
        """
        if region_weights is None:
            return self
        if region_weights not in ("equal", "tokens"):
            raise ValueError(
                f"region_weights={region_weights!r} is unknown; use 'equal' or 'tokens'"
            )
        if self.schedule is None or self.is_asynchronous:
            raise ValueError(
                f"region_weights={region_weights!r} has no meaning for method="
                f"{self.name!r}, which takes no mean of pseudo-gradients; leave it out"
            )
        weigh = (lambda steps, tokens: tokens) if region_weights == "tokens" else None
        return dataclasses.replace(self, weigh=weigh)

    def for_regions(self, regions: Regions, num_regions: int) -> Method:
        """The method for these regions, whose clocks its schedule may go by.

        Raises:
          ValueError: naming the flag, its value and what would be right.
        """
        if regions.num != num_regions:
            raise ValueError(
                f"regions={num_regions}, but step_times has {regions.num} entries; "
                "give one for each region"
            )
        if self.num_regions not in (None, num_regions):
            raise ValueError(
                f"regions={num_regions} must be {self.num_regions} for method="
                f"{self.name!r}"
            )
        if self.step_exchange and not regions.are_even:
            raise ValueError(
                f"step_times={regions.step_times} must all be 1 for method="
                f"{self.name!r}, whose regions exchange at every step: all are as slow "
                "as the slowest"
            )
        if self.schedule is None:
            return self
        schedule = self.schedule.for_regions(regions)
        if self.merge.needs_midway:
            if schedule.measures:
                raise ValueError(
                    f"delay_steps='auto' is not possible for method={self.name!r}, "
                    "whose merge compares the two halves of the delay; use a number"
                )
            if schedule.delay_steps < 2:
                raise ValueError(
                    f"delay_steps={schedule.delay_steps} must be at least 2 for "
                    f"method={self.name!r}, whose merge compares the two halves of it"
                )
            schedule = dataclasses.replace(schedule, looks_midway=True)
        return dataclasses.replace(self, schedule=schedule)
