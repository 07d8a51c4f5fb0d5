"""A region that is a separate job: how it takes part in a run, and rejoins it.

If the others have begun, it compiles and runs its programs once before it asks to join,
so that they need not wait; then it continues from the memory of one of them, see
`train.joining`. A region that all others went on without rejoins as soon as it can
reach them. Its folder records the syncs that it merged, and when it joined.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from cocodc_jax.core.state import TrainState
from cocodc_jax.data.streams import TrainStream
from cocodc_jax.elastic import inside
from cocodc_jax.elastic.link import LeftBehindError, Link
from cocodc_jax.elastic.messages import Snapshot, View
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.digests import digest, here
from cocodc_jax.engine.transfer import gather
from cocodc_jax.fields import Kind
from cocodc_jax.files import append_line, read_lines
from cocodc_jax.program.region_program import Output, RegionProgram
from cocodc_jax.run.attend import Stop
from cocodc_jax.run.config import TrainConfig, flat, kind_of
from cocodc_jax.run.ended import Ended, result_of_others
from cocodc_jax.run.fault_watch import FaultWatch
from cocodc_jax.run.monitor import Monitor
from cocodc_jax.run.processes import code_digest
from cocodc_jax.run.resume import CLOCK, ResumeError
from cocodc_jax.train import joining
from cocodc_jax.train.hooks import Hooks
from cocodc_jax.train.reporting import Reporter
from cocodc_jax.train.run_steps import MAX_SCAN_STEPS, scan_steps

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session

SYNCS_FILE, JOINS_FILE = "syncs.jsonl", "joins.jsonl"
_LISTEN_BEATS = 4

Begun = tuple[TrainState, dict | None, dict]


class Attendance:
    """One region's part in a run, from its start to its end."""

    def __init__(
        self,
        program: RegionProgram,
        link: Link | inside.Speaker | inside.Listener,
        folder: pathlib.Path,
        digests: bool,
        num_regions: int = 1,
    ):
        self._exchange, self._link = program.elastic, link
        self._folder, self._digests = folder, digests
        self._num_regions = num_regions
        self._reporter = Reporter(program, link)
        self.step = 0  # The last one that was reported to the others.
        # The step since which no other region takes part; None if one does.
        self.alone_since: int | None = None
        self._merged: Callable[[bool], None] = lambda own_counts: None

    def told_by(self, hooks: Hooks, merged: Callable[[bool], None]) -> Hooks:
        """Return a loop's hooks, extended to report to the other regions."""
        self._merged = merged
        own = {"handed_out": self._handed_out, "stopping": self._leave}
        return dataclasses.replace(hooks, **own)

    def _leave(self) -> None:
        """Announce that this region was asked to stop."""
        told = f"asked to stop: leaving the other regions at step {self.step}"
        print(told, file=sys.stderr, flush=True)
        self._link.leave()

    def _handed_out(self, state: TrainState, output: Output) -> None:
        """Report this region's progress to the others, and admit regions that wait."""
        assert state.sync is not None
        self._note_alone()
        self.step = state.step
        self._reporter.report(state, output.syncs)
        for sync in output.syncs:
            k = sync.fragment_id
            regions = self._exchange.in_mean.pop((k, sync.start_step), None)
            if regions is not None:
                self._merged(self._exchange.region in regions)
            line = {
                "fragment": k,
                "start_step": sync.start_step,
                "apply_step": sync.apply_step,
                "epoch": _number(self._link.view, self._link.place),
                "regions": regions,
                "time": time.time(),
            }
            if self._digests:
                leaves = jax.tree.leaves(state.sync.outer.params[k])
                content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
                line["digest"] = hashlib.sha256(content).hexdigest()[:16]
            append_line(self._folder / SYNCS_FILE, line)

    def _note_alone(self) -> None:
        """Note since which step this region has been the only one."""
        if len(self._link.view.seats) > 1 or self._num_regions == 1:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = self.step


