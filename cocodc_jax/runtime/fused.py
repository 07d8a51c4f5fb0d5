"""A fragment's start, the inner steps after it and its merge as one program.

Where regions share a fabric (slices of a TPU, GPUs) programs follow one another on a
device, and a message that is sent by a program of its own has it wait. In one program
with the scan of inner steps the compiler can begin the crossing before the scan and end
it after: the message crosses while the device computes. It does so for slices of a TPU
and for GPUs, as tests assert. Such a program is a *window*:

    encode, send                    of each fragment that starts at step s
    inner steps s .. s + T          T steps to the next event, or to where a run looks
    decode, outer step, merge       of one that started at s and arrives at s + T

What has crossed is tied to the losses of the steps, so that nothing which is made of it
comes before them: without that the compiler decodes a compressed message at once, and
waits for it.

**What overlaps.** A start is not carried out at once but handed to the window that
follows, which sends what the program of its own would have sent: nothing comes between.
With tau at most the H / K steps between two starts, T is tau: one window from a start
to its merge. With a longer tau a window ends at the next event of another fragment, its
mean leaves it and is *in flight* until its own step, as in the plain form: a message
has H / K steps to cross in, not tau. Likewise where an evaluation or a checkpoint cuts
the steps, and where regions may be left out of a mean (`sync.robust`), as they are
looked at before the merge. A checkpoint at the step of a start itself has the fragment
leave by the plain program, so that what is saved is the same, and so is what follows.
What crosses in the plain form only, and is not hidden: messages that arrive at the step
at which they leave; those a whole round late (`one_step_stale`), which leave before a
merge at the same step; of methods whose regions come one by one, whose messages' rank
follows the updates, or which average the inner optimizer's moments too.

**How many programs.** A window for each fragment, times the lengths T that occur: of a
schedule with regular starts one (two where tau is longer than H / K, as there is no
merge yet in the first round), and one more for each way in which evaluations and
checkpoints cut it.

Numbers are those of the plain form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.exchange.in_program import InProgram
from cocodc_jax.runtime.exchange.outgoing import Departure, start_step_of
from cocodc_jax.runtime.exchange.shared import SharedOuterModel
from cocodc_jax.runtime.listed import Listed, first_starts
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import InFlight, RegionState, SyncState
from cocodc_jax.runtime.window import Finished, Sent, Start, Told, make_window, tell
from cocodc_jax.sync import needs
from cocodc_jax.sync.needs import STAGED, STALE
from cocodc_jax.sync.schedules.base import (
    FINISH,
    Event,
    Schedule,
    nothing,
    replaced,
)

PyTree = Any

# How many collectives may be on their way at once on a GPU; XLA's own is 1. Those of a
# loop's body all count: one between regions spans it only if the limit is above them.
_GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 256}


class InnerSteps(NamedTuple):
    """The inner steps that windows hold.

    Attributes:
      run: of `step.make_steps`, not jitted.
      region: shardings of the `RegionState`.
      losses: sharding of what `[T, R]` they give.
    """

    run: Callable
    region: RegionState
    losses: NamedSharding


class Windows:
    """The compiled windows of a run."""

    def __init__(
        self,
        setting: Setting,
        outer: SharedOuterModel,
        route: InProgram,
        steps: InnerSteps,
    ):
        """Compile nothing yet.

        Args:
          setting: of the run.
          outer: the outer model.
          route: of messages that leave by a program of their own.
          steps: the inner steps.
        """
        self._setting, self._outer, self._route = setting, outer, route
        self._steps = steps
        sync, schedule = setting.sync, setting.sync.schedule
        # Whether starts may wait for the window that follows them.
        self.may_wait = not (
            schedule.is_by_region
            or schedule.init().in_flight
            or sync.moments
            or sync.message.is_ranked
            or STALE in sync.copies
        )
        self._programs: dict[tuple, Callable] = {}

    def finishing(self, sync: SyncState, step: int) -> Event | None:
        """Return the `FINISH` of `step` that a window to `step` carries out, if any.

        It is what happens first there, of a sync that leaves in this window.
        """
        schedule: Schedule = self._setting.sync.schedule
        leaving = {departure.event.sync_id for departure in sync.leaving}
        due = [
            pending.sync_id
            for pending in sync.schedule.in_flight
            if pending.apply_step == step and pending.sync_id in leaving
        ]
        if not due or self._setting.sync.robust:
            return None
        _, event = schedule.next_event(sync.schedule, step, nothing)
        if event is None or event.kind != FINISH:
            return None
        return event if event.sync_id in due else None

    def run(
        self,
        region: RegionState,
        sync: SyncState,
        batches: PyTree,
        participating: PyTree,
        step: int,
        frozen: PyTree,
    ) -> tuple[RegionState, SyncState, tuple, dict]:
        """Run a window.

        Args:
          region: donated.
          sync: with what leaves; the outer state of what arrives is donated.
          batches: `[T, R, ...]`, of the inner steps.
          participating: as of the inner steps.
          step: that the window leads to.
          frozen: of `TrainState`.

        Returns:
          The regions and the state after it, losses and aux of the inner steps, and
          `Finished` by the sync that was finished; it is in flight until its event
          comes up.
        """
        finish = self.finishing(sync, step)
        last = None if finish is None else finish.fragment_id
        which = tuple((d.event.fragment_id, d.event.rank) for d in sync.leaving)
        if (which, last) not in self._programs:
            self._programs[which, last] = self._make(which, last, sync)
        out = self._programs[which, last](
            region,
            batches,
            participating,
            tuple(self._start(each, sync, last) for each in sync.leaving),
            None if last is None else sync.outer.entry(last),
            self._told(finish, step, frozen),
        )
        return self._after(sync, out, finish)

    def listed(
        self,
        region: RegionState,
        sync: SyncState,
        batches: PyTree,
        participating: Any,
        num_bytes: Callable[[Event], int],
        frozen: PyTree,
    ) -> dict[int, tuple[Listed, bool]]:
        """List the first window of each fragment, cut by events alone.

        Args:
          region: abstract, as the others are.
          sync: before the first step.
          batches: of any number of inner steps, `[T, R, ...]`.
          participating: as of the inner steps.
          num_bytes: that one region sends for a sync.
          frozen: as of `run`, abstract.

        Returns:
          By the fragment the window, and whether it finishes what it starts.
        """
        found = {}
        for start, num_steps, finish in first_starts(self._setting.sync.schedule):
            k, last = start.fragment_id, None if finish is None else start.fragment_id
            of_steps = jax.tree.map(
                lambda x, n=num_steps: jax.ShapeDtypeStruct(
                    (n, *x.shape[1:]), x.dtype, sharding=x.sharding
                ),
                (batches, participating),
            )
            near = self._outer.abstract_near(k)
            sent = self._route.listed(k, region, near, sync.compressors[k])[1]
            compressor, weights, start_step = sent[2], sent[3], sent[5]
            given = None if k == last else self._outer.given(sync, k)
            starts = (Start(given, compressor, weights, start_step),)
            own = None if last is None else sync.outer.entry(last)
            listed = Listed(
                f"start fragment {k}, inner steps{'' if last is None else ', merge'}",
                self._make(((k, 0),), last, sync),
                (region, *of_steps, starts, own, self._told(finish, num_steps, frozen)),
                num_bytes(start),
                num_steps,
                self._options,
            )
            found[k] = listed, last is not None
        return found

    def _start(self, departure: Departure, sync: SyncState, last: int | None) -> Start:
        k = departure.event.fragment_id
        return Start(
            None if k == last else self._outer.given(sync, k),
            sync.compressors[k],
            self._route.weights(departure.weights),
            start_step_of(self._setting, departure.event),
        )

    def _told(self, finish: Event | None, step: int, frozen: PyTree) -> Told:
        if finish is None:
            return Told(frozen)
        return tell(self._setting, frozen, step, finish.start_step)

    def _after(self, sync: SyncState, out: tuple, finish: Event | None) -> tuple:
        region, losses, sent, own, finished = out
        compressors, flights = sync.compressors, dict(sync.in_flight)
        for departure, each in zip(sync.leaving, sent, strict=True):
            compressors = replaced(
                compressors, departure.event.fragment_id, each.compressor
            )
            copies = {} if each.staged is None else {STAGED: each.staged}
            flights[departure.event.sync_id] = InFlight(each.mean, each.told | copies)
        outer, done = sync.outer, {}
        if finish is not None:
            outer = outer.updated(finish.fragment_id, *own)
            done[finish.sync_id] = finished
        sync = dataclasses.replace(
            sync, outer=outer, compressors=compressors, in_flight=flights, leaving=()
        )
        return region, sync, losses, done

    def _make(self, leaving: tuple, last: int | None, sync: SyncState) -> Callable:
        """Wrap a window in one jit; see `make_window`."""
        setting, shardings = self._setting, self._setting.shardings
        is_seen = any(needs.NEEDS[n].of_mean for n in setting.sync.schedule.needs)
        sent = []
        for k, _ in leaving:
            keeps = STAGED in setting.sync.copies and k != last
            told = self._route.abstract_told(k)
            sent.append(
                Sent(
                    shardings.staged[k] if keeps else None,
                    shardings.fragments[k] if k != last or is_seen else None,
                    {name: x.sharding for name, x in told.items()},
                    shardings.of_regions(k, sync.compressors[k]),
                )
            )
        own = finished = None
        if last is not None:
            own = self._outer.where.entry(last)
            one = NamedSharding(setting.mesh, P())
            finished = Finished(one, shardings.region.key)
        return jax.jit(
            make_window(self._outer.place, self._steps.run, leaving, last, is_seen),
            donate_argnums=(0, 4),
            out_shardings=(
                self._steps.region,
                self._steps.losses,
                tuple(sent),
                own,
                finished,
            ),
            compiler_options=dict(self._options),
        )

    @property
    def _options(self) -> Mapping[str, Any]:
        """Of the compiler, by platform."""
        platform = self._setting.mesh.devices.flat[0].platform
        return _GPU_OPTIONS if platform in ("gpu", "cuda") else {}
