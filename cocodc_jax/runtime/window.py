"""What one window computes: starts, inner steps, and the merge of what has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from cocodc_jax.core.sync import outer_step
from cocodc_jax.runtime.exchange.crossings import make_crossing
from cocodc_jax.runtime.exchange.outer_place import OuterPlace
from cocodc_jax.runtime.merge import make_merge, merge_arguments
from cocodc_jax.runtime.merge_feedback import make_remember
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import InFlight, RegionState
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.needs import STAGED

PyTree = Any


class Start(NamedTuple):
    """What a window is given for a fragment that starts.

    Attributes:
      given: of `SharedOuterModel.given`; None where it is the one that is finished.
      compressor: state of the regions' compressors.
      weights: of the regions, `[R]`.
      start_step: as of `outgoing.start_step_of`.
    """

    given: tuple[Fragment, PyTree] | None
    compressor: PyTree
    weights: jax.Array
    start_step: Any


class Sent(NamedTuple):
    """What a window gives of a fragment that started.

    Attributes:
      staged: its copy, `[R, ...]`; None where nobody needs it after the window.
      mean: the mean pseudo-gradient; None likewise.
      told: the verdicts by name.
      compressor: state of the regions' compressors after it.
    """

    staged: Fragment | None
    mean: Fragment | None
    told: dict[str, Any]
    compressor: PyTree


class Finished(NamedTuple):
    """What a window did of a sync that it finished.

    Attributes:
      norm: of the mean pseudo-gradient, float32 scalar.
      metrics: of the merge, each `[R]`.
    """

    norm: Any
    metrics: Any


class Told(NamedTuple):
    """What a window is told; what the merge does not ask for is None.

    Attributes:
      frozen: of `TrainState`.
      learning_rate: float32 scalar.
      start_step: of the sync, int32 scalar.
    """

    frozen: PyTree
    learning_rate: Any = None
    start_step: Any = None


def tell(setting: Setting, frozen: PyTree, step: int, start_step: int) -> Told:
    """Return what a window with the merge of a sync at `step` is told."""
    rule = setting.sync.merge.needs
    return Told(
        frozen,
        setting.supplies.rate(step) if "learning_rate" in rule else None,
        np.int32(start_step) if "sync_key" in rule else None,
    )


def make_window(
    place: OuterPlace,
    steps: Callable,
    leaving: tuple[tuple[int, int], ...],
    last: int | None,
    is_seen: bool,
) -> Callable:
    """Make a window, not yet jitted.

    Args:
      place: of the outer state.
      steps: the inner steps, of `step.make_steps`.
      leaving: fragment and rank of each message that leaves.
      last: the fragment that arrives, one of those; None is none.
      is_seen: whether its mean is wanted after the window.

    Returns:
      `window(region, batches, participating, starts, own, told) -> (region, (losses,
      aux), sent, own, finished)`: `starts` are `Start`s and `sent` `Sent`s, one for
      each of `leaving`; `own` is outer fragment and optimizer state of `last`, `told`
      a `Told`, `finished` a `Finished`; the last two results are None without `last`.
    """
    setting = place.setting
    crossings = [make_crossing(setting, k, rank) for k, rank in leaving]
    finish = None if last is None else make_finish(place, last)

    def window(region, batches, participating, starts, own, told):
        left = []
        for (k, _), crossing, start in zip(leaving, crossings, starts, strict=True):
            given = place.given(*own) if start.given is None else start.given
            left.append(
                crossing.leave(
                    region.params,
                    place.near(k, *given),
                    start.compressor,
                    start.weights,
                    region.key,
                    start.start_step,
                )
            )
        region, (losses, aux) = steps(region, batches, participating, None, told.frozen)
        # What is made of a message comes after the steps: its crossing spans them.
        crossed = [each for _, each, _ in left]
        crossed, losses = jax.lax.optimization_barrier((crossed, losses))
        sent, finished = [], None
        for (k, _), crossing, start, each, (staged, _, state) in zip(
            leaving, crossings, starts, crossed, left, strict=True
        ):
            mean, told_along = crossing.arrive(each, start.start_step)
            if k == last:
                assert finish is not None
                flight = InFlight(mean, {} if staged is None else {STAGED: staged})
                batch = jax.tree.map(lambda x: x[-1], batches)
                merged, own, state, finished = finish(
                    region, own, state, flight, batch, told
                )
                region = region._replace(params=merged)
                staged, mean = None, mean if is_seen else None
            sent.append(Sent(staged, mean, told_along, state))
        return region, (losses, aux), tuple(sent), own, finished

    return window


def make_finish(place: OuterPlace, fragment_id: int) -> Callable:
    """Make what happens to a fragment that arrives: outer step, and merge.

    Returns:
      `finish(region, own, compressor, flight, batch, told) -> (params, own, compressor,
      finished)`; see `make_window`. `region` may lack what the merge does not need;
      `compressor` is the regions' state, which remembers what the merge drops where it
      is told later; `batch` is the last one, `[R, ...]`.
    """
    setting = place.setting
    merge, rule = make_merge(setting, fragment_id), setting.sync.merge.needs
    remember = None
    if setting.sync.merge.told_later:
        remember = make_remember(setting, fragment_id)

    def finish(region: RegionState, own, compressor, flight: InFlight, batch, told):
        if remember is not None:
            compressor = remember(region.params, flight.kept[STAGED], compressor)
        params, opt_state, mean = (
            place.taken(fragment_id, tree) for tree in (*own, flight.mean)
        )
        params, opt_state, norm = outer_step(
            place.outer.optimizer, params, opt_state, mean, None
        )
        arguments = merge_arguments(
            rule,
            region,
            flight.kept,
            place.near(fragment_id, params, opt_state),
            batch,
            told.learning_rate,
            participating=None,
            delay_steps=None,
            start_step=told.start_step,
            frozen=told.frozen,
        )
        merged, metrics = merge(*arguments)
        own = tuple(place.returned(fragment_id, tree) for tree in (params, opt_state))
        return merged, own, compressor, Finished(norm, metrics)

    return finish
