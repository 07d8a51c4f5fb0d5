"""Counts of steps and updates in an inner optimizer's state.

A schedule of a learning rate has its position in the optimizer's state. Inside of an
accumulation of k gradients it is a number of updates, else one of steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cocodc_jax.sync.accumulation import ACCUMULATORS, accumulates
from cocodc_jax.sync.inner_state import kind_of

PyTree = Any


class Schedule(NamedTuple):
    """A type of state that has a schedule's position: its field, and the first one."""

    field: str
    first: int = 0


# By type, as Optax does not export all of them. Only counts of nothing but a schedule.
SCHEDULED = {
    "ScaleByScheduleState": Schedule("count"),
    "WrappedScheduleState": Schedule("count"),
    "InjectHyperparamsState": Schedule("count"),
    "InjectStatefulHyperparamsState": Schedule("count"),
    "WeightDecaySchedule": Schedule("count"),
    "AddNoiseState": Schedule("count"),
    "ConditionallyTransformState": Schedule("step"),
    "ConditionallyMaskState": Schedule("step"),
    "ScheduleFreeState": Schedule("step_count", first=1),
}


def at_steps(
    state: PyTree,
    steps: np.ndarray,
    periods: Sequence[int | None],
    put: Callable[[np.ndarray, Any], Any],
) -> PyTree:
    """Return an optimizer's state with its counts as they are after some steps.

    These are the counts of schedules, of updates, and of steps up to the next update.
    Moments and the counts of their bias correction stay, and so do counts inside of an
    accumulation of unknown length.

    Args:
      state: of the optimizer, with or without a region axis.
      steps: int scalar or `[R]`, calls of the optimizer.
      periods: `Accumulation.periods` of the optimizer.
      put: `(count, old count) -> count` in the form of the state.
    """

    def count(spot: Spot) -> Any:
        old = getattr(spot.node, spot.field)
        period = spot.period

        above = spot.above
        if period is None or above is None:
            return old

        kind = kind_of(spot.node)
        accumulator = ACCUMULATORS.get(kind)
        if accumulator is None:
            return put(steps // above + SCHEDULED[kind].first, old)
        if spot.field == accumulator.updates:
            return put(steps // period, old)

        return put(steps % period // above, old)

    return _with_counts(count, state, periods)


def with_counts(state: PyTree, counted: PyTree) -> PyTree:
    """Return a state with the counts of another state of the same optimizer."""
    counts: list[Any] = []

    def note(spot: Spot) -> Any:
        counts.append(getattr(spot.node, spot.field))
        return counts[-1]

    _with_counts(note, counted)
    remaining = iter(counts)
    return _with_counts(lambda spot: next(remaining), state)


class Spot(NamedTuple):
    """A count in an optimizer's state.

    `period` is the number of steps between updates of the node, if it accumulates, and
    `above` that of what contains it; both are None if not known.
    """

    node: Any
    field: str
    period: int | None
    above: int | None


def _with_counts(
    count_of: Callable[[Spot], Any], state: PyTree, periods: Sequence[int | None] = ()
) -> PyTree:
    """Replace every count of schedules and accumulations, in a fixed order."""
    numbered = iter(periods)

    def walk(tree: PyTree, above: int | None) -> PyTree:
        return jax.tree.map(lambda x: one(x, above), tree, is_leaf=_has_counts)

    def one(node: Any, above: int | None) -> Any:
        if not _has_counts(node):
            return node

        kind = kind_of(node)
        accumulator = ACCUMULATORS.get(kind)

        period = above
        if accumulator is None:
            fields = [SCHEDULED[kind].field]
        else:
            period = next(numbered, None)
            if above is None:
                period = None
            elif period is not None:
                period = max(period, above)

            fields = [accumulator.counter]
            if accumulator.updates is not None:
                fields.append(accumulator.updates)

        changes = {}
        for name in node._fields:
            inside = above
            if accumulator is not None:
                inside = period if name in accumulator.inside else None
            changes[name] = walk(getattr(node, name), inside)

        for name in fields:
            changes[name] = count_of(Spot(node, name, period, above))
        return node._replace(**changes)

    return walk(state, 1)


def has_counts(state: PyTree) -> bool:
    """Return whether an optimizer's state has counts that `at_steps` sets."""
    return any(map(_has_counts, jax.tree.leaves(state, is_leaf=_has_counts)))


def _has_counts(node: Any) -> bool:
    return accumulates(node) or kind_of(node) in SCHEDULED
