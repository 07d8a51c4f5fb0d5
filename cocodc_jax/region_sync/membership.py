"""One region of a run that others train without, and that may come back.

The regions of `exchange="elastic"` are separate jobs. This one announces itself, starts
from another region's memory where the others have begun, tells them how far it is, and
hands out copies to regions that wait. Where the others went on without it, it returns
with the work that it has done since (`train.joining`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cocodc_jax._version import __version__
from cocodc_jax.core.state import AppliedSync, InFlight, SyncId, TrainState, landed
from cocodc_jax.elastic import inside
from cocodc_jax.elastic.link import LeftBehindError, Link
from cocodc_jax.elastic.objects import reach
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.sync_program import SyncProgram
from cocodc_jax.engine.transfer import gather
from cocodc_jax.train import joining
from cocodc_jax.train.reporting import Reporter

PyTree = Any

# Beats in which a region that starts listens for others that have begun.
_LISTEN_BEATS = 4


class Membership:
    """A region's part in a run, from its first `join` to `close`.

    Attributes:
      regions: indices of the regions that take part, as this region knows it.
    """

    def __init__(
        self,
        program: SyncProgram,
        place: Place,
        run: str,
        should_stop: Callable[[], bool],
    ):
        if place.via:
            reach(place.via)  # A folder that is missing would lose all messages.

        self._num_processes = jax.process_count()
        if self._num_processes > 1 and place.late_mean == "merge":
            raise ValueError(
                "late_mean='merge' lets each process see by its own clock that a mean "
                f"is late, and this region has {self._num_processes} processes; use "
                "'wait'"
            )

        self._program = program
        self._place = place
        self._run = _digest(program, run)
        self._should_stop = should_stop
        self._link: Any = None
        self._reporter: Reporter | None = None
        self._in_flight: dict[SyncId, InFlight] = {}

        self._next_report_s = 0.0
        # With several processes, which report at the same steps.
        self._next_report_step = 0
        self._last_report_step = 0
        self._last_report_s = 0.0

    @property
    def regions(self) -> tuple[int, ...]:
        """Indices of the regions that take part, as this region knows it."""
        return tuple(sorted(self._link.view.seats)) if self._link else ()

    def join(
        self,
        state: TrainState,
        params: PyTree,
        key: jax.Array,
        carried: joining.Carried | None = None,
    ) -> TrainState:
        """Take part; return where this region starts: its own state, or the others'.

        Args:
          state: its own, new or from its checkpoint.
          params: one region's, of the program's shapes.
          key: PRNG key of the run.
          carried: the work of a region that the others went on without.

        Raises:
          TimeoutError: if no region lets this one in.
          LeftBehindError: if its checkpoint is ahead of the others.
        """
        self.close()
        link = self._open_link(state.step, carried)
        timing = self._place.timing

        if link.hears_others(_LISTEN_BEATS * timing.beat_s) and carried is None:
            self._rehearse(params, key)
            # A region may save and return before the others have done as many steps.
            link.wait_for_step(state.step, timing.start_s)
        copy = link.join(2 * timing.start_s + timing.grace_s)
        self._program.elastic.in_mean.clear()
        self._program.elastic.link = link
        self._reporter = Reporter(self._program, link)

        if copy is not None:
            if carried is None and state.step > copy.step:
                raise LeftBehindError(
                    f"the run is at step {copy.step}, and this region's own state at "
                    f"step {state.step}: of another run, or the others lost theirs"
                )
            if carried is not None:  # The copy is the coordinator's state.
                carried = carried.to_join(link.view.epoch.region)
            state = joining.adopt(self._program, params, key, copy, carried)
        self._last_report_step = state.step
        self._last_report_s = time.monotonic()
        self._next_report_step = state.step + 1
        return state

    def _open_link(self, step: int, carried: joining.Carried | None) -> Any:
        """Open the link to the other regions, of one process or of several."""
        place = self._place

        def make_link() -> Link:
            return Link(
                place,
                self._run,
                joining.max_frame_bytes(self._program),
                step,
                is_announced=False,
                last_boot=carried.boot if carried else None,
            )

        link = inside.of_process(
            place,
            jax.process_index(),
            jax.process_count(),
            make_link,
            gather,
            self._should_stop,
        )
        link.__enter__()
        link.should_stop = self._should_stop
        self._link = link
        return link

    def report(self, state: TrainState, applied: Sequence[AppliedSync] = ()) -> None:
        """Report to the others, see `Reporter.report`; nothing once the link ended."""
        if self._link is None or self._reporter is None:
            return

        assert state.sync is not None
        self._in_flight = state.sync.in_flight
        self._reporter.report(state, applied)
        self._note_report(state.step)

    def is_due(self, step: int) -> bool:
        """Return whether the last report was about a beat ago, or more."""
        if self._num_processes > 1:
            return step >= self._next_report_step
        return time.monotonic() >= self._next_report_s

    def _note_report(self, step: int) -> None:
        """Set when the next report is due.

        The clocks of a region's processes differ, but all have to report at one step:
        process 0 says at which, by the time that its last steps took.
        """
        now_s = time.monotonic()
        beat_s = self._place.timing.beat_s
        self._next_report_s = now_s + beat_s
        if self._num_processes == 1:
            return

        num_steps = step - self._last_report_step
        elapsed_s = max(now_s - self._last_report_s, 1e-9)
        steps_in_a_beat = int(beat_s * num_steps / elapsed_s)
        # The first steps compile; later ones may become slower.
        ahead = max(1, min(steps_in_a_beat, 2 * num_steps))

        self._last_report_step = step
        self._last_report_s = now_s
        self._next_report_step = step + self._link.agree(ahead)

    def finish(self) -> None:
        """Wait at the end of a run until the others need no decision of this region."""
        if self._link is not None:
            # What is in flight at the end is decided with the others still here.
            for flight in self._in_flight.values():
                landed(flight)
            self._link.finish(self._place.timing.grace_s)

    def leave(self) -> None:
        """Say that this region leaves, so that no other one waits for it."""
        if self._link is not None:
            self._link.leave()

    def close(self) -> None:
        """End the link."""
        if self._link is not None:
            self._program.elastic.link = None
            self._link.__exit__(None, None, None)
            self._link = None

    def _rehearse(self, params: PyTree, key: jax.Array) -> None:
        """Compile and run the programs of a full round, alone."""
        program = self._program
        schedule = program.method.schedule
        assert schedule is not None
        last_step = schedule.sync_interval + schedule.delay_steps + 1

        state = program.init(params, key)
        while True:
            ahead = program.steps_to_event(state)
            if not ahead or state.step + ahead > last_step:
                break
            state = dataclasses.replace(state, step=state.step + ahead)
            state, _ = program.apply_events(state)
        jax.block_until_ready(state.region.params)


def say_return(error: LeftBehindError) -> None:
    """Print that this region was left behind, and comes back."""
    print(f"{error}: coming back", file=sys.stderr, flush=True)


def _digest(program: SyncProgram, run: str) -> str:
    """Return a digest that is equal for two regions of one run."""
    sync = program.method.sync
    assert sync is not None

    rows = [
        repr(program.elastic.row_shape(k, 0)) for k in range(len(program.fragments))
    ]
    identity = {
        "run": run,
        "version": __version__,
        "method": program.method.name,
        # Functions are shown with their addresses, which differ.
        "schedule": re.sub(r" at 0x[0-9a-f]+", "", repr(sync.schedule)),
        "merge": sync.merge.name,
        "params": {
            path: f"{x.dtype}{x.shape}" for path, x in program.param_shapes.items()
        },
        "rows": rows,
    }

    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
