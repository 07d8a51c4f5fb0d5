"""What a run has besides its regions before the first step, and what is in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.devices.shardings import with_shardings
from cocodc_jax.runtime.exchange.regional import RegionalOuterModels
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import InFlight, RegionState, SyncState
from cocodc_jax.sync import needs
from cocodc_jax.sync.schedules.base import Pending

PyTree = Any


class Beginning:
    """First states of syncs, and the shapes of later ones."""

    def __init__(
        self,
        setting: Setting,
        outer: SharedOuterModel | RegionalOuterModels,
        copy: list[Callable],
    ):
        """Compile nothing.

        Args:
          setting: of the run.
          outer: the outer model.
          copy: for each fragment what copies it from the regions' parameters.
        """
        self._setting, self._outer, self._copy = setting, outer, copy

    def init(
        self, params: PyTree, region: RegionState, schedule: Any = None
    ) -> SyncState:
        """Return what a run has besides its regions before the first step.

        Args:
          params: one region's parameters, on the mesh.
          region: of all regions.
          schedule: the schedule's state, what is in flight messages of zero; None is
            that before the first step.
        """
        if schedule is None:
            schedule = self._setting.sync.schedule.init()
        sync = self._outer.init(params, schedule)
        flights = {
            pending.sync_id: self._first_flight(pending, params, region)
            for pending in sync.schedule.in_flight
        }
        return dataclasses.replace(sync, in_flight=flights)

    def _first_flight(
        self, pending: Pending, params: PyTree, region: RegionState
    ) -> InFlight:
        """Make the message of zero that arrives at a stale schedule's first slot."""
        k = pending.fragment_id
        flight: InFlight = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
            self._outer.abstract_flight(k),
        )
        if needs.STAGED in self._setting.sync.copies:
            flight = flight.with_kept(needs.STAGED, self._copy[k](region.params))
        stale = flight.kept.get(needs.STALE)
        if stale is not None:
            part = self._setting.fragments.take(params, k)
            where = jax.tree.map(lambda x: x.sharding, stale)
            copy = jax.tree.map(
                lambda x, like: jnp.array(x, like.dtype, copy=True),
                transfer.move(part, where),
                stale,
            )
            flight = flight.with_kept(needs.STALE, copy)
        return flight

    def abstract(self, schedule: Any, region: RegionState) -> SyncState:
        """Return shapes and shardings of the state at which `schedule` was taken.

        Args:
          schedule: the schedule's state, which tells what is in flight.
          region: abstract.
        """
        sync = self._outer.abstract(schedule)
        flights = {}
        for pending in schedule.in_flight:
            k = pending.fragment_id
            flight = self._outer.abstract_flight(k)
            copy = with_shardings(
                jax.eval_shape(self._copy[k], region.params),
                self._setting.shardings.staged[k],
            )
            copies = self._setting.sync.copies
            if needs.STAGED in copies:
                flight = flight.with_kept(needs.STAGED, copy)
            if needs.HALFWAY in copies and pending.midway_step is None:
                flight = flight.with_kept(needs.HALFWAY, copy)
            flights[pending.sync_id] = flight
        return dataclasses.replace(sync, in_flight=flights)