def _number(view: View, place: Place) -> int:
    """Return the number of a view in the records: modulo M, it is its coordinator."""
    return view.epoch.round * place.num_regions + view.epoch.region


def last_merge(folder: pathlib.Path) -> int:
    """Return the last step whose merge a region has recorded, 0 for none."""
    steps = read_lines(
        folder / SYNCS_FILE, lambda line: line["apply_step"], skips_damaged=True
    )
    return steps[-1] if steps else 0


def run_digest(config: TrainConfig, fingerprint: str) -> str:
    """Return a digest that is equal for two elastic regions of one run."""
    may_differ = Kind.FREE, Kind.DATA  # The fingerprint covers the data.
    fields = flat(config.to_json()).items()
    same = {name: x for name, x in fields if kind_of(name) not in may_differ}
    text = json.dumps([same, code_digest(), fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def taking_part(
    session: "Session",
    begun: Begun,
    stream: TrainStream,
    carried: joining.Carried | None,
    monitor: Monitor,
    watch: FaultWatch,
    listen: Callable[[], Stop],
) -> Iterator[tuple[Begun, Attendance | None]]:
    """Yield where this region starts, and its part in a run until the context ends.

    At the last step, the others then get what they need of this region to end too. If
    all of them have ended, it starts at the result of one, and takes part in nothing.
    `listen` begins to listen for a request to stop, which then ends all waits. Before
    it asks to join, a region of one process does not: SIGTERM ends it at once.

    Raises `AskedToStopError` if the region should stop before it takes part.
    """
    if carried is None and (ended := result_of_others(session)) is not None:
        yield _begin_at(ended, begun), None
        return
    # Of its own state nothing but this is kept, as it may get another's.
    own_step, position = begun[0].step, begun[2]
    program, folder = session.program, session.own_dir
    place = session.place
    assert place is not None
    began_s = time.monotonic()
    run = run_digest(session.config, session.text.fingerprint)
    timing, largest = place.timing, joining.max_frame_bytes(program)

    def make_link() -> Link:
        return Link(
            place,
            run,
            largest,
            own_step,
            is_announced=False,
            watch=watch,
            last_boot=carried.boot if carried else None,
        )

    link = inside.of_process(
        place,
        jax.process_index(),
        jax.process_count(),
        make_link,
        gather,
        listen().is_asked if jax.process_count() > 1 else lambda: False,
    )
    with link:
        if carried is not None or jax.process_count() > 1:
            link.should_stop = listen().is_asked
        listen_s = _LISTEN_BEATS * timing.beat_s
        seconds = {"listened": listen_s, "rehearsed": 0.0}
        initial, done = stream.get_state(), own_step
        if link.hears_others(listen_s):
            if carried is None:
                _rehearse(session, stream)
                stream.set_state(initial)
                seconds["rehearsed"] = time.monotonic() - began_s - listen_s
            link.should_stop = listen().is_asked
            # A region that was asked to stop saved all its steps, and may return before
            # the others have done as many: data never go back.
            least = own_step if carried is None else 0
            while (reached := link.wait_for_step(least, timing.start_s)) > done:
                _skip(stream, reached - done)  # Nobody waits for it yet.
                done = reached
        link.should_stop = listen().is_asked
        asked_s = time.monotonic()
        # The others have this long to start, and again to end a turn.
        copy = link.join(2 * timing.start_s + timing.grace_s)
        is_from_peer = copy is not None
        is_alone = copy is None and len(link.view.seats) == 1
        if is_alone and carried is None:  # They may have ended while it waited.
            if (ended := result_of_others(session)) is not None:
                yield _begin_at(ended, begun), None
                return
        if copy is None:
            stream.set_state(initial)
            _begins(place, link.view, own_step, max(gather(last_merge(folder))))
        program.elastic.in_mean.clear()
        program.elastic.link = link
        leader = link.view.epoch.region  # The copy is its state.
        if carried is not None and leader not in carried.missed:
            carried = carried._replace(shared=None)
        if copy is not None:
            state = _go_on(session, copy, own_step, carried)
            _skip(stream, copy.step - done)
            copy = None  # It is as large as the outer model.
            times = position.keys() & set(CLOCK)
            begun = state, None, {name: position[name] for name in times}
        attendance = Attendance(
            program,
            link,
            folder,
            session.elastic.outer_digests,
            place.num_regions,
        )
        attendance.step = begun[0].step
        seconds["let_in"] = time.monotonic() - asked_s
        line = {
            "step": begun[0].step,
            "own_step": own_step,
            "from_peer": is_from_peer,
            "carried": carried is not None,
            "epoch": _number(link.view, place),
            "life": link.boot,
            "regions": sorted(link.view.seats),
            "seconds": seconds,
            "time": time.time(),
        }
        append_line(folder / JOINS_FILE, line)
        carried = None  # So is what it carried.
        monitor.live.members = lambda: len(link.view.seats)
        try:
            yield begun, attendance
            if attendance.step == session.config.run.steps:
                link.finish(timing.grace_s)
        finally:
            program.elastic.link = None


def _begin_at(ended: Ended, begun: Begun) -> Begun:
    """Return where a region starts that takes another's result."""
    clock = {name: begun[2][name] for name in CLOCK if name in begun[2]}
    return ended.state, None, clock | {"result_of_region": ended.region}


def _begins(place: Place, view: View, own_step: int, reached: int) -> None:
    """Say where this region starts if not all are there, or refuse that it does."""
    missing = [r for r in range(place.num_regions) if r not in view.seats]
    if not missing:
        return
    waited = f"regions {missing} did not answer within start_s={place.timing.start_s:g}"
    if not own_step and reached:
        raise ResumeError(
            f"region {place.region} took part in this run up to step {reached} and has "
            f"no checkpoint of it, and {waited}: they have ended, or cannot be "
            "reached. Start them again, wait for longer, or name another workdir to "
            "begin anew"
        )
    goes_on = f"{waited}: region {place.region} goes on without them, from step 0"
    if own_step:  # It has waited for nobody.
        goes_on = (
            f"region {place.region} leads the run from its own step {own_step}; "
            f"regions {missing} start from its copy when they are there"
        )
    print(goes_on, file=sys.stderr)


def _rehearse(session: "Session", stream: TrainStream) -> None:
    """Compile and run the programs of a full round, alone, and discard the result."""
    program = session.program
    schedule = program.method.schedule
    assert schedule is not None
    state = program.init(*session.first_params())
    batch = next(stream)
    end = schedule.sync_interval + schedule.delay_steps + 1
    while state.step < end:
        ahead = program.steps_to_event(state) or MAX_SCAN_STEPS
        batches = np.stack([batch] * scan_steps(program, ahead))
        state, _ = program.advance(state, batches)
    assert state.sync is not None
    made = [digest(here(part)) for part in state.sync.outer.params]
    jax.block_until_ready((state.region, made))


def _go_on(
    session: "Session", copy: Snapshot, own_step: int, carried: joining.Carried | None
) -> TrainState:
    """Return the state made from a copy."""
    if own_step > copy.step and carried is None:
        raise LeftBehindError(
            f"the run is at step {copy.step}, and this region's own checkpoint at step "
            f"{own_step}: of another run, or the others lost theirs; restore theirs, "
            "start it again when they have come so far, or name another workdir"
        )
    print(f"going on from another region's step {copy.step}", file=sys.stderr)
    params, key = session.first_params()
    return joining.adopt(session.program, params, key, copy, carried)


def _skip(stream: TrainStream, num_steps: int) -> None:
    """Move the data to a later step; they never go back."""
    for _ in range(num_steps):
        next(stream)
