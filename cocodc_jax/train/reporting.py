"""A region's reports to the others after its events, and the admission of regions."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cocodc_jax.core.state import AppliedSync, PyTree, TrainState, landed
from cocodc_jax.elastic.inside import ProcessLink
from cocodc_jax.elastic.link import LeftBehindError
from cocodc_jax.elastic.messages import Mark
from cocodc_jax.engine.digests import Marker
from cocodc_jax.engine.sync_program import SyncProgram
from cocodc_jax.train import joining


class Reporter:
    """Reports a region's progress over one link.

    Attributes:
      missed: regions that left with the last change of view.
      shared: the last outer parameters in common with them; None if `missed` is empty.
    """

    def __init__(self, program: SyncProgram, link: ProcessLink):
        self._program = program
        self._link = link
        self._view = link.view
        self.missed: frozenset[int] = frozenset()
        self.shared: PyTree = None
        # With late merges, regions take equal outer steps at different times.
        self._compares = link.place.late_mean == "wait"
        self._marker = Marker()

    def report(self, state: TrainState, syncs: Sequence[AppliedSync] = ()) -> None:
        """Report this region's progress, and admit the regions that wait.

        Args:
          state: after the events of its step.
          syncs: those that were merged since the last report. Regions compare their
            outer models after these.

        Raises:
          LeftBehindError: if the others went on without this region, or its outer model
            differs from theirs; `state` of the error is what the region carries on.
          SupersededError: if this region was started again elsewhere.
        """
        assert state.sync is not None
        starts = [start for _, start in state.sync.in_flight]
        oldest = min(starts, default=state.step)
        self.note_shared(state)

        marks = self.mark(state, syncs) if self._compares else ()
        try:
            waiting = self._link.at(oldest, marks)
        except LeftBehindError as error:
            # If this region leads the run again, no mean of this link reaches others.
            flights = {k: landed(x) for k, x in state.sync.in_flight.items()}
            sync = dataclasses.replace(state.sync, in_flight=flights)
            state = dataclasses.replace(state, sync=sync)
            error.state = joining.Carried(
                state, self.shared, self.missed, self._link.boot
            )
            raise

        for region, boot in waiting.items():
            copy = joining.copy_of(self._program, state)
            self._link.let_in(region, boot, copy, oldest)

    def mark(self, state: TrainState, syncs: Sequence[AppliedSync]) -> Sequence[Mark]:
        """Return marks of outer fragments after earlier syncs, without waiting."""
        assert state.sync is not None
        last = {sync.fragment_id: sync.start_step for sync in syncs}
        for k, start_step in last.items():
            self._marker.applied((k, start_step), state.sync.outer.params[k])
        return self._marker.ready()

    def note_shared(self, state: TrainState) -> None:
        """Keep the last outer parameters that both parts of a cut network share.

        They are those at the end of the turn in which the other part's regions were
        first missed. Which part goes on is not known yet.
        """
        assert state.sync is not None
        before = self._view
        self._view = self._link.view
        now = self._view.seats.keys()
        if missed := before.seats.keys() - now:
            self.missed = frozenset(missed)
            self.shared = jax.tree.map(jnp.copy, state.sync.outer.params)
        self.missed -= now
        if not self.missed:
            self.shared = None
