"""How fragments leave the regions: at once, or with the inner steps that follow."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cocodc_jax.runtime.exchange.moments import MomentPrograms
from cocodc_jax.runtime.exchange.outgoing import Departure
from cocodc_jax.runtime.exchange.regional import RegionalOuterModels
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.exchange.transport import Route
from cocodc_jax.runtime.fused import Windows
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import SyncId, TrainState
from cocodc_jax.runtime.turns import Turn, Turns
from cocodc_jax.runtime.window import Finished
from cocodc_jax.sync.schedules.base import Event

PyTree = Any


class Departures:
    """Starts of syncs, carried out."""

    def __init__(
        self,
        setting: Setting,
        route: Route,
        outer: SharedOuterModel | RegionalOuterModels,
        moments: MomentPrograms | None,
        windows: Windows | None,
        turns: Turns,
    ):
        """Compile nothing.

        Args:
          setting: of the run.
          route: that messages take.
          outer: the outer model.
          moments: of the inner optimizer, if they are averaged too.
          windows: where syncs and inner steps are one program.
          turns: that programs with collectives take.
        """
        self._setting, self._route, self._outer = setting, route, outer
        self._moments, self._windows, self._turns = moments, windows, turns

    def start(self, turn: Turn, event: Event) -> None:
        """Have a fragment leave, now or with the inner steps that follow."""
        regions = self._setting.regions
        weights = regions.weights(
            event.since_step,
            event.start_step,
            self._setting.sync.weigh,
            event.participating,
        )
        departure = Departure(event, tuple(weights.tolist()), turn.times)
        if self._windows is not None and self._windows.may_wait:
            leaving = (*turn.sync.leaving, departure)
            turn.sync = dataclasses.replace(turn.sync, leaving=leaving)
        else:
            self._depart(turn, departure)
        # Regions that send at different times count as one of them at each time.
        share = 1 / regions.num if self._setting.sync.schedule.is_by_region else 1
        turn.bytes_sent += round(self.sent_bytes(event) * share)

    def _depart(self, turn: Turn, departure: Departure) -> None:
        """Send a fragment by a program of its own."""
        event = departure.event
        self._turns.wait()
        turn.sync, flight = self._outer.send(departure, turn.region, turn.sync)
        self._turns.took(flight.mean)
        if self._moments and (due := self._moments.due(event)):
            self._turns.wait()
            opt_state, mean = self._moments.average(
                turn.region.opt_state, departure.weights, due
            )
            self._turns.took(mean)
            turn.region = turn.region._replace(opt_state=opt_state)
        flights = {**turn.sync.in_flight, event.sync_id: flight}
        turn.sync = dataclasses.replace(turn.sync, in_flight=flights)

    def settle(self, turn: Turn) -> None:
        """Have what waits for inner steps leave now, by programs of its own."""
        for departure in turn.sync.leaving:
            self._depart(turn, departure)
        turn.sync = dataclasses.replace(turn.sync, leaving=())

    def run_window(
        self, state: TrainState, batches: PyTree, participating: PyTree, step: int
    ) -> tuple[TrainState, tuple, dict[SyncId, Finished]] | None:
        """Run the inner steps with what leaves before them.

        Args:
          state: donated.
          batches: of the steps, `[T, R, ...]`, on the mesh.
          participating: as of the inner steps.
          step: that they lead to.

        Returns:
          The regions and syncs after it (at the step before), `(losses, aux)`, and
          `finished` for `after_steps`; None where nothing leaves, and nothing is done.
        """
        if self._windows is None or state.sync is None or not state.sync.leaving:
            return None
        self._turns.wait()
        region, sync, losses, finished = self._windows.run(
            state.region, state.sync, batches, participating, step, state.frozen
        )
        self._turns.took(losses)
        return dataclasses.replace(state, region=region, sync=sync), losses, finished

    def sent_bytes(self, event: Event) -> int:
        """Count what one region sends for a sync, moments included."""
        num_bytes = self.message_bytes(event.fragment_id, event.rank)
        if self._moments:
            num_bytes += self._moments.num_bytes(self._moments.due(event))
        return num_bytes

    @functools.cache  # noqa: B019  (as long as the programs)
    def message_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes that one region sends for a sync; a region alone none."""
        if self._route.num_regions == 1:
            return 0
        return self._outer.num_bytes(fragment_id, rank)
