"""When each fragment's sync starts and when it is applied.

Every `slot_steps` inner steps one fragment may start; it is applied `delay_steps`
later. A schedule is a value that is asked what comes next and answers with events;
it knows no device, and its state is a small JSON-able record, so that a run can be
stopped with fragments in flight.

- *staggered* (Streaming DiLoCo, arXiv 2501.18512): slot j serves fragment j mod K
  with slots H / K apart, so fragment p starts at p H / K, then every H steps.
  With K = 1 this is DiLoCo's whole model every H steps.
- *adaptive* (CoCoDC, arXiv 2504.17672, section 3.2): N >= K slots in H steps, h =
  floor(H / N) apart, and each serves the fragment that changes fastest.

Adaptive transmission differs from the paper in two points (algorithms.md 4.3): a
fragment in flight is never chosen again, and the deadline is strict. Whenever the
fragments that are due within the next j slots number j, the earliest deadline goes
first; so no fragment waits longer than H steps from one start to the next.

With `sends_first` a fragment is one whole round late (CO2, DiLoCoX, eager updates):
its next message leaves, with what the round learned, before the message of the round
before is applied. The message of the round before the first is zero, so at the first
slot the regions go back to the outer parameters: an update never counts twice.

Every region must choose alike, or its collectives would pair with the wrong ones
and hang. So scores come from reduced values only: the mean pseudo-gradient of syncs
already applied, or a drift that was summed over the regions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from cocodc_jax.sync.events import Event, ScheduleState
from cocodc_jax.sync.regions import Regions

SCORES = ("pseudo_gradient", "aged", "drift")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When fragments start and are applied; see `staggered` and `adaptive`.

    Attributes:
      num_fragments: K.
      sync_interval: H, inner steps within which every fragment starts at least once.
      delay_steps: tau, inner steps from a start to its application.
      slot_steps: h, inner steps between two starts.
      score: None for the fixed round, else what adaptive transmission ranks by.
      sends_first: whether, where one sync of a fragment arrives as the next starts,
        the message leaves before the arriving one is applied; the delay is then one
        whole round.
      taking_part: the regions whose messages count, ascending; None is all of them.
      looks_midway: whether something is looked at halfway to each merge, `midway_steps`
        after the start.
    """

    num_fragments: int
    sync_interval: int
    delay_steps: int
    slot_steps: int
    score: str | None = None
    sends_first: bool = False
    taking_part: tuple[int, ...] | None = None
    looks_midway: bool = False

    def __post_init__(self):
        """Checks that every fragment can be on time.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        _check_at_least("num_fragments", self.num_fragments, 1)
        _check_at_least("sync_interval", self.sync_interval, 1)
        _check_at_least("delay_steps", self.delay_steps, 0)
        _check_at_least("slot_steps", self.slot_steps, 1)
        if self.score is not None:
            _check_score(self.score)
        slots = self.sync_interval // self.slot_steps
        if slots < self.num_fragments:
            raise ValueError(
                f"slot_steps={self.slot_steps} gives {slots} starts in sync_interval="
                f"{self.sync_interval}, too few for num_fragments="
                f"{self.num_fragments}; lower slot_steps or raise sync_interval"
            )
        if self.delay_steps > self.longest_delay:
            raise ValueError(
                f"delay_steps={self.delay_steps} is longer than sync_interval="
                f"{self.sync_interval} allows; a fragment must arrive before it "
                f"starts again: use at most {self.longest_delay}"
            )
        if self.sends_first and self.delay_steps != self.sync_interval:
            raise ValueError(
                f"delay_steps={self.delay_steps} must be sync_interval="
                f"{self.sync_interval} where a message leaves before the one of the "
                "round before is applied"
            )

    @property
    def longest_delay(self) -> int:
        """A fragment must be back before the slot that is its deadline."""
        return self.sync_interval // self.slot_steps * self.slot_steps

    @property
    def midway_steps(self) -> int:
        """Inner steps from a start to halfway to its merge."""
        return self.delay_steps // 2

    @property
    def observes(self) -> str | None:
        """What `observe` wants to know of an applied mean; None is nothing."""
        return "norm" if self.score is not None else None

    @property
    def measures(self) -> bool:
        """Whether it goes by what syncs took, see `paced.py`."""
        return False

    def delay_of(self, state: ScheduleState, fragment: int) -> int:
        """Inner steps from the last start of `fragment` to its application."""
        del state, fragment
        return self.delay_steps

    def for_regions(self, regions: Regions) -> Schedule:
        """The same schedule for these regions.

        Raises:
          ValueError: if a region that should take part is none of them.
        """
        if self.taking_part and max(self.taking_part) >= regions.num:
            raise ValueError(
                f"taking_part={self.taking_part} names a region that is none of the "
                f"{regions.num}; regions are counted from 0"
            )
        return self

    def init(self) -> ScheduleState:
        """The state before the first step."""
        none = (0,) * self.num_fragments
        flying: list[tuple[int, int]] = []
        if self.sends_first:  # Messages of zero, sent a round before the first.
            slots = range(1 - self.num_fragments, 1)
            flying = [(j % self.num_fragments, j * self.slot_steps) for j in slots]
        return ScheduleState(
            step=0,
            in_flight=tuple(flying),
            last_start=(-1,) * self.num_fragments,
            interval=none,
            norm=(0.0,) * self.num_fragments,
            size=none,
            observed_interval=none,
        )

    def next_step(self, state: ScheduleState) -> int:
        """The first step after `state.step` at which something happens."""
        ends = [start + self.delay_of(state, p) for p, start in state.in_flight]
        if self.looks_midway:
            halves = [start + self.midway_steps for _, start in state.in_flight]
            ends += [half for half in halves if half > state.step]
        return min([self.next_slot(state), *ends])

    def next_slot(self, state: ScheduleState) -> int:
        """The first step after `state.step` at which a fragment may start."""
        return (state.step // self.slot_steps + 1) * self.slot_steps

    def may_start(self, state: ScheduleState, step: int) -> bool:
        """Whether a fragment may start at `step`, after the events up to `state`."""
        del state
        return step > 0 and step % self.slot_steps == 0

    def finishes(
        self, state: ScheduleState, step: int
    ) -> tuple[ScheduleState, list[Event]]:
        """The syncs applied at `step`, oldest first, and the state after them.

        Finishes come before a start at the same step, so that a fragment that has
        just arrived may leave again with what was merged; with `delay_steps=0` call
        once more after `start`.
        """
        due = [
            (p, s) for p, s in state.in_flight if s + self.delay_of(state, p) <= step
        ]
        rest = tuple(x for x in state.in_flight if x not in due)
        state = dataclasses.replace(state, step=step, in_flight=rest)
        return state, [Event("finish", p, s) for p, s in due]

    def start(
        self,
        state: ScheduleState,
        step: int,
        drift: Callable[[], Sequence[float]] | None = None,
    ) -> tuple[ScheduleState, Event | None]:
        """The sync that starts at `step`, if any, and the state after it.

        Args:
          state: after `finishes` of the same step.
          step: inner steps done.
          drift: for `score="drift"`: measures mean |outer - local| per parameter of
            each fragment, summed over regions.

        Returns:
          The new state and the event; None between slots, where every fragment is
          still in flight, and when asked again at the same step.
        """
        if not self.may_start(state, step) or step in state.last_start:
            return state, None
        fragment = self._choose(state, step, drift)
        if fragment is None:
            return state, None
        since = max(state.last_start[fragment], 0)
        state = dataclasses.replace(
            state,
            step=step,
            in_flight=(*state.in_flight, (fragment, step)),
            last_start=_set(state.last_start, fragment, step),
            interval=_set(state.interval, fragment, step - since),
        )
        return state, Event("start", fragment, step, self.taking_part)

    def observe(
        self, state: ScheduleState, fragment: int, observed: float, size: int
    ) -> ScheduleState:
        """Tells the schedule the mean pseudo-gradient that was just applied.

        Args:
          state: any.
          fragment: whose sync was applied.
          observed: what `observes` names, of the mean pseudo-gradient (the same on
            every region); its L2 norm here.
          size: parameters in the fragment.
        """
        return dataclasses.replace(
            state,
            norm=_set(state.norm, fragment, observed),
            size=_set(state.size, fragment, size),
            observed_interval=_set(
                state.observed_interval, fragment, state.interval[fragment]
            ),
        )

    def observe_times(
        self, state: ScheduleState, times: Sequence[Sequence[float]]
    ) -> ScheduleState:
        """Tells a schedule that measures what syncs took; others do not care.

        Args:
          state: any.
          times: of every region as it sent the message just applied, seconds of an
            inner step and of a sync, 0 where it knew none yet.
        """
        del times
        return state

    def _choose(self, state, step, drift) -> int | None:
        flying = {p for p, _ in state.in_flight}
        free = [p for p in range(self.num_fragments) if p not in flying]
        if self.score is None:
            fragment = step // self.slot_steps % self.num_fragments
            return fragment if fragment in free else None
        if not free:
            return None
        due = [self._slots_left(state, p, step) for p in range(self.num_fragments)]
        if _is_tight(due):
            return min(free, key=lambda p: (due[p], p))
        never = [p for p in free if state.last_start[p] < 0]
        if never:
            return never[0]
        scores = self._scores(state, step, drift)
        return max(free, key=lambda p: (scores[p], -p))

    def _slots_left(self, state: ScheduleState, fragment: int, step: int) -> int:
        """Slots that may pass before `fragment` must have started; 0 is now."""
        deadline = max(state.last_start[fragment], 0) + self.sync_interval
        return (deadline - step) // self._slot_steps(state)

    def _slot_steps(self, state: ScheduleState) -> int:
        del state
        return self.slot_steps

    def _scores(self, state, step, drift) -> list[float]:
        if self.score == "drift":
            if drift is None:
                raise ValueError("score='drift' needs `drift` to measure it")
            age = [step - start for start in state.last_start]
            return [d / a for d, a in zip(drift(), age, strict=True)]
        scores = []
        for p in range(self.num_fragments):
            if not state.size[p]:  # Sent once but not yet back: nothing is known.
                scores.append(0.0)
                continue
            interval = state.observed_interval[p]
            if self.score == "pseudo_gradient":
                scores.append(state.norm[p] / state.size[p] / interval)
            else:
                rms = state.norm[p] / math.sqrt(state.size[p])
                scores.append(rms * (step - state.last_start[p]) / interval)
        return scores


def staggered(
    sync_interval: int,
    num_fragments: int = 1,
    delay_steps: int = 0,
    sends_first: bool = False,
) -> Schedule:
    """Each fragment every `sync_interval` steps, starts spread evenly over them.

    Args:
      sync_interval: H.
      num_fragments: K.
      delay_steps: tau.
      sends_first: for a delay of one whole round, see `Schedule`.

    Raises:
      ValueError: if `sync_interval` is not a multiple of `num_fragments`, or the
        delay is longer than the interval.
    """
    _check_at_least("num_fragments", num_fragments, 1)
    _check_at_least("sync_interval", sync_interval, 1)
    if sync_interval % num_fragments:
        below = sync_interval // num_fragments * num_fragments
        options = [str(n) for n in (below, below + num_fragments) if n]
        raise ValueError(
            f"sync_interval={sync_interval} is not a multiple of num_fragments="
            f"{num_fragments}; use {' or '.join(options)}"
        )
    slot_steps = sync_interval // num_fragments
    return Schedule(
        num_fragments, sync_interval, delay_steps, slot_steps, None, sends_first
    )


def one_round_late(sync_interval: int, num_fragments: int = 1) -> Schedule:
    """Each fragment every `sync_interval` steps, applied as its next one starts.

    Raises:
      ValueError: if `sync_interval` is not a multiple of `num_fragments`.
    """
    return staggered(sync_interval, num_fragments, sync_interval, sends_first=True)


def adaptive(
    sync_interval: int,
    num_fragments: int,
    delay_steps: int,
    syncs_per_interval: int,
    score: str = "pseudo_gradient",
) -> Schedule:
    """CoCoDC's adaptive transmission, `syncs_per_interval` starts in each interval.

    Args:
      sync_interval: H, the strict limit between two starts of a fragment.
      num_fragments: K.
      delay_steps: tau.
      syncs_per_interval: N, at least K; see `syncs_that_fit`.
      score: "pseudo_gradient" (the paper's rate: last mean pseudo-gradient's norm
        per parameter and step), "aged" (the authors' later score, its RMS times age
        over interval, which grows while a fragment waits) or "drift" (mean
        |outer - local| per parameter and step, measured now).

    Raises:
      ValueError: naming the argument, its value and what would be right.
    """
    _check_score(score)
    _check_at_least("num_fragments", num_fragments, 1)
    _check_at_least("sync_interval", sync_interval, 1)
    if not num_fragments <= syncs_per_interval <= sync_interval:
        raise ValueError(
            f"syncs_per_interval={syncs_per_interval} must be at least num_fragments="
            f"{num_fragments} and at most sync_interval={sync_interval}"
        )
    slot_steps = sync_interval // syncs_per_interval
    return Schedule(num_fragments, sync_interval, delay_steps, slot_steps, score)


def syncs_that_fit(
    sync_interval: int,
    num_fragments: int,
    step_time: float,
    sync_time: float,
    network_share: float,
) -> int:
    """N = max(K, floor(gamma H T_c / T_s)), CoCoDC's syncs in one interval.

    Args:
      sync_interval: H in steps.
      num_fragments: K.
      step_time: T_c, seconds of one inner step.
      sync_time: T_s, seconds of one fragment's sync.
      network_share: gamma in (0, 1], the share of the network that may be used.

    Raises:
      ValueError: if a time is not positive or the share is outside (0, 1].
    """
    if step_time <= 0 or sync_time <= 0:
        raise ValueError(
            f"step_time={step_time} and sync_time={sync_time} must be positive seconds"
        )
    if not 0 < network_share <= 1:
        raise ValueError(f"network_share={network_share} must be in (0, 1]")
    fit = math.floor(network_share * sync_interval * step_time / sync_time)
    return min(max(num_fragments, fit), sync_interval)


def _is_tight(due: Sequence[int]) -> bool:
    """Whether j + 1 or more fragments must start within the next j + 1 slots."""
    return any(sum(d <= j for d in due) > j for j in set(due))


def _set(values: tuple, index: int, value) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _check_score(score: str) -> None:
    if score not in SCORES:
        raise ValueError(f"score={score!r} is unknown; use one of {SCORES}")
