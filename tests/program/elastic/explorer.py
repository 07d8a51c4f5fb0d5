r"""Explores every run of a few regions with a few faults: the protocol's specification.

    python -m tests.program.elastic.explorer --members=3 --faults=2 --rounds=8

Regions are the state machines themselves, `elastic.protocol.Member`. Time goes in
rounds of one heartbeat: every region trains a step, all messages are delivered in the
order in which they were sent, and time passes. A *fault* is one departure from that:

    of a message   it is lost, comes a round later, or comes now and once more later
    of a region    it dies (and starts again later, also with a clock that was set back
                   and silent before it asks), is frozen, is cut off, does not hear, is
                   not heard, or is started a second time (with a clock that is ahead or
                   behind)

A clock is set back in runs with one fault only: if the only other region is frozen for
longer than start_s then, the region begins alone, and ends when that one wakes.

All runs with at most so many faults, each at every possible moment of the first rounds,
are visited; states that are reached twice are visited once. After every step

    one view         two lives that are in one epoch have the same seats;
    one set of rows  two lives of one view have applied the same rows for a sync, and
                     none left out;
    one delivery     no life gets a decision twice;
    enough           a view that follows another has min_regions seats, or as many;
    one is left      a life that ends for a newer one is not the last of its region;

and from every last state, once the faults are over, within some rounds

    all go on        every region takes part in one view, in one life, and trains;
    one life         no life of the region that has not died had a higher number.
"""

import argparse
import collections
import dataclasses
import io
import itertools
import pickle
import time

from cocodc_jax.elastic import lives
from cocodc_jax.elastic import messages as m
from cocodc_jax.elastic.place import Timing
from cocodc_jax.elastic.protocol import Member
from tests.program.elastic.meeting import places

TIMING = Timing(beat_s=1, dead_after_s=4, grace_s=6, start_s=3)
OF_A_MESSAGE = ("lost", "late", "twice")
# Name and rounds.
CLOCK_BACK = "dies, clock back", 1
OF_A_REGION = (
    ("dies", 2),
    CLOCK_BACK,
    ("frozen", 2),
    ("frozen", 7),
    ("cut off", 3),
    ("cut off", 7),
    ("deaf", 7),
    ("dumb", 7),
    ("again ahead", 0),
    ("again behind", 0),
)
LISTENS = 2
SETTLES = 90
AT_ONCE = 2


class Unmeasured:
    """A stand-in for measurements, which decide nothing."""

    wait_s = sync_s = 0.0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ignored


def ignored(*_):
    return ()


@dataclasses.dataclass
class Life:
    """One life of a region, and the progress of its run."""

    member: Member
    born: int  # Round.
    own_step: int = 0
    # The view that it was in when it was looked at last.
    epoch: m.Epoch = m.NO_EPOCH
    num_seats: int = 0
    step: int | None = None
    asleep_until: int = 0
    log: dict = dataclasses.field(default_factory=dict)
    waits: set = dataclasses.field(default_factory=set)
    inbox: list = dataclasses.field(default_factory=list)


class Broken(AssertionError):
    """An invariant does not hold."""


def hold(condition, what):
    if not condition:
        raise Broken(what)


