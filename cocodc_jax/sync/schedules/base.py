"""The interface of schedules: asked for the next event, a schedule returns it.

A schedule is a value. Its state is of its own class, with plain values that JSON can
hold. All code that executes events on a host (devices, a simulated network) runs the
same loop, `events_at`:

    while (step := schedule.next_step(state)) <= end:
        for state, event in events_at(schedule, state, step, observe):
            ...

The schedule alone determines the order of events at a step, and the order is a
contract: it must be the same in all regions, or collectives would be mismatched and
hang. So a schedule chooses from reduced values only, which it reads by `observe`.
"""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.numerics import check_at_least

START = "start"
MIDWAY = "midway"
FINISH = "finish"


class Event(NamedTuple):
    """An event of one sync of a fragment."""

    # `START` (its message is sent), `MIDWAY` (half of its delay has passed; only if a
    # merge needs a copy then) or `FINISH` (outer step and merge).
    kind: str
    fragment_id: int  # Which fragment.
    start_step: int  # The step at which this sync starts or started.
    # The step of the previous start, from which its progress counts.
    since_step: int = 0
    # The regions that take part, ascending; None is all of them.
    participating: tuple[int, ...] | None = None
    rank: int = 0  # Of the message, if the schedule sets one, else 0.

    @property
    def sync_id(self) -> tuple[int, int]:
        """Unique id of a sync: its fragment and its start."""
        return self.fragment_id, self.start_step


class Pending(NamedTuple):
    """A sync that has started and is not yet applied."""

    fragment_id: int  # Which fragment.
    start_step: int  # When it started.
    apply_step: int  # When it is applied.
    # When a merge needs a copy of the regions' fragments; None is never, or no longer.
    midway_step: int | None = None
    participating: tuple[int, ...] | None = None  # As in its `Event`.
    rank: int = 0  # As in its `Event`.

    @property
    def sync_id(self) -> tuple[int, int]:
        """Unique id of a sync: its fragment and its start."""
        return self.fragment_id, self.start_step

    def event(self, kind: str, since_step: int = 0) -> Event:
        """Return an event of this sync; `since_step` is of its start."""
        return Event(
            kind=kind,
            fragment_id=self.fragment_id,
            start_step=self.start_step,
            since_step=since_step,
            participating=self.participating,
            rank=self.rank,
        )


class Applied(NamedTuple):
    """Observations of an applied mean pseudo-gradient."""

    fragment_id: int  # Which fragment.
    num_params: int  # Parameters in the fragment.
    seen: Mapping[str, Any]  # Value by the name of a need, equal in every region.


class Observe(Protocol):
    """Reads observations for a schedule: values that are equal in every region."""

    def __call__(self, name: str, /) -> Any:
        """Return an observation.

        Args:
          name: "applied", or a need that is measured on demand, such as "drift".

        Returns:
          For "applied" a list of the `Applied` since the last call, oldest first. For
          a need its value, by fragment `[K]`; it is measured now, in all regions.
        """
        ...


def nothing(name: str) -> list:
    """Observe nothing: for schedules without needs."""
    if name != "applied":
        raise ValueError(f"the schedule needs {name!r}, which is not measured here")
    return []


