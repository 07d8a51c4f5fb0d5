"""Walks through schedules, as a runtime does, with observations of the test."""

from cocodc_jax.sync.needs import MEASURED_NOW
from cocodc_jax.sync.schedules import FINISH, START, Applied, events_at
from cocodc_jax.sync.schedules.base import nothing


def walk(schedule, state, end, see=None, drift=None, learns=False):
    """Yields `(step, state, events)` up to `end`.

    Args:
      see: (step, finish event) -> parameters of the fragment and observations of its
        mean, by need. A message of zero, from before the first step, has none.
      drift: step -> values that the schedule may measure on demand.
      learns: whether it learns of applied means at the end of their step, as before a
        checkpoint, instead of when it asks.
    """
    unread = []

    def observe(name):
        if name in MEASURED_NOW and drift is not None:
            return drift(step)

        news = list(unread)
        unread.clear()
        return news if name == "applied" else nothing(name)

    while (step := schedule.next_step(state)) <= end:
        assert step > state.step
        events = []
        for after, event in events_at(schedule, state, step, observe):
            state = after
            if event is None:
                break

            events.append(event)
            if event.kind == FINISH and event.start_step > 0 and see is not None:
                unread.append(Applied(event.fragment_id, *see(step, event)))

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


def assert_on_time(schedule, state, num_steps, flies_once=True, **seen):
    """Check that each fragment starts within H steps, and only started syncs finish.

    Args:
      flies_once: whether a fragment that is in flight does not start.
    """
    last = dict.fromkeys(range(schedule.num_fragments), state.step)
    flying = {pending.sync_id for pending in state.in_flight}
    end = state.step + num_steps

    for step, after, events in walk(schedule, state, end, **seen):
        for event in events:
            k = event.fragment_id
            if event.kind == FINISH:
                flying.remove(event.sync_id)
            elif event.kind == START:
                assert event.start_step == step
                assert step - last[k] <= schedule.sync_interval
                assert not (flies_once and k in {fragment for fragment, _ in flying})
                last[k] = step
                flying.add(event.sync_id)
        assert {pending.sync_id for pending in after.in_flight} == flying

    assert all(end - step <= schedule.sync_interval for step in last.values())
    assert min(last.values()) > state.step


class World:
    """Observations, drawn every `num_steps` steps, and equal for all callers."""

    def __init__(self, seed, num_fragments=3, num_steps=1):
        self.seed = seed
        self.num_fragments = num_fragments
        self.num_steps = num_steps

    def number(self, *of):
        # Powers of ten: some fragments always win, others never, and some tie.
        return 10.0 ** (hash((self.seed, *of)) % 7 - 3)

    def see(self, step, event):
        k = event.fragment_id
        start = event.start_step // self.num_steps
        return 1 + hash((self.seed, k)) % 100, {
            "norm": self.number(k, start),
            "effective_rank": 1 + hash((self.seed, step)) % 9,
            "times": [(1.0, self.number(step)), (0.5, 1 + self.number(step))],
        }

    def drift(self, step):
        step //= self.num_steps
        return [self.number(k, step) for k in range(self.num_fragments)]
