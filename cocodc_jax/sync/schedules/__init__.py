"""When fragments start and are applied; each kind has a state of its own."""

from cocodc_jax.sync.schedules.adaptive import Adaptive, syncs_that_fit
from cocodc_jax.sync.schedules.asynchronous import Asynchronous, asynchronous
from cocodc_jax.sync.schedules.base import (
    FINISH,
    MIDWAY,
    START,
    Applied,
    Event,
    Pending,
    Schedule,
    ScheduleState,
    events_at,
)
from cocodc_jax.sync.schedules.measured import Measured, adaptive, staggered
from cocodc_jax.sync.schedules.periodic import Periodic, periodic
from cocodc_jax.sync.schedules.ranked import RankedRounds, ranked_rounds
from cocodc_jax.sync.schedules.slotted import (
    OneStepStale,
    Slotted,
    Staggered,
    one_step_stale,
)

__all__ = [
    "FINISH",
    "MIDWAY",
    "START",
    "Adaptive",
    "Applied",
    "Asynchronous",
    "Event",
    "Measured",
    "OneStepStale",
    "Pending",
    "Periodic",
    "RankedRounds",
    "Schedule",
    "ScheduleState",
    "Slotted",
    "Staggered",
    "adaptive",
    "asynchronous",
    "events_at",
    "one_step_stale",
    "periodic",
    "ranked_rounds",
    "staggered",
    "syncs_that_fit",
]


def __dir__() -> list[str]:
    return sorted(__all__)
