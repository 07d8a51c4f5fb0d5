"""Counts of steps and updates in an inner optimizer's state.

A learning-rate schedule keeps its position in the optimizer's state. Inside of an
accumulation of k gradients it counts updates, elsewhere steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cocodc_jax.sync.accumulation import ACCUMULATORS, accumulates
from cocodc_jax.sync.inner_state import kind_of

PyTree = Any


class Schedule(NamedTuple):
    """Where a type of state has a schedule's position."""

    field: str  # Of the state.
    first: int = 0  # The position at step 0.


# By the type's name, as Optax does not export all types. Only those whose count is that
# of a schedule alone.
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
    """Return an optimizer's state with its counts set to those after some steps.

    Set are the positions of schedules, the updates of accumulations, and their steps
    since the last update. Moments and the counts of their bias correction stay, and so
    do counts inside of an accumulation of unknown length.

    Args:
      state: of the optimizer, with or without a region axis.
      steps: int scalar or `[R]`, calls of the optimizer.
      periods: `Accumulation.periods` of the optimizer.
      put: `(count, old count) -> count`, with the old count's dtype and sharding.
    """

    def count(spot: Spot) -> Any:
        old = getattr(spot.node, spot.field)
        if spot.period is None or spot.outer_period is None:
            return old

        kind = kind_of(spot.node)
        accumulator = ACCUMULATORS.get(kind)
        if accumulator is None:
            return put(steps // spot.outer_period + SCHEDULED[kind].first, old)
        if spot.field == accumulator.updates:
            return put(steps // spot.period, old)

        return put(steps % spot.period // spot.outer_period, old)

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
    """A count in an optimizer's state."""

    node: Any  # The state that has it.
    field: str  # Of the node.
    # Steps between two updates inside of the node; if it does not accumulate, as below.
    period: int | None  # None is unknown.
    outer_period: int | None  # Steps between two calls of the node; None is unknown.


def _with_counts(
    count_of: Callable[[Spot], Any], state: PyTree, periods: Sequence[int | None] = ()
) -> PyTree:
    """Replace every count of schedules and accumulations, in a fixed order."""
    remaining_periods = iter(periods)

    def replace_in(tree: PyTree, outer_period: int | None) -> PyTree:
        return jax.tree.map(
            lambda node: replace(node, outer_period), tree, is_leaf=_has_counts
        )

    def replace(node: Any, outer_period: int | None) -> Any:
        if not _has_counts(node):
            return node
        if accumulates(node):
            return replace_in_accumulation(node, outer_period)
        return replace_in_schedule(node, outer_period)

    def replace_in_schedule(node: Any, outer_period: int | None) -> Any:
        changes = {
            name: replace_in(getattr(node, name), outer_period) for name in node._fields
        }
        field = SCHEDULED[kind_of(node)].field
        changes[field] = count_of(Spot(node, field, outer_period, outer_period))
        return node._replace(**changes)

    def replace_in_accumulation(node: Any, outer_period: int | None) -> Any:
        accumulator = ACCUMULATORS[kind_of(node)]
        period = _longer(next(remaining_periods, None), outer_period)

        changes = {}
        for name in node._fields:
            # Counts in other fields of the accumulator are not set.
            period_inside = period if name in accumulator.inside else None
            changes[name] = replace_in(getattr(node, name), period_inside)

        fields = [accumulator.counter]
        if accumulator.updates is not None:
            fields.append(accumulator.updates)
        for field in fields:
            changes[field] = count_of(Spot(node, field, period, outer_period))

        return node._replace(**changes)

    return replace_in(state, 1)


def _longer(period: int | None, other: int | None) -> int | None:
    """Return the longer of two periods; None, unknown, if either is."""
    if period is None or other is None:
        return None
    return max(period, other)


def has_counts(state: PyTree) -> bool:
    """Return whether an optimizer's state has counts that `at_steps` sets."""
    return any(map(_has_counts, jax.tree.leaves(state, is_leaf=_has_counts)))


def _has_counts(node: Any) -> bool:
    return accumulates(node) or kind_of(node) in SCHEDULED