class World:
    """All lives, and the messages in flight; a value that can be copied."""

    def __init__(self, num, min_regions):
        self.num = num
        self.round = 0
        self.boots = 0
        self.place, *_ = places(num, via="/", timing=TIMING, min_regions=min_regions)
        self.lives: list[Life] = []
        self.late: list = []
        self.cuts: list = []  # (kind, region, until round).
        self.starts: list = []  # (round, region, boot) of lives to come.
        self.copies: dict = {}
        self.views: dict = {}  # Seats by epoch.
        self.newest: dict = {}  # The highest number of a life of each region.

        for region in range(num):
            self.start(region)

    def start(self, region, boot=None, step=0, is_new=True, listens=True):
        self.boots += 1
        # No two lives have one number, whatever the clocks.
        boot = (boot or self.boots << 22) + (self.boots << 4) * is_new
        place = dataclasses.replace(self.place, region=region)
        member = Member(place, boot, step, float(self.round), is_new)
        member.is_announced = not (is_new and listens) or self.round == 0
        member.times = member._silences = Unmeasured()  # type: ignore
        self.lives.append(Life(member, self.round, own_step=step))

    # What the lives do.

    def is_awake(self, life):
        return life.asleep_until <= self.round

    def post(self, life):
        member = life.member
        for region, message in member.outbox:
            if not isinstance(message, m.Leave) or not member.is_superseded:
                self.sent.append((region, member.region, member.boot, message))

        member.outbox.clear()
        for decision in member.delivered:
            hold(decision.sync not in life.log, f"one delivery: {decision.sync}")
            life.log[decision.sync] = dict(decision.rows)
            life.waits.discard(decision.sync)

        member.delivered.clear()
        member.oldest_step = min((s for _, s in life.waits), default=life.step or 0)
        newest = self.newest.get(member.region, 0)
        self.newest[member.region] = max(newest, member.boot)
        self.hold_invariants(life)

    def train(self, life):
        member = life.member
        if not member.is_announced and self.round - life.born >= LISTENS:
            member.announce(float(self.round))

        if not member.is_in or (life.step is None and not self.begin(life)):
            return
        if len(life.waits) >= AT_ONCE:
            return

        for joiner, boot in member.joiners(float(self.round)).items():
            member.admit(joiner, boot, life.step, member.oldest_step)
            copy = dict(life.log), set(life.waits), member.oldest_step, life.own_step
            self.copies[joiner, boot, member.life, life.step] = copy

        life.step += 1
        sync = 0, life.step
        life.waits.add(sync)
        row = b"%d %d %d" % (*member.life, life.step)
        member.offer(sync, row, float(self.round))
        self.post(life)

    def begin(self, life):
        member = life.member
        seat = member.view.seats[member.region]
        if seat.source != member.life:
            key = (*member.life, seat.source, seat.since_step)
            if key not in self.copies:
                return False
            life.log, life.waits, member.oldest_step, life.own_step = self.copies[key]
            life.log = dict(life.log)
            life.waits = set(life.waits)

        life.step = seat.since_step
        for sync in sorted(life.waits):
            member.expect(sync, float(self.round))
        self.post(life)
        return True

    def deliver(self, message, life):
        _, sender, boot, content = message
        life.member.receive(sender, boot, content, float(self.round))
        self.post(life)

    def is_cut(self, sender, dest):
        for kind, region, until in self.cuts:
            if until > self.round and (
                (kind == "cut off" and (sender == region) != (dest == region))
                or (kind == "deaf" and dest == region)
                or (kind == "dumb" and sender == region)
            ):
                return True
        return False

    # Invariants.

    def hold_invariants(self, life):
        member = life.member
        view = member.view
        if view.epoch == m.NO_EPOCH:
            return

        seats = tuple(sorted(view.seats.items()))
        known = self.views.setdefault(view.epoch, seats)
        hold(known == seats, f"one view: {view.epoch}")

        if view.epoch != life.epoch:
            least = min(self.place.min_regions, life.num_seats)
            hold(len(seats) >= least, f"enough: {seats} in {view.epoch}")
            life.epoch = view.epoch
            life.num_seats = len(seats)

        if member.why_left or life.step is None:
            return

        for other in self.lives:
            if other is life or other.step is None or other.member.why_left:
                continue
            if other.member.view.epoch != view.epoch:
                continue
            for sync in life.log.keys() & other.log.keys():
                same = life.log[sync] == other.log[sync]
                hold(same, f"one set of rows: {sync} in {view.epoch}")

        done = life.step - len(life.waits)
        hold(len(life.log) >= done - life.own_step, "a sync was left out")