@dataclasses.dataclass(frozen=True)
class ScheduleState:
    """State of every schedule."""

    step: int  # The step up to which events were returned.
    in_flight: tuple[Pending, ...]  # Syncs not yet applied, oldest first.
    # Step of the last start of each fragment, -1 for never.
    last_start: tuple[int, ...]

    # Rank of the messages sent now; 0 if the schedule sets none.
    rank: ClassVar[int] = 0

    def sent(self, pending: Pending, index: int, **changes: Any) -> Any:
        """Return the state after a start, the last of `last_start`'s entry `index`."""
        return dataclasses.replace(
            self,
            step=pending.start_step,
            in_flight=(*self.in_flight, pending),
            last_start=replaced(self.last_start, index, pending.start_step),
            **changes,
        )

    def to_json(self) -> dict:
        """Return plain values, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> Any:
        """Invert `to_json`, also after a round trip through JSON text."""
        fields = {k: _tuples(v) for k, v in value.items()}
        fields["in_flight"] = tuple(Pending(*p) for p in fields["in_flight"])
        return cls(**fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


class Schedule(abc.ABC):
    """When each fragment's sync starts and when it is applied.

    A schedule is an immutable value. Its state is a dataclass of its own, a
    `ScheduleState` or one with the same `step`, `in_flight`, `rank` and `to_json`, and
    goes through JSON. Every method is pure, and must return the same in all regions.
    """

    num_fragments: int  # K.
    # H, inner steps within which every fragment starts at least once.
    sync_interval: int
    # tau, inner steps from a start to its application; the maximum if they differ.
    delay_steps: int
    needs: frozenset[str] = frozenset()  # Names of its observations, see `sync.needs`.
    is_by_region: bool = False  # Whether each event is of one region alone.

    @property
    def is_measured(self) -> bool:
        """Whether it depends on measured times."""
        return "times" in self.needs

    @property
    def warm_up_steps(self) -> int:
        """Steps after which every program that it uses has run at least once."""
        return 2 * self.sync_interval + self.delay_steps

    @abc.abstractmethod
    def init(self) -> Any:
        """Return the state before the first step."""

    @abc.abstractmethod
    def next_step(self, state: Any) -> int:
        """Return the first step after `state.step` at which something happens.

        Args:
          state: in which all events up to `state.step` were returned.
        """

    @abc.abstractmethod
    def next_event(
        self, state: Any, step: int, observe: Observe = nothing
    ) -> tuple[Any, Event | None]:
        """Return the next event at `step`, and the state after it.

        Called again with that state until there is no further event.

        Args:
          state: before the event.
          step: from `next_step`.
          observe: reads observations, for a schedule with `needs`. It may wait for
            devices, so it is called only if a choice depends on it.

        Returns:
          The state, and the event; None if nothing more happens at `step`, and then
          `state.step` is `step`.
        """

    def arrive(self, state: Any, step: int) -> tuple[Any, Event | None]:
        """Return the next `MIDWAY` or `FINISH` of `step`, if any."""
        state = dataclasses.replace(state, step=step)
        flying = state.in_flight
        for i, pending in enumerate(flying):
            if pending.midway_step == step:
                flying = replaced(flying, i, pending._replace(midway_step=None))
                state = dataclasses.replace(state, in_flight=flying)
                return state, pending.event(MIDWAY)

        for i, pending in enumerate(flying):
            if pending.apply_step <= step:
                flying = (*flying[:i], *flying[i + 1 :])
                state = dataclasses.replace(state, in_flight=flying)
                return state, pending.event(FINISH)

        return state, None

    def learn(self, state: Any, applied: Applied) -> Any:
        """Return the state with the observations of an applied mean.

        Args:
          state: before.
          applied: from `observe("applied")`, with a value for each need of the
            schedule that an applied mean gives.
        """
        return state

    def landed(self, state: Any) -> Any:
        """Return the state with nothing in flight."""
        return dataclasses.replace(state, in_flight=())

    def begin_at(self, step: int) -> Any:
        """Return the state of a schedule whose first step comes after `step`.

        Every fragment counts as sent at `step`; observations of other schedules are not
        used.
        """
        state = self.init()
        last_start = (step or -1,) * len(state.last_start)
        return dataclasses.replace(state, step=step, last_start=last_start)

    def restore(self, value: dict) -> Any:
        """Return the state that `to_json` was called on."""
        return type(self.init()).from_json(value)

    def bind(self, regions: Regions, looks_midway: bool = False) -> Schedule:
        """Return the schedule for these regions.

        Args:
          regions: of the run, their number and speeds.
          looks_midway: whether a merge needs a copy halfway through the delay.

        Raises:
          ValueError: if the schedule cannot serve them.
        """
        if looks_midway:
            raise ValueError(
                f"delay_steps={self.delay_steps} has no two halves to compare in "
                f"{type(self).__name__}; use another merge"
            )
        return self


def events_at(
    schedule: Schedule, state: Any, step: int, observe: Observe = nothing
) -> Iterator[tuple[Any, Event | None]]:
    """Yield all events at `step`, in order.

    It yields the state after an event, and the event; the last one is None.
    """
    while True:
        state, event = schedule.next_event(state, step, observe)
        yield state, event
        if event is None:
            return


def most_in_flight(schedule: Schedule, num_steps: int) -> int:
    """Return the most syncs that are in flight at once in the first `num_steps`."""
    state = schedule.init()
    most = 0
    while (step := schedule.next_step(state)) <= num_steps:
        for after, _ in events_at(schedule, state, step):
            state = after
            most = max(most, len(state.in_flight))
    return most


def replaced(values: tuple, index: int, value: Any) -> tuple:
    """Return `values` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])


def set_whole_fields(schedule: Schedule, **least: int) -> None:
    """Convert integer fields to Python's `int`; refuse others, and those too small.

    NumPy's integers cannot be written to JSON, and `is_number` takes them for traced
    values. For the `__post_init__` of a frozen schedule.

    Args:
      schedule: whose fields are set.
      **least: the lowest value of each field, by its name.

    Raises:
      ValueError: if a field is not a whole number or is below its lowest value.
    """
    for name, lowest in least.items():
        value = getattr(schedule, name)
        check_at_least(name, value, lowest)
        object.__setattr__(schedule, name, operator.index(value))
