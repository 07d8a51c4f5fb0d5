"""A region that is a job of its own: how it takes part in a run, and comes back to it.

Each region runs the same command with another `--region_id`. It listens first whether
the others have begun. Where they have, it compiles and tries out its programs before
it asks to be let in, so that nobody waits for that; then it goes on from the memory of
one of them. A region that all others went on without, cut off or only silent, is let in
again as soon as it hears of them: with its own inner optimizer, and at the outer
parameters moved by what it did since the last outer step that it shared with them, so
that this work is in its next messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from cocodc_jax.data.streams import TrainStream
from cocodc_jax.run.agreement import code_digest, gather
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.resume import ResumeError
from cocodc_jax.run.watching import FaultWatch
from cocodc_jax.runtime.exchange.jobs import BetweenJobs
from cocodc_jax.runtime.loop import joining
from cocodc_jax.runtime.loop.hooks import Hooks
from cocodc_jax.runtime.membership import inside
from cocodc_jax.runtime.membership.link import LeftBehindError, Link
from cocodc_jax.runtime.membership.messages import Snapshot, View
from cocodc_jax.runtime.membership.place import Place
from cocodc_jax.runtime.program import Output, RegionProgram
from cocodc_jax.runtime.running import MAX_SCAN_STEPS, scan_steps
from cocodc_jax.runtime.state import TrainState

SYNCS_FILE, JOINS_FILE = "syncs.jsonl", "joins.jsonl"
_LISTEN_BEATS = 4
_TAIL_BYTES = 65536  # Of the merges: the last whole line is among them.


class Attendance:
    """One region's part in a run, from its start to its end.

    Attributes:
      step: the last that the others were told of.
    """

    def __init__(
        self,
        program: RegionProgram,
        link: Link | inside.Speaker | inside.Listener,
        folder: pathlib.Path,
        digests: bool,
    ):
        """Write to the region's own folder.

        Args:
          program: of the region.
          link: to the others.
          folder: of the region.
          digests: whether to write digests of outer fragments.
        """
        assert isinstance(program.route, BetweenJobs)
        self._program, self._route, self._link = program, program.route, link
        self._folder, self._digests = folder, digests
        self._view, self.step = link.view, 0
        self._shared: Any = None

    def told_by(self, hooks: Hooks) -> Hooks:
        """Return a loop's hooks by which the others are told of this region."""
        return dataclasses.replace(
            hooks, handed_out=self.handed_out, stopping=self.leave
        )

    def leave(self) -> None:
        """Tell the others to do without this region, which was asked to stop."""
        print(
            f"asked to stop: leaving the other regions at step {self.step}",
            file=sys.stderr,
            flush=True,
        )
        self._link.leave()

    def finish(self) -> None:
        """Stay until the other regions have what they need of this one to end too."""
        self._link.finish(self._link.place.timing.grace_s)

    def handed_out(self, state: TrainState, output: Output) -> None:
        """Tell the others how far this region is; let in who waits for it."""
        assert state.sync is not None
        starts = [start for _, start in state.sync.in_flight]
        self.step, oldest = state.step, min(starts, default=state.step)
        self._note_shared(state)
        try:
            waiting = self._link.at(oldest)
        except LeftBehindError as error:
            error.state = joining.Carried(state, self._shared)
            raise
        for region, boot in waiting.items():
            copy = joining.copy_of(self._program, state)
            self._link.let_in(region, boot, copy, oldest)
        for sync in output.syncs:
            k = sync.fragment_id
            line = {
                "fragment": k,
                "start_step": sync.start_step,
                "apply_step": sync.apply_step,
                "epoch": self._link.view.epoch,
                "regions": self._route.in_mean.pop((k, sync.start_step), None),
                "time": time.time(),
            }
            if self._digests:
                line["digest"] = _digest(state.sync.outer.params[k])
            self._write(SYNCS_FILE, line)

    def _note_shared(self, state: TrainState) -> None:
        """Keep the outer parameters that a run cut in two had in common.

        They are those at the end of the turn in which regions were first missed; nobody
        knows which part of it will go on.
        """
        assert state.sync is not None
        before, self._view = self._view, self._link.view
        if before.seats.keys() - self._view.seats.keys():
            if self._shared is None:
                self._shared = jax.tree.map(jax.numpy.copy, state.sync.outer.params)
        elif self._view.seats.keys() - before.seats.keys():
            self._shared = None

    def joined(self, line: dict[str, Any]) -> None:
        """Note that this region takes part now."""
        self._write(JOINS_FILE, line)

    def _write(self, name: str, line: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _digest(fragment: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(fragment):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def run_digest(config: TrainConfig, fingerprint: str) -> str:
    """Return what two jobs have in common if they are of one run."""
    text = json.dumps([config.to_json(), code_digest(), fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def taking_part(
    place: Place,
    run: str,
    program: RegionProgram,
    folder: pathlib.Path,
    begun: tuple[TrainState, dict | None, dict],
    stream: TrainStream,
    make_params: Callable[[], tuple[Any, jax.Array]],
    digests: bool,
    watch: FaultWatch | None = None,
    carried: joining.Carried | None = None,
) -> Iterator[tuple[tuple[TrainState, dict | None, dict], Attendance]]:
    """Take part in a run until the end of the context.

    Args:
      place: of the region.
      run: `run_digest`.
      program: of the region.
      folder: of the region.
      begun: state, sums and positions of the region's own checkpoint, or of step 0.
      stream: of the region, where `begun` is.
      make_params: makes one region's first parameters, and the key of the run.
      digests: whether to write digests of outer fragments.
      watch: names what is faulty.
      carried: what the region had done when the others went on without it; `begun` is
        that state then.

    Yields:
      State, sums and positions to go on from, and what has to be told of every turn.

    Raises:
      ValueError: if the region cannot listen.
      LeftBehindError: if the others go on without this region.
      TimeoutError: if nobody lets it in.
      ResumeError: if it would begin anew, without all others, a run that it was in.
    """
    assert isinstance(program.route, BetweenJobs)
    own, _, position = begun
    began_s = time.monotonic()
    largest = joining.max_frame_bytes(program)
    link = inside.of_process(
        place,
        jax.process_index(),
        jax.process_count(),
        lambda: Link(place, run, largest, own.step, is_announced=False, watch=watch),
        gather,
    )
    with link:
        listen_s = _LISTEN_BEATS * place.timing.beat_s
        seconds = {"listened": listen_s, "rehearsed": 0.0}
        initial = stream.get_state()
        if link.hears_others(listen_s) and carried is None:
            rehearse(program, make_params, stream)
            stream.set_state(initial)
            seconds["rehearsed"] = time.monotonic() - began_s - listen_s
            # Who was asked to stop saved all its steps, and may be back before the
            # others have done as many: data are not gone back in.
            link.wait_for_step(own.step, place.timing.start_s)
        asked_s = time.monotonic()
        # Others have as long to start, and then as long to come to a turn's end.
        copy = link.join(2 * place.timing.start_s + place.timing.grace_s)
        if copy is None:
            _begins(place, link.view, own.step, max(gather(_reached(folder))))
        program.route.in_mean.clear()
        program.route.link = link
        if copy is not None:
            begun = (
                _go_on(program, copy, own.step, stream, make_params, carried),
                None,
                {"seconds": position.get("seconds", 0.0)},
            )
        attendance = Attendance(program, link, folder, digests)
        seconds["let_in"] = time.monotonic() - asked_s
        attendance.joined(
            {
                "step": begun[0].step,
                "own_step": own.step,
                "from_peer": copy is not None,
                "carried": carried is not None,
                "epoch": link.view.epoch,
                "regions": sorted(link.view.seats),
                "seconds": seconds,
                "time": time.time(),
            }
        )
        try:
            yield begun, attendance
        finally:
            program.route.link = None


def _begins(place: Place, view: View, own_step: int, reached: int) -> None:
    """Say where this region begins if not all are there, and whether it may.

    Args:
      place: of the region.
      view: who takes part.
      own_step: of its own checkpoint, 0 for none.
      reached: the last step that it is known to have come to.

    Raises:
      ResumeError: if it was further and has no checkpoint: the others may have ended.
    """
    missing = [r for r in range(place.num_regions) if r not in view.seats]
    if not missing:
        return
    waited = f"did not answer within start_s={place.timing.start_s:g}"
    if not own_step and reached:
        raise ResumeError(
            f"region {place.region} took part in this run up to step {reached} and has "
            f"no checkpoint of it, and regions {missing} {waited}: they have ended, or "
            "cannot be reached. Start them again, wait for longer, or name another "
            "workdir to begin anew"
        )
    print(
        f"regions {missing} {waited}: region {place.region} goes on without them from "
        f"step {own_step}{' of its own checkpoint' if own_step else ''}",
        file=sys.stderr,
        flush=True,
    )


def _reached(folder: pathlib.Path) -> int:
    """Return the last step whose merge a region has noted, 0 for none."""
    try:
        with (folder / SYNCS_FILE).open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    for line in reversed(lines[:-1]):  # A kill may have cut off the last.
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(line)["apply_step"]
    return 0


def rehearse(
    program: RegionProgram,
    make_params: Callable[[], tuple[Any, jax.Array]],
    stream: TrainStream,
) -> None:
    """Compile and try out the programs of a whole round, alone and for nothing."""
    schedule = program.method.schedule
    assert schedule is not None
    state = program.init(*make_params())
    batch = next(stream)
    end = schedule.sync_interval + schedule.delay_steps + 1
    while state.step < end:
        ahead = program.steps_to_event(state) or MAX_SCAN_STEPS
        batches = np.stack([batch] * scan_steps(program.mesh, ahead))
        state, _ = program.advance(state, batches)
    jax.block_until_ready(state.region)


def _go_on(
    program: RegionProgram,
    copy: Snapshot,
    own_step: int,
    stream: TrainStream,
    make_params: Callable[[], tuple[Any, jax.Array]],
    carried: joining.Carried | None,
) -> TrainState:
    """Return the state made of a copy, with the data where that is, or further."""
    if own_step > copy.step and carried is None:
        raise ValueError(
            f"the run is at step {copy.step}, and this region's own checkpoint at step "
            f"{own_step}: of another run, or the others lost theirs; name another "
            "workdir, or restore theirs"
        )
    print(f"going on from another region's step {copy.step}", file=sys.stderr)
    params, key = make_params()
    state = joining.adopt(program, params, key, copy, carried)
    for _ in range(copy.step - own_step):
        next(stream)
    return state
