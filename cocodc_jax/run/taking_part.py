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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from cocodc_jax.core.state import AppliedSync, SyncState, TrainState
from cocodc_jax.data.streams import TrainStream
from cocodc_jax.elastic import inside
from cocodc_jax.elastic.link import LeftBehindError, Link
from cocodc_jax.elastic.messages import Snapshot, View
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.digests import digest, here
from cocodc_jax.engine.transfer import gather
from cocodc_jax.fields import Kind
from cocodc_jax.files import append_line, read_lines, say
from cocodc_jax.program.region_program import Output, RegionProgram
from cocodc_jax.run.config.train_config import TrainConfig, flat, kind_of
from cocodc_jax.run.ended import Ended, result_of_others
from cocodc_jax.run.fault_watch import FaultWatch
from cocodc_jax.run.monitor import Monitor
from cocodc_jax.run.processes import code_digest
from cocodc_jax.run.resume import CLOCK, ResumeError
from cocodc_jax.run.stopping import Stop
from cocodc_jax.train import joining
from cocodc_jax.train.hooks import Hooks
from cocodc_jax.train.reporting import Reporter
from cocodc_jax.train.run_steps import MAX_SCAN_STEPS, scan_steps

if TYPE_CHECKING:
    from cocodc_jax.run.session import Session

SYNCS_FILE = "syncs.jsonl"
JOINS_FILE = "joins.jsonl"
_LISTEN_BEATS = 4


class Start(NamedTuple):
    """Where an attempt to train starts."""

    state: TrainState
    progress: dict[str, Any] | None  # The records' sums of a checkpoint.
    # Of a checkpoint: this process's clock, files and data. Empty if the run is new.
    position: dict[str, Any]