def packed(world):
    """The state as bytes: its copy, and its name among the states visited."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True  # Equal states are equal bytes, shared parts or not.
    pickler.dump(world)
    return out.getvalue()


def faults_of_regions(world, region, num_faults):
    for kind, rounds in OF_A_REGION:
        if not any(x.member.region == region for x in world.lives):
            continue
        if num_faults == 1 or (kind, rounds) != CLOCK_BACK:
            yield kind, rounds


def strike(world, region, kind, rounds):
    """Have a fault begin."""
    mine = [x for x in world.lives if x.member.region == region]

    if kind.startswith("dies"):
        newest = max(x.member.boot for x in mine)
        boot = None if kind == "dies" else (newest >> 20) - 3 << 20
        world.lives = [x for x in world.lives if x.member.region != region]
        world.starts.append((world.round + rounds, region, boot))
        world.newest.pop(region, None)
    elif kind == "frozen":
        mine[-1].asleep_until = world.round + rounds
    elif kind.startswith("again"):
        newest = max(x.member.boot for x in mine)
        boot = None if kind == "again ahead" else (newest >> 20) - 3 << 20
        world.start(region, boot)
    else:
        world.cuts.append((kind, region, world.round + rounds))


def play(world, faults):
    """One round; `faults` are by number of the message. Returns how many there were."""
    world.sent = collections.deque()
    due = [start for start in world.starts if start[0] <= world.round]
    world.starts = [start for start in world.starts if start not in due]
    for _, region, boot in due:
        world.start(region, boot, listens=boot is None)
    late = world.late
    world.late = []
    for life in list(world.lives):
        if world.is_awake(life):
            if life.inbox:  # It wakes: it looks at the time before it reads.
                life.member.tick(float(world.round))
                world.post(life)
            world.train(life)

    world.sent.extendleft(reversed(late))
    num = 0
    while True:
        for life in list(world.lives):
            if world.is_awake(life):
                waiting = life.inbox
                life.inbox = []
                for message in waiting:
                    world.deliver(message, life)

        if not world.sent:
            break

        message = world.sent.popleft()
        dest, sender, _, content = message
        receivers = [x for x in world.lives if x.member.region == dest]
        if not receivers or world.is_cut(sender, dest):
            continue

        fault = faults.get(num)
        num += 1
        if fault == "lost":
            continue

        if fault in ("late", "twice"):
            world.late.append(message)
            if fault == "late":
                continue

        for life in receivers:
            life.inbox.append(message)

    for life in list(world.lives):
        if world.is_awake(life):
            life.member.tick(float(world.round + 1))
            life.member.findings.clear()
            world.post(life)

    world.late += world.sent
    world.sent = collections.deque()
    world.round += 1
    come_back(world)
    return num


def come_back(world):
    """A life that is over ends, or returns in its process."""
    for life in list(world.lives):
        member = life.member
        if not member.why_left or not world.is_awake(life):
            continue

        world.lives.remove(life)
        if member.is_superseded:
            there = [x.member.region for x in world.lives]
            there += [region for _, region, _ in world.starts]
            hold(member.region in there, f"one is left: not after {member.life}")
        else:
            boot = lives.returned(member.boot)
            step = life.step or 0
            world.start(member.region, boot, step, is_new=False)


def settles(world):
    """Return whether every region goes on once the faults are over; runs restart."""
    for _ in range(SETTLES):
        play(world, {})
        for region in range(world.num):
            is_there = any(x.member.region == region for x in world.lives)
            if not is_there and region not in [r for _, r, _ in world.starts]:
                world.starts.append((world.round, region, None))
        for life in [x for x in world.lives if x.member.is_in and x.step is None]:
            if world.round - life.member.entered_at > TIMING.dead_after_s:
                world.lives.remove(life)  # Its copy was lost: it restarts.

    views = {x.member.view.epoch for x in world.lives}
    steps = [x.step or 0 for x in world.lives]
    for _ in range(6):
        play(world, {})

    regions = sorted(x.member.region for x in world.lives)
    hold(regions == list(range(world.num)), f"all go on: lives of {regions}")
    hold(len(views) == 1, f"all go on: in {views}")

    for region, boot in [x.member.life for x in world.lives]:
        newest = world.newest[region]
        hold(boot == newest, f"one life: {boot} of {region}, and {newest} was newer")

    on = [x.step or 0 for x in world.lives]
    hold(
        all(b > a for a, b in zip(steps, on, strict=True)), f"all go on: {steps}, {on}"
    )


@dataclasses.dataclass
class Explored:
    """How much was visited."""

    states: int = 0
    rounds: int = 0
    ends: int = 0


def explore(num, num_faults, rounds, min_regions=1, limit_s=float("inf"), every=1):
    """Visit all runs; raises `Broken` with the faults that lead there."""
    visited: dict[bytes, int] = {}
    explored = Explored()
    began_s = time.monotonic()
    stack = [(packed(World(num, min_regions)), num_faults, ())]

    while stack:
        if time.monotonic() - began_s > limit_s:
            return explored, False

        state, left, path = stack.pop()
        if visited.get(state, -1) >= left:
            continue
        visited[state] = left
        explored.states += 1

        try:
            after = list(rounds_from(state, left, num_faults, explored))
            if not after or pickle.loads(state).round >= rounds:
                explored.ends += 1
                if explored.ends % every == 0:
                    settles(pickle.loads(state))
                continue
        except Broken as error:
            raise Broken(
                f"{error}; after {(*path, *getattr(error, 'at', ()))}"
            ) from error

        stack += [(new, left - cost, (*path, *events)) for new, cost, events in after]

    return explored, True


def rounds_from(state, left, num_faults, explored):
    """Yield `(state, faults, what they were)` of all next rounds."""
    number = pickle.loads(state).round
    strikes = [()]
    if left:
        world = pickle.loads(state)
        strikes += [
            ((region, *fault),)
            for region in range(world.num)
            for fault in faults_of_regions(world, region, num_faults)
        ]

    for struck in strikes:
        world = pickle.loads(state)
        for fault in struck:
            strike(world, *fault)
        base = packed(world)
        rest = left - len(struck)

        num = 1 << 30
        for count in range(rest + 1):
            if count and num == 1 << 30:
                break

            which = itertools.combinations(range(num), count) if count else [()]
            for numbers in which:
                for kinds in itertools.product(OF_A_MESSAGE, repeat=count):
                    world = pickle.loads(base)
                    faults = dict(zip(numbers, kinds, strict=True))
                    events = [(number, *x) for x in (*struck, *faults.items())]
                    try:
                        sent = play(world, faults)
                    except Broken as error:
                        error.at = events
                        raise

                    explored.rounds += 1
                    if not count:
                        num = sent

                    yield packed(world), len(struck) + count, events


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("members", 2),
        ("faults", 2),
        ("rounds", 8),
        ("min_regions", 1),
        ("every", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)

    parser.add_argument("--limit_s", type=float, default=float("inf"))
    options = parser.parse_args()
    began_s = time.monotonic()
    explored, is_all = explore(
        options.members,
        options.faults,
        options.rounds,
        options.min_regions,
        options.limit_s,
        options.every,
    )
    print(
        f"{options.members} members, {options.faults} faults in {options.rounds} "
        f"rounds, min_regions={options.min_regions}: {explored.states} states, "
        f"{explored.rounds} rounds, {explored.ends} last states, "
        f"{time.monotonic() - began_s:.0f} s" + ("" if is_all else ", not all")
    )


if __name__ == "__main__":
    main()
