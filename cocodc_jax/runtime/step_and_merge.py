"""A fragment's outer step and its merge as one program, where both are of one device.

Of small models a program costs more to hand out than to run, array by array. So a merge
takes the mean itself where the outer state lies beside the regions
(`Setting.steps_in_merge`). It is what ends a window (`window.make_finish`), with the
inner steps left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.merge import merging
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import InFlight, RegionState, SyncState
from cocodc_jax.runtime.turns import Turn
from cocodc_jax.runtime.window import Finished, make_finish, tell
from cocodc_jax.sync import needs
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


def make_step_and_merge(
    setting: Setting, outer: SharedOuterModel, fragment_id: int
) -> Callable:
    """Make the program.

    Args:
      setting: of the run.
      outer: the outer model.
      fragment_id: which fragment.

    Returns:
      `step_and_merge(params, own, ...) -> (params, own, finished)`, compiled, of what
      `arguments` gives; the first two are donated.
    """
    finish = make_finish(outer.place, fragment_id)

    def step_and_merge(params, own, region, *rest):
        return finish(region._replace(params=params), own, *rest)

    where = setting.shardings.region
    only = merging(setting, fragment_id, where)
    own = outer.where.entry(fragment_id)
    return jax.jit(
        step_and_merge,
        donate_argnums=(0, 1),
        out_shardings=(only.params, own, Finished(None, where.key)),
    )


def arguments(
    setting: Setting,
    fragment_id: int,
    region: RegionState,
    sync: SyncState,
    flight: InFlight,
    batch: PyTree,
    step: int,
    start_step: int,
) -> tuple:
    """Return the arguments of `make_step_and_merge`'s program.

    Args:
      setting: of the run.
      fragment_id: which fragment.
      region: of all regions, before the merge.
      sync: before the outer step.
      flight: what arrived.
      batch: the last one trained on, `[R, ...]`.
      step: at which it is merged.
      start_step: of the sync.
    """
    given = merging(setting, fragment_id, region)
    names = (*needs.REGIONAL_COPIES, needs.STALE)
    return (
        given.params,
        sync.outer.entry(fragment_id),
        given._replace(params=None),
        flight.mean,
        {name: flight.kept[name] for name in names if name in flight.kept},
        batch,
        tell(setting, step, start_step),
    )


def step_and_merge(
    setting: Setting, program: Callable, turn: Turn, event: Event, flight: InFlight
) -> Finished:
    """Take an outer step and merge, by one program.

    Args:
      setting: of the run.
      program: the fragment's.
      turn: whose regions and outer state go on from it.
      event: the `FINISH`.
      flight: what arrived.
    """
    k, sync = event.fragment_id, turn.sync
    taken = (turn.region, sync, flight, turn.batch, turn.step, event.start_step)
    params, own, finished = program(*arguments(setting, k, *taken))
    params = setting.fragments.over(turn.region.params, params)
    turn.region = turn.region._replace(params=params)
    turn.sync = dataclasses.replace(sync, outer=sync.outer.updated(k, *own))
    return finished
