"""How means arrive: an outer step, and a merge into the regions.

A mean that comes from other jobs is waited for where it is due, or at the next slot if
the route goes on without it: no fragment starts before all that was due is applied, so
that all regions choose alike and measure from the same outer fragments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cocodc_jax.runtime.arriving import Arriving, landed
from cocodc_jax.runtime.departures import Departures
from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.exchange.jobs import BetweenJobs
from cocodc_jax.runtime.exchange.regional import RegionalOuterModels
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.exchange.transport import Route
from cocodc_jax.runtime.merge import make_merge, merge_arguments, merging
from cocodc_jax.runtime.merge_feedback import jit_remember
from cocodc_jax.runtime.restore import Restore
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import (
    InFlight,
    Observation,
    RegionState,
)
from cocodc_jax.runtime.turns import AppliedSync, Turn, Turns
from cocodc_jax.runtime.window import Finished
from cocodc_jax.sync import needs
from cocodc_jax.sync.robust import VERDICT, left_out
from cocodc_jax.sync.schedules.base import Event, Pending, replaced
from cocodc_jax.sync.schedules.slotted import Slotted

PyTree = Any


class Arrivals:
    """Ends of syncs, carried out.

    Attributes:
      merges: program of every fragment's merge, for the schedule's own delay.
    """

    def __init__(
        self,
        setting: Setting,
        route: Route,
        outer: SharedOuterModel | RegionalOuterModels,
        departures: Departures,
        restore: Restore | None,
        turns: Turns,
    ):
        """Wrap every program in one jit.

        Args:
          setting: of the run.
          route: that messages take.
          outer: the outer model.
          departures: of the same syncs.
          restore: of regions that are left out of a mean, where some may be.
          turns: that programs with collectives take.
        """
        self._setting, self._schedule = setting, setting.sync.schedule
        self._route, self._outer, self._departures = route, outer, departures
        self._restore, self._turns = restore, turns
        self.merges = [self._make_merge(k) for k in range(len(setting.fragments))]
        self._remembering = [
            jit_remember(setting, k)
            for k in range(len(setting.fragments))
            if setting.sync.merge.told_later
        ]
        # Whose slots means may be late until; None waits for them where they are due.
        self._slots: Slotted | None = None
        if isinstance(route, BetweenJobs) and route.goes_on:
            if isinstance(self._schedule, Slotted):
                self._slots = self._schedule
        self._restored_step = 0
        self._keep = jax.jit(
            lambda outer, own: jax.tree.map(
                lambda o, d: o - d.astype(o.dtype), outer, own
            )
        )
        self._see = jax.jit(functools.partial(needs.of_mean, self._schedule.needs))
        self._is_seen = any(needs.NEEDS[n].of_mean for n in self._schedule.needs)

    def abstract(
        self,
        fragment_id: int,
        region: RegionState,
        copies: dict[str, PyTree],
        batch: PyTree,
        frozen: PyTree,
    ) -> tuple:
        """Return shapes and shardings of what a merge is given.

        Args:
          fragment_id: which fragment.
          region: abstract, as the others are.
          copies: of the regions' own that merges need, by name.
          batch: of the last one trained on, `[R, ...]`.
          frozen: of `TrainState`.
        """
        k, setting = fragment_id, self._setting
        step = jax.ShapeDtypeStruct((), np.int32)
        everyone = jax.ShapeDtypeStruct(
            (setting.regions.num,), bool, sharding=setting.shardings.region.key
        )
        return merge_arguments(
            setting.sync.merge.needs,
            merging(setting, k, region),
            copies,
            self._outer.abstract_near(k),
            batch,
            jax.ShapeDtypeStruct((), np.float32),
            everyone if self._schedule.is_by_region else None,
            step if self._schedule.is_measured else None,
            step,
            frozen,
        )

    def finish(self, turn: Turn, event: Event) -> None:
        """Apply what arrived, or put it off to the next slot if it has not."""
        if (slot := self._put_off(turn, event)) is None:
            self.apply(turn, event)
            return
        rest = event.participating, event.rank
        turn.late.append(
            Pending(event.fragment_id, event.start_step, slot, None, *rest)
        )

    def apply(self, turn: Turn, event: Event) -> None:
        """Take an outer step with a mean, and merge it into the regions.

        Waits for the mean if it comes from other jobs.
        """
        k, start_step = event.fragment_id, event.start_step
        done = turn.finished.get(event.sync_id)
        if done is None:
            self._departures.settle(turn)  # Merges change what would leave.
        flights = dict(turn.sync.in_flight)
        flight = flights.pop(event.sync_id)
        turn.sync = dataclasses.replace(turn.sync, in_flight=flights)
        if done is None:
            self._remember(turn, k, flight)
            norm = self._receive(turn, k, flight)
            flight = self._restore_left_out(turn, event, flight)
            done = Finished(norm, self._merge_in(turn, event, flight))
        norm, metrics = done
        num_bytes = 0
        if start_step > 0:  # Not a stale schedule's message of zero.
            num_bytes = self._departures.sent_bytes(event)
            self._observe(turn, event, flight, norm)
        turn.applied.append(
            AppliedSync(
                k,
                start_step,
                turn.step,
                num_bytes,
                norm,
                metrics,
                flight.kept.get(VERDICT, _verdict(flight)),
            )
        )

    def _remember(self, turn: Turn, k: int, flight: InFlight) -> None:
        """Keep for the next message what the merge will drop, where it is told."""
        if not self._remembering:
            return
        params = merging(self._setting, k, turn.region).params
        staged, states = flight.kept[needs.STAGED], turn.sync.compressors
        state = self._remembering[k](params, staged, states[k])
        states = replaced(states, k, state)
        turn.sync = dataclasses.replace(turn.sync, compressors=states)

    def _receive(self, turn: Turn, k: int, flight: InFlight) -> jax.Array:
        """Take an outer step with what arrived; returns its norm."""
        if self._outer.steps_on_mesh:
            self._turns.wait()
        turn.sync, norm = self._outer.receive(k, flight, turn.sync)
        if self._outer.steps_on_mesh:
            self._turns.took(norm)
        return norm

    def _put_off(self, turn: Turn, event: Event) -> int | None:
        """Return the slot at which a mean is merged that is late; None is now."""
        if self._slots is None:
            return None
        mean = turn.sync.in_flight[event.sync_id].mean
        if not isinstance(mean, Arriving) or mean.is_ready():
            return None
        slot = self._slots.next_slot(turn.step - 1)
        return slot if slot > turn.step else None

    def _make_merge(self, fragment_id: int, is_late: bool = False) -> Callable:
        where = self._setting.shardings.region
        only = merging(self._setting, fragment_id, where)
        return jax.jit(
            make_merge(self._setting, fragment_id, is_late=is_late),
            donate_argnums=0,
            out_shardings=(only.params, where.key),
        )

    @functools.cache  # noqa: B019  (as long as the programs)
    def _late_merge(self, fragment_id: int) -> Callable:
        """Return the program that merges for an age that is told."""
        return self._make_merge(fragment_id, is_late=True)

    def _restore_left_out(self, turn: Turn, event: Event, flight: InFlight) -> InFlight:
        """Restore the regions that were left out of a mean which is now there.

        Waits for the verdict, so that nothing is done where nobody was left out.
        """
        verdict = flight.kept.get(VERDICT)
        if verdict is None and (verdict := _verdict(flight)) is not None:
            assert isinstance(self._route, BetweenJobs)
            # What left before this region was restored is no reason to do it again.
            is_new = event.start_step >= self._restored_step
            verdict = np.asarray(verdict)[self._route.region, None] * is_new
        if verdict is None or not (bad := left_out(np.asarray(verdict))).any():
            return flight
        self._restored_step = turn.step
        flights = {**turn.sync.in_flight, event.sync_id: flight}
        sync = dataclasses.replace(turn.sync, in_flight=flights)
        assert self._restore is not None
        turn.region, sync = self._restore(turn.region, sync, bad)
        flights = dict(sync.in_flight)
        flight = flights.pop(event.sync_id)
        turn.sync = dataclasses.replace(sync, in_flight=flights)
        return flight

    def _merge_in(self, turn: Turn, event: Event, flight: InFlight) -> dict:
        k, merge_needs = event.fragment_id, self._setting.sync.merge.needs
        turn.sync, outer, participating = self._outer.hand_out(event, turn.sync)
        outer = self._with_uncounted(outer, flight)
        age = turn.step - event.start_step
        is_late = self._slots is not None and age > self._slots.delay_steps
        wants_rate = "learning_rate" in merge_needs
        kept = {n: x for n, x in flight.kept.items() if n in needs.REGIONAL_COPIES}
        merge = self._late_merge(k) if is_late else self.merges[k]
        arguments = merge_arguments(
            merge_needs,
            merging(self._setting, k, turn.region),
            kept,
            outer,
            turn.batch,
            self._setting.supplies.rate(turn.step) if wants_rate else None,
            participating,
            np.int32(max(age, 1)) if self._schedule.is_measured or is_late else None,
            np.int32(event.start_step),
            turn.frozen,
        )
        merged, metrics = merge(*arguments)
        params = self._setting.fragments.over(turn.region.params, merged)
        turn.region = turn.region._replace(params=params)
        return metrics

    def _with_uncounted(self, outer: PyTree, flight: InFlight) -> PyTree:
        """Return what a region merges: moved by its own message, if that did not count.

        So its work stays with it, and is in its next message.
        """
        own = landed(flight.mean).uncounted
        if own is None:
            return outer
        return self._keep(outer, transfer.move(own, jax.tree.map(_where, outer)))

    def _observe(
        self, turn: Turn, event: Event, flight: InFlight, norm: jax.Array
    ) -> None:
        """Keep what the schedule needs to know of an applied mean."""
        k = event.fragment_id
        seen = {needs.NORM: norm, "times": flight.kept.get("times")}
        wanted = {n: x for n, x in seen.items() if n in self._schedule.needs}
        if self._is_seen:  # Not part of the outer step, which regions wait for.
            wanted |= self._see(self._outer.arrived(k, flight, turn.sync))
        if wanted:
            observed = (*turn.sync.observed, Observation(k, wanted))
            turn.sync = dataclasses.replace(turn.sync, observed=observed)


def _where(x: jax.Array) -> Any:
    return x.sharding


def _verdict(flight: InFlight) -> Any:
    """Return the verdict that came with a mean from other jobs, if one did."""
    return landed(flight.mean).verdict
