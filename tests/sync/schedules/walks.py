"""Schedules walked through as a runtime does it, told what the test says was seen."""

from cocodc_jax.sync.needs import MEASURED_NOW
from cocodc_jax.sync.schedules import FINISH, START, Applied, events_at
from cocodc_jax.sync.schedules.base import nothing


def walk(schedule, state, end, see=None, drift=None, learns=False):
    """Yields `(step, state, events)` up to `end`.

    Args:
      see: (step, finish event) -> parameters of the fragment and what was seen of its
        mean, by need. A message of zero, from before the first step, tells nothing.
      drift: step -> what the schedule may measure on demand.
      learns: whether it is told of what was applied at the end of that step, as
        before a checkpoint, instead of when it asks.
    """
    untold = []

    def observe(name):
        if name in MEASURED_NOW and drift is not None:
            return drift(step)
        told, untold[:] = [*untold], []
        return told if name == "applied" else nothing(name)

    while (step := schedule.next_step(state)) <= end:
        assert step > state.step
        events = []
        for after, event in events_at(schedule, state, step, observe):
            state = after
            if event is None:
                break
            events.append(event)
            if event.kind == FINISH and event.start_step > 0 and see is not None:
                untold.append(Applied(event.fragment_id, *see(step, event)))
        assert schedule.next_event(state, step, observe) == (state, None)
        for applied in observe("applied") if learns else ():
            state = schedule.learn(state, applied)
        yield step, state, events


def table(schedule, end, **options):
    """`{step: events}`: "+p" is a start, "/p" half of the way, "-p" a finish."""
    sign = {"start": "+", "midway": "/", "finish": "-"}
    return {
        step: " ".join(f"{sign[e.kind]}{e.fragment_id}" for e in events)
        for step, _, events in walk(schedule, schedule.init(), end, **options)
    }


def starts(schedule, end, **options):
    return [
        (step, e.fragment_id)
        for step, _, events in walk(schedule, schedule.init(), end, **options)
        for e in events
        if e.kind == START
    ]
