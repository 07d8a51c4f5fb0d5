"""The inner steps of one device with all events of their schedule among them.

Where all regions are one device's, and their outer model too, nothing crosses, and an
event costs what the host does for it: a model of 50,000 parameters spends a third of
its time in handing out programs of a hundred arrays each. So here a *stretch* of steps
is one program, whatever happens in it:

    for each step: the inner step;  outer step and merge of what is due;  start of what
    a slot serves

What is in flight is carried along, room for one message of each fragment. Each fragment
has a loop of its own for its start and for its end, which goes round once or not at
all: unlike the branches of a conditional, which copy what they hand through, a loop
that goes round no time costs nothing.

What slots serve the host says before, if nothing has to be observed for it. Where norms
decide, the program chooses (`sync/schedules/traced.py`), and the host reads what it
chose before it hands out the next stretch.

Numbers are those of the plain form (`events.py`), but for what XLA rounds otherwise
where more is in one program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.runtime.counted import scan
from cocodc_jax.runtime.devices.mesh import is_one_cpu
from cocodc_jax.runtime.exchange.crossings import make_crossing
from cocodc_jax.runtime.exchange.outer_place import OuterPlace
from cocodc_jax.runtime.merge import merging
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import InFlight, RegionState
from cocodc_jax.runtime.window import Finished, Told, make_finish
from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.outer import SharedOuter
from cocodc_jax.sync.schedules.adaptive import Adaptive
from cocodc_jax.sync.schedules.slotted import Slotted
from cocodc_jax.sync.schedules.traced import (
    Memory,
    applied,
    arrival,
    can_trace,
    choice,
    started,
)

PyTree = Any


class Carried(NamedTuple):
    """What a stretch hands on from step to step; tuples have an entry a fragment.

    Attributes:
      region: of all regions.
      outer: outer fragment and optimizer state.
      compressors: of the regions, `[R, ...]`.
      flights: what is on its way, or was last.
      memory: of the schedule.
    """

    region: RegionState
    outer: tuple[tuple[Fragment, PyTree], ...]
    compressors: tuple[PyTree, ...]
    flights: tuple[InFlight, ...]
    memory: Memory


class Given(NamedTuple):
    """What a step is given, leaves `[T, ...]` of a stretch.

    Attributes:
      batch: `[R, ...]`.
      start: int32 scalar, the fragment that starts, K for none; None has the program
        choose.
      rate: the inner optimizer's learning rate, None unless the merge needs it.
    """

    batch: PyTree
    start: Any
    rate: Any


class Seen(NamedTuple):
    """What a step tells of its events.

    Attributes:
      started: int32 scalar, the fragment that started, K for none.
      finished: of the sync that was applied, zeros where there was none.
    """

    started: Any
    finished: Finished


def make_stretch(place: OuterPlace, steps: Callable, chooses: bool) -> Callable:
    """Make a stretch, not yet jitted.

    Args:
      place: of the outer state.
      steps: the inner steps, of `step.make_steps`.
      chooses: whether the program chooses what starts.

    Returns:
      `stretch(carried, given, step, weights, num_steps=None) -> (carried, ((losses,
      aux), seen))`: `given` has leaves `[T, ...]`, and so have the results; `step` is
      an int32 scalar, the inner steps done before; `weights` are those of the regions,
      `[R]`; of `num_steps` see `counted.scan`.
    """
    setting = place.setting
    schedule = setting.sync.schedule
    assert isinstance(schedule, Slotted)
    each = range(len(setting.fragments))
    begins = [make_begin(place, k) for k in each]
    ends = [make_finish(place, k) for k in each]

    def start(carried: Carried, step, given: Given, weights):
        which = given.start
        if chooses:
            assert isinstance(schedule, Adaptive)
            num_params = setting.fragments.num_params
            which = choice(schedule, num_params, carried.memory, step)
        compressors, flights = [], []
        for k in each:

            def once(_, out, k=k):
                outer = place.near(k, *place.given(*carried.outer[k]))
                return begins[k](carried.region, outer, out[0], weights, step)

            out = (carried.compressors[k], carried.flights[k])
            compressor, flight = _if(which == k, once, out)
            compressors.append(compressor)
            flights.append(flight)
        memory = started(carried.memory, which, step, schedule.delay_steps)
        own = dict(compressors=tuple(compressors), flights=tuple(flights))
        return carried._replace(memory=memory, **own), which

    def finish(carried: Carried, step, given: Given):
        which = arrival(carried.memory, step)
        region, outer, compressors = carried.region, [], []
        done = _zeros_of_finished(ends[0], carried, given)
        for k in each:
            told = Told(given.rate, carried.memory.last_start[k])

            def once(_, out, k=k, region=region, told=told):
                at = region._replace(params=out[0])
                return ends[k](at, *out[1:3], carried.flights[k], given.batch, told)

            only = merging(setting, k, region).params
            out = (only, carried.outer[k], carried.compressors[k], done)
            params, own, compressor, done = _if(which == k, once, out)
            params = setting.fragments.over(region.params, params)
            region = region._replace(params=params)
            outer.append(own)
            compressors.append(compressor)
        memory = applied(carried.memory, which, done.norm)
        own = dict(outer=tuple(outer), compressors=tuple(compressors))
        return carried._replace(region=region, memory=memory, **own), done

    def one(carried: Carried, given: Given, step, weights):
        batches = jax.tree.map(lambda x: x[None], given.batch)
        region, out = steps(carried.region, batches, None)
        carried = carried._replace(region=region)
        if schedule.delay_steps:
            carried, done = finish(carried, step, given)
            carried, which = start(carried, step, given, weights)
        else:
            carried, which = start(carried, step, given, weights)
            carried, done = finish(carried, step, given)
        return carried, (jax.tree.map(lambda x: x[0], out), Seen(which, done))

    def stretch(carried: Carried, given: Given, step, weights, num_steps=None):
        def inner(carried: Carried, xs: tuple[Given, jax.Array]):
            given, after = xs
            return one(carried, given, after, weights)

        room = jax.tree.leaves(given)[0].shape[0]
        after = step + 1 + jnp.arange(room, dtype=jnp.int32)
        return scan(inner, carried, (given, after), num_steps)

    return stretch


def make_begin(place: OuterPlace, fragment_id: int) -> Callable:
    """Make the start of a fragment, which arrives at once and is applied later.

    Returns:
      `begin(region, outer, compressor, weights, step) -> (compressor, flight)`, of
      what regions are given of the outer fragment.
    """
    setting = place.setting
    crossing = make_crossing(setting, fragment_id, 0)
    draws = setting.sync.message.average.draws

    def begin(region: RegionState, outer: Fragment, compressor, weights, step):
        start_step = step if draws else None
        staged, crossed, compressor = crossing.leave(
            region.params, outer, compressor, weights, region.key, start_step
        )
        mean, _ = crossing.arrive(crossed, start_step)
        return compressor, InFlight(mean, {} if staged is None else {STAGED: staged})

    return begin


def embeds(setting: Setting, fuse_syncs: str) -> bool:
    """Tell whether events are among the inner steps.

    Args:
      setting: of the run.
      fuse_syncs: of its `Transport`; "auto" has them there where models are small, as
        it is with those that events cost.

    Raises:
      ValueError: if they cannot be, and shall.
    """
    if fuse_syncs == "no" or not is_one_cpu(setting.mesh):
        return False
    why = _why_not(setting)
    if fuse_syncs == "yes" and why:
        raise ValueError(
            f"fuse_syncs='yes' is not possible on one device: {why}; use 'auto'"
        )
    return why is None and (fuse_syncs == "yes" or not setting.local.one_by_one)


def _why_not(setting: Setting) -> str | None:
    """Tell why events cannot be among the inner steps, None if they can."""
    sync = setting.sync
    if not (setting.shardings.is_near and isinstance(sync.outer, SharedOuter)):
        return "its outer parameters do not lie beside the regions'"
    if sync.robust is not None:
        return "regions are looked at before each merge"
    if not can_trace(sync.schedule):
        return "its schedule's order or choices cannot be had inside a program"
    if sync.message.is_ranked or sync.moments or needs.STALE in sync.copies:
        return "more belongs to its syncs than a message of one size"
    state = setting.model_state
    if state is not None and state.averaged_bytes and setting.regions.num > 1:
        return "a model's state is averaged with its syncs"
    if not setting.regions.are_even:
        return "its regions are not equally fast"
    return None


def _if(condition: jax.Array, once: Callable, value: PyTree) -> PyTree:
    """Return `once(0, value)` where the condition holds, else `value` as it lies."""
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), once, value)


def _zeros_of_finished(end: Callable, carried: Carried, given: Given) -> Finished:
    """Return what is told of no sync."""
    own, told = carried.outer[0], Told(given.rate, carried.memory.last_start[0])
    like = (carried.compressors[0], carried.flights[0], given.batch, told)
    *_, finished = jax.eval_shape(end, carried.region, own, *like)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), finished)
