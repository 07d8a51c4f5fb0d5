"""The events of a schedule, carried out on devices.

The order at a step is the schedule's (`sync.schedules`), the same on every region.
Nothing here waits for a device, but for two things. A schedule that chooses by what was
applied reads it before it chooses, at the next slot. And on CPU devices, which share
few threads, a program with collectives waits for the one before: two at once could each
hold threads that the other needs, for ever. `arrivals.py` may wait for other jobs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from cocodc_jax.runtime.arrivals import Arrivals
from cocodc_jax.runtime.beginning import Beginning
from cocodc_jax.runtime.departures import Departures
from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.devices.mesh import is_cpu
from cocodc_jax.runtime.devices.shardings import with_shardings
from cocodc_jax.runtime.exchange.in_program import InProgram
from cocodc_jax.runtime.exchange.model_state import make_average
from cocodc_jax.runtime.exchange.moments import MomentPrograms
from cocodc_jax.runtime.exchange.regional import RegionalOuterModels
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.exchange.transport import Route
from cocodc_jax.runtime.fused import InnerSteps, Windows
from cocodc_jax.runtime.listed import Listed
from cocodc_jax.runtime.merge import make_gap
from cocodc_jax.runtime.restore import Restore
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import (
    RegionState,
    SyncId,
    SyncState,
    TrainState,
)
from cocodc_jax.runtime.turns import AppliedSync, Times, Turn, Turns
from cocodc_jax.runtime.window import Finished
from cocodc_jax.sync import needs
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.robust import LENGTH_BYTES
from cocodc_jax.sync.schedules.base import (
    FINISH,
    MIDWAY,
    START,
    Applied,
    Event,
    Pending,
    events_at,
)

PyTree = Any


class SyncPrograms:
    """The compiled programs of every fragment, run as the schedule's events say."""

    def __init__(
        self,
        setting: Setting,
        route: Route,
        optimizer: optax.GradientTransformation,
        steps: InnerSteps,
    ):
        """Wrap every program in one jit.

        Args:
          setting: of the run.
          route: that messages take.
          optimizer: the inner optimizer.
          steps: the inner steps, for windows.

        Raises:
          ValueError: if a part of the method needs what is not given.
        """
        self._setting, self._schedule = setting, setting.sync.schedule
        outer, self._route = setting.sync.outer, route
        self._outer = (
            RegionalOuterModels(setting, outer)
            if isinstance(outer, RegionalOuter)
            else SharedOuterModel(setting, outer, route)
        )
        self._moments = (
            MomentPrograms(
                setting, route, jax.eval_shape(optimizer.init, setting.params)
            )
            if setting.sync.moments
            else None
        )
        self._windows = None
        if setting.is_fused:
            assert isinstance(self._outer, SharedOuterModel)
            assert isinstance(route, InProgram)
            self._windows = Windows(setting, self._outer, route, steps)
        self._average_state = make_average(setting)
        self._restore = None
        if isinstance(self._outer, SharedOuterModel) and setting.sync.robust:
            self._restore = Restore(setting, self._outer, optimizer)
        # On the outer mesh a message has a device, and so its threads, to itself.
        is_inside = is_cpu(setting.mesh) and route.shares_mesh
        self._turns = Turns(is_inside and setting.mesh.devices.size > 1)
        self._departures = Departures(
            setting, route, self._outer, self._moments, self._windows, self._turns
        )
        self.run_window = self._departures.run_window
        self._arrivals = Arrivals(
            setting, route, self._outer, self._departures, self._restore, self._turns
        )
        shardings = setting.shardings
        self._copy = [
            jax.jit(
                functools.partial(setting.fragments.take, fragment_id=k, lead=1),
                out_shardings=shardings.staged[k],
            )
            for k in range(len(setting.fragments))
        ]
        self._gaps = {n: jax.jit(make_gap(setting, n)) for n in needs.MEASURED_NOW}
        beginning = Beginning(setting, self._outer, self._copy)
        self.init, self.abstract = beginning.init, beginning.abstract
        self._do = {
            START: self._departures.start,
            MIDWAY: self._look_midway,
            FINISH: self._arrivals.finish,
        }

    def listed(
        self,
        region: RegionState,
        sync: SyncState,
        batches: PyTree,
        participating: Any,
        frozen: PyTree,
    ) -> list[Listed]:
        """List the programs that syncs run on the inner mesh.

        Args:
          region: abstract, as the others are.
          sync: of a message without a rank.
          batches: of the inner steps, `[T, R, ...]`.
          participating: likewise.
          frozen: of `TrainState`.
        """
        setting = self._setting
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches
        )
        windows = {}
        if self._windows is not None and self._windows.may_wait:
            windows = self._windows.listed(
                region,
                sync,
                batches,
                participating,
                self._departures.sent_bytes,
                frozen,
            )
        found = []
        for k, merge in enumerate(self._arrivals.merges):
            copy = with_shardings(
                jax.eval_shape(self._copy[k], region.params),
                setting.shardings.staged[k],
            )
            copies = {
                n: copy for n in needs.REGIONAL_COPIES if n in setting.sync.copies
            }
            arguments = self._arrivals.abstract(k, region, copies, batch, frozen)
            of_fragment = self._outer.listed(k, region, sync)
            of_fragment.append(Listed(f"merge fragment {k}", merge, arguments))
            if k in windows:
                window, finishes = windows[k]
                of_fragment = [window, *(() if finishes else of_fragment[1:])]
            found += of_fragment
        if self._moments:
            found += self._moments.listed(region.opt_state)
        if self._average_state is not None:
            states = (region.model_state, self._judged(region))
            found.append(Listed("mean of model state", self._average_state, states))
        return found

    def after_steps(
        self,
        state: TrainState,
        batches: PyTree,
        num_steps: int,
        times: Times = (0.0, 0.0),
        finished: dict[SyncId, Finished] | None = None,
    ) -> tuple[TrainState, tuple[AppliedSync, ...]]:
        """Carry out the events of `state.step`.

        Args:
          state: region parameters and outer state are donated.
          batches: leaves `[T, R, ...]`, or with more behind.
          num_steps: T, the inner steps just done.
          times: seconds of an inner step and of a sync as this process has measured
            them, 0 for not yet; for schedules that go by them.
          finished: what a window that led here did of syncs that arrive now.
        """
        last = None
        if needs.wants_batch(self._setting.sync.merge.needs):
            last = jax.tree.map(lambda x: x[num_steps - 1], batches)
        turn = Turn(self, state, last, times, finished)
        for schedule, event in events_at(
            self._schedule, turn.sync.schedule, state.step, turn.observe
        ):
            if event is not None:
                self._do[event.kind](turn, event)
            turn.sync = dataclasses.replace(turn.sync, schedule=schedule)
        if turn.late:
            schedule = turn.sync.schedule
            flying = (*turn.late, *schedule.in_flight)
            schedule = dataclasses.replace(schedule, in_flight=flying)
            turn.sync = dataclasses.replace(turn.sync, schedule=schedule)
        if turn.applied and self._average_state is not None:
            self._average_model_state(turn, self._average_state)
        sent = state.bytes_sent + turn.bytes_sent
        after = dataclasses.replace(
            state, region=turn.region, sync=turn.sync, bytes_sent=sent
        )
        return after, tuple(turn.applied)

    def settle(self, state: TrainState) -> TrainState:
        """Have what waits for inner steps leave now, by programs of its own."""
        assert state.sync is not None
        if not state.sync.leaving:
            return state
        turn = Turn(self, state)
        self._departures.settle(turn)
        return dataclasses.replace(state, region=turn.region, sync=turn.sync)

    def land(self, state: TrainState) -> tuple[TrainState, tuple[Pending, ...]]:
        """Apply all that is in flight now, oldest first, as if it had arrived.

        Where messages are a whole round late, what regions did since then leaves before
        and is applied too, as at the end of a round: their merge replaces it.

        Args:
          state: donated.

        Returns:
          The state with nothing in flight, and what could not be applied and was
          dropped: where merges need the last batch, or a copy of halfway that is not
          there yet, all of it.
        """
        turn = Turn(self, self.settle(state))
        schedule, copies = turn.sync.schedule, self._setting.sync.copies
        flying = list(schedule.in_flight)
        lacks_copy = needs.HALFWAY in copies and any(
            needs.HALFWAY not in turn.sync.in_flight[p.sync_id].kept for p in flying
        )
        dropped: tuple[Pending, ...] = ()
        if lacks_copy or needs.wants_batch(self._setting.sync.merge.needs):
            dropped, flying = tuple(flying), []
        elif state.step and self._schedule.init().in_flight:
            for k, last in enumerate(schedule.last_start):
                if last < state.step and needs.HALFWAY not in copies:
                    pending = Pending(k, state.step, state.step, rank=schedule.rank)
                    start = pending.event(START)._replace(since_step=max(last, 0))
                    self._departures.start(turn, start)
                    flying.append(pending)
        for pending in flying:
            self._arrivals.apply(turn, pending.event(FINISH))
        sync = dataclasses.replace(
            turn.sync,
            schedule=self._schedule.landed(schedule),
            in_flight={},
        )
        sent = state.bytes_sent + turn.bytes_sent
        landed = dataclasses.replace(
            state, region=turn.region, sync=sync, bytes_sent=sent
        )
        return landed, dropped

    def synchronize(self, sync: SyncState) -> SyncState:
        """Tell the schedule of every update applied; waits for what it needs."""
        schedule = sync.schedule
        for applied in self.read(sync):
            schedule = self._schedule.learn(schedule, applied)
        return dataclasses.replace(sync, schedule=schedule, observed=())

    def read(self, sync: SyncState) -> list[Applied]:
        """Read what the schedule has not been told; waits for it."""
        num_params = self._setting.fragments.num_params
        return [
            Applied(k, num_params[k], {name: _plain(x) for name, x in seen.items()})
            for k, seen in sync.observed
        ]

    def measure(self, name: str, region: RegionState, sync: SyncState) -> list[float]:
        """Measure a need of `needs.MEASURED_NOW`; waits for it."""
        each = range(len(self._setting.fragments))
        outer = tuple(self._outer.on_mesh(sync, k) for k in each)
        return np.asarray(self._gaps[name](region.params, outer)).tolist()

    def restore(
        self, region: RegionState, sync: SyncState, bad: np.ndarray
    ) -> tuple[RegionState, SyncState]:
        """Have the regions `bad`, bool `[R]`, begin anew; see `restore.py`."""
        assert self._restore is not None
        return self._restore(region, sync, bad)

    def outer_params(self, state: TrainState, mean: Any) -> PyTree:
        """Return the outer parameters on the mesh; `mean` is over regions."""
        assert state.sync is not None
        return self._outer.whole(state.sync, state.region, mean)

    def compressors_of(self, sync: SyncState, rank: int) -> PyTree:
        """Return what regions remember of messages, as of messages of `rank`."""
        if rank == sync.schedule.rank:
            return sync.compressors
        assert isinstance(self._outer, SharedOuterModel)
        return self._outer.compressors.resized(sync, rank)

    def copy(self, region: RegionState, fragment_id: int) -> PyTree:
        """Return a copy of the regions' fragment as it is now."""
        return self._copy[fragment_id](region.params)

    def _average_model_state(self, turn: Turn, average: Callable) -> None:
        assert self._setting.model_state is not None
        self._turns.wait()
        region = turn.region
        model_state, one = average(region.model_state, self._judged(region))
        self._turns.took(one)
        turn.region = region._replace(model_state=model_state)
        turn.bytes_sent += self._setting.model_state.averaged_bytes
        turn.bytes_sent += LENGTH_BYTES if self._setting.sync.robust else 0

    def _judged(self, region: RegionState) -> PyTree:
        """Return what it goes by whose model's state counts; None where all do."""
        return region.params if self._setting.sync.robust else None

    def _look_midway(self, turn: Turn, event: Event) -> None:
        """Keep a copy of a fragment that is halfway to its merge."""
        self._departures.settle(turn)
        copy = self._copy[event.fragment_id](turn.region.params)
        flight = turn.sync.in_flight[event.sync_id].with_kept(needs.HALFWAY, copy)
        flights = {**turn.sync.in_flight, event.sync_id: flight}
        turn.sync = dataclasses.replace(turn.sync, in_flight=flights)


def _plain(x: jax.Array) -> Any:
    """Read an observed value: a number, or a row for every region."""
    return float(x) if x.ndim == 0 else transfer.local_rows(x).tolist()