class Attendance:
    """One region's part in a run, from its start to its end.

    Attributes:
      step: the last one that was reported to the others.
      alone_since: the step since which no other region takes part; None if one does.
    """

    def __init__(
        self,
        program: RegionProgram,
        link: inside.ProcessLink,
        folder: pathlib.Path,
        has_digests: bool,
        step: int,
    ):
        self.step = step
        self.alone_since: int | None = None

        self._exchange = program.elastic
        self._link = link
        self._folder = folder
        self._has_digests = has_digests
        self._reporter = Reporter(program, link)
        self._note_merge: Callable[[bool], None] = lambda own_counts: None

    def extend(self, hooks: Hooks, note_merge: Callable[[bool], None]) -> Hooks:
        """Return a loop's hooks, extended to report to the other regions.

        Args:
          hooks: of the loop.
          note_merge: called with each mean that is merged: whether this region's
            message was in it.
        """
        self._note_merge = note_merge
        return dataclasses.replace(
            hooks, handed_out=self._report_turn, stopping=self._leave
        )

    def _leave(self) -> None:
        """Announce that this region was asked to stop."""
        say(f"asked to stop: leaving the other regions at step {self.step}")
        self._link.leave()

    def _report_turn(self, state: TrainState, output: Output) -> None:
        """Report this region's progress to the others, and admit regions that wait."""
        assert state.sync is not None
        self._note_alone()
        self.step = state.step
        self._reporter.report(state, output.syncs)

        for sync in output.syncs:
            sync_id = (sync.fragment_id, sync.start_step)
            regions = self._exchange.in_mean.pop(sync_id, None)
            if regions is not None:
                self._note_merge(self._exchange.region in regions)
            self._record_merge(sync, regions, state.sync)

    def _record_merge(
        self, sync: AppliedSync, regions: Sequence[int] | None, state: SyncState
    ) -> None:
        """Append a sync that was merged to the file of syncs."""
        line: dict[str, Any] = {
            "fragment": sync.fragment_id,
            "start_step": sync.start_step,
            "apply_step": sync.apply_step,
            "epoch": _number(self._link.view, self._link.place),
            "regions": regions,
            "time": time.time(),
        }
        if self._has_digests:
            leaves = jax.tree.leaves(state.outer.params[sync.fragment_id])
            content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
            line["digest"] = hashlib.sha256(content).hexdigest()[:16]
        append_line(self._folder / SYNCS_FILE, line)

    def _note_alone(self) -> None:
        """Note since which step this region has been the only one."""
        num_regions = self._link.place.num_regions
        if len(self._link.view.seats) > 1 or num_regions == 1:
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
    may_differ = (Kind.FREE, Kind.DATA)  # The fingerprint covers the data.
    fields = flat(config.to_json())
    same = {name: x for name, x in fields.items() if kind_of(name) not in may_differ}
    text = json.dumps([same, code_digest(), fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def taking_part(
    session: "Session",
    start: Start,
    stream: TrainStream,
    *,
    carried: joining.Carried | None,
    monitor: Monitor,
    fault_watch: FaultWatch,
    listen: Callable[[], Stop],
) -> Iterator[tuple[Start, Attendance | None]]:
    """Take part in a run until the context ends.

    At the last step, the others then get what they need of this region to end too. If
    all of them have ended, it starts at the result of one, and takes part in nothing.

    Args:
      session: the run.
      start: where this region would start by itself.
      stream: its data, which are moved to where it starts.
      carried: its own state, if the others went on without it.
      monitor: is shown how many regions take part.
      fault_watch: looks for faults of regions and links.
      listen: begins to listen for a request to stop, which then ends all waits. Before
        it asks to join, a region of one process does not: SIGTERM ends it at once.

    Yields:
      Where this region starts, and its part in the run, None if the run has ended.

    Raises:
      AskedToStopError: if the region should stop before it takes part.
    """
    ended = result_of_others(session) if carried is None else None
    if ended is not None:
        yield _start_at(ended, start), None
        return

    program = session.program
    place = session.place
    assert place is not None
    timing = place.timing
    # Of its own state nothing but this is kept, as it may get another's.
    own_step = start.state.step
    position = start.position

    with _make_link(session, own_step, carried, fault_watch, listen) as link:
        if carried is not None or jax.process_count() > 1:
            link.should_stop = listen().is_asked

        step = own_step
        first_batch = stream.get_state()
        listened_s = _LISTEN_BEATS * timing.beat_s
        rehearsed_s = 0.0
        if link.hears_others(listened_s):
            if carried is None:
                began_s = time.monotonic()
                _rehearse(session, stream)
                stream.set_state(first_batch)
                rehearsed_s = time.monotonic() - began_s
            link.should_stop = listen().is_asked
            step = _catch_up(link, stream, own_step, carried)
        link.should_stop = listen().is_asked

        asked_s = time.monotonic()
        # The others have this long to start, and again to end a turn.
        copy = link.join(2 * timing.start_s + timing.grace_s)
        is_alone = copy is None and len(link.view.seats) == 1
        if is_alone and carried is None:  # They may have ended while it waited.
            ended = result_of_others(session)
            if ended is not None:
                yield _start_at(ended, start), None
                return

        if copy is None:
            stream.set_state(first_batch)
            reached = max(gather(last_merge(session.own_dir)))
            _say_how_it_begins(place, link.view, own_step, reached)
        program.elastic.in_mean.clear()
        program.elastic.link = link
        if copy is not None:
            leader = link.view.epoch.region  # The copy is its state.
            state = _go_on(session, copy, own_step, carried, leader)
            start = Start(state, None, _clock_of(position))
            _skip(stream, copy.step - step)

        attendance = Attendance(
            program,
            link,
            session.own_dir,
            session.elastic.outer_digests,
            start.state.step,
        )
        line = {
            "step": start.state.step,
            "own_step": own_step,
            "from_peer": copy is not None,
            "carried": carried is not None,
            "epoch": _number(link.view, place),
            "life": link.boot,
            "regions": sorted(link.view.seats),
            "seconds": {
                "listened": listened_s,
                "rehearsed": rehearsed_s,
                "let_in": time.monotonic() - asked_s,
            },
            "time": time.time(),
        }
        append_line(session.own_dir / JOINS_FILE, line)
        monitor.live.members = lambda: len(link.view.seats)

        # Both are as large as the outer model.
        copy = None
        carried = None
        try:
            yield start, attendance
            if attendance.step == session.config.run.steps:
                link.finish(timing.grace_s)
        finally:
            program.elastic.link = None


def _make_link(
    session: "Session",
    own_step: int,
    carried: joining.Carried | None,
    fault_watch: FaultWatch,
    listen: Callable[[], Stop],
) -> inside.ProcessLink:
    """Return this process's link to the other regions."""
    place = session.place
    assert place is not None
    run = run_digest(session.config, session.text.fingerprint)
    max_frame_bytes = joining.max_frame_bytes(session.program)

    def make_link() -> Link:
        return Link(
            place,
            run,
            max_frame_bytes,
            own_step,
            is_announced=False,
            watch=fault_watch,
            last_boot=carried.boot if carried else None,
        )

    has_several = jax.process_count() > 1
    return inside.of_process(
        place,
        jax.process_index(),
        jax.process_count(),
        make_link,
        gather,
        listen().is_asked if has_several else lambda: False,
    )


def _catch_up(
    link: inside.ProcessLink,
    stream: TrainStream,
    own_step: int,
    carried: joining.Carried | None,
) -> int:
    """Move the data to the step that the others have reached; return it.

    Nobody waits for this region yet.
    """
    timeout_s = link.place.timing.start_s
    # A region that was asked to stop saved all its steps, and may return before the
    # others have done as many: data never go back.
    least = own_step if carried is None else 0
    step = own_step
    reached = link.wait_for_step(least, timeout_s)
    while reached > step:
        _skip(stream, reached - step)
        step = reached
        reached = link.wait_for_step(least, timeout_s)
    return step


def _clock_of(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of a position, which a region keeps wherever it starts."""
    return {name: position[name] for name in CLOCK if name in position}


def _start_at(ended: Ended, start: Start) -> Start:
    """Return where a region starts that takes another's result."""
    position = _clock_of(start.position) | {"result_of_region": ended.region}
    return Start(ended.state, None, position)


def _say_how_it_begins(place: Place, view: View, own_step: int, reached: int) -> None:
    """Say where this region starts if not all are there, or refuse that it does.

    Args:
      place: of this region.
      view: the regions that take part.
      own_step: of its own checkpoint, 0 without.
      reached: the last step whose merge it has recorded.
    """
    missing = [r for r in range(place.num_regions) if r not in view.seats]
    if not missing:
        return

    waited = f"regions {missing} did not answer within start_s={place.timing.start_s:g}"
    if reached and not own_step:
        raise ResumeError(
            f"region {place.region} took part in this run up to step {reached} and has "
            f"no checkpoint of it, and {waited}: they have ended, or cannot be "
            "reached. Start them again, wait for longer, or name another workdir to "
            "begin anew"
        )

    message = f"{waited}: region {place.region} goes on without them, from step 0"
    if own_step:  # It has waited for nobody.
        message = (
            f"region {place.region} leads the run from its own step {own_step}; "
            f"regions {missing} start from its copy when they are there"
        )
    print(message, file=sys.stderr)


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
    digests = [digest(here(part)) for part in state.sync.outer.params]
    jax.block_until_ready((state.region, digests))


def _go_on(
    session: "Session",
    copy: Snapshot,
    own_step: int,
    carried: joining.Carried | None,
    leader: int,
) -> TrainState:
    """Return the state made from the copy of the region that leads the run."""
    if own_step > copy.step and carried is None:
        raise LeftBehindError(
            f"the run is at step {copy.step}, and this region's own checkpoint at step "
            f"{own_step}: of another run, or the others lost theirs; restore theirs, "
            "start it again when they have come so far, or name another workdir"
        )
    print(f"going on from another region's step {copy.step}", file=sys.stderr)

    if carried is not None:
        carried = carried.to_join(leader)
    params, key = session.first_params()
    return joining.adopt(session.program, params, key, copy, carried)


def _skip(stream: TrainStream, num_steps: int) -> None:
    """Move the data to a later step; they never go back."""
    for _ in range(num_steps):
        next(stream)
