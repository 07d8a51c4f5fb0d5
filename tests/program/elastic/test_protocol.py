"""The protocol: whatever is lost, late or dead, a sync has the same mean everywhere.

Regions are only their state machines. The network is a list of messages that are
delivered in any order, twice, or never.
"""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cocodc_jax.elastic import messages
from cocodc_jax.elastic.place import Timing
from cocodc_jax.elastic.protocol import Member
from cocodc_jax.elastic.records import Hearing
from tests.program.elastic.meeting import places

TIMING = Timing(beat_s=1, dead_after_s=5, grace_s=30, start_s=20)
# A seed of `parted` with which a region that leaves at once loses a decision.
AT_ONCE = 18


class World:
    """Some regions, and the messages between them."""

    def __init__(self, num, seed=0, min_regions=1, timing=TIMING):
        self.random = random.Random(seed)
        self.num = num
        self.now = 0.0
        self.place, *_ = places(num, via="/", timing=timing, min_regions=min_regions)
        self.boots = 0

        self.members = {}
        self.logs = {}
        self.steps = {}
        self.waits = {}
        self.network = []
        self.copies = {}
        self.own_steps = {}

        for region in range(num):
            self.boot(region)

    def boot(self, region, step=0):
        """Start a region, from its own checkpoint at `step` if that is not 0."""
        self.boots += 1
        place = dataclasses.replace(self.place, region=region)
        self.members[region] = Member(place, self.boots, step, self.now)
        self.own_steps[region] = step
        self.logs[region] = {}
        self.steps[region] = None
        self.waits[region] = set()

    def post(self, region):
        member = self.members[region]
        for dest, message in member.outbox:
            self.network.append((dest, region, member.boot, message))
        member.outbox.clear()

        for decision in member.delivered:
            self.logs[region][decision.sync] = dict(decision.rows)
            self.waits[region].discard(decision.sync)
        member.delivered.clear()

        member.oldest_step = min(
            (s for _, s in self.waits[region]), default=self.steps[region] or 0
        )

    def deliver(self, index, again=False):
        dest, sender, boot, message = self.network[index]
        if not again:
            self.network.pop(index)
        if dest in self.members:
            self.members[dest].receive(sender, boot, message, self.now)
            self.post(dest)

    def tick(self, seconds=1.0):
        """Let time pass, by at most a heartbeat at once: no region is frozen."""
        for part in [1.0] * int(seconds) + [seconds % 1] * bool(seconds % 1):
            self.now += part
            for region, member in self.members.items():
                member.tick(self.now)
                self.post(region)

    def train(self, region):
        """Take a step and send its message, unless two messages are in flight.

        With two in flight the region waits for a mean, as a run does, and admits no
        other region.
        """
        member = self.members[region]
        if not member.is_in:
            return
        if self.steps[region] is None and not self.begin(region):
            return
        if len(self.waits[region]) >= 2:
            return
        for joiner, boot in member.joiners(self.now).items():
            step = self.steps[region]
            member.admit(joiner, boot, step, member.oldest_step)
            copy = dict(self.logs[region]), set(self.waits[region]), member.oldest_step
            self.copies[joiner, boot, member.life, step] = *copy, self.own_steps[region]

        self.steps[region] += 1
        sync = (0, self.steps[region])
        self.waits[region].add(sync)
        member.offer(sync, b"%d %d" % (region, self.steps[region]), self.now)
        self.post(region)

    def begin(self, region):
        """Go on from the copy that belongs to the seat; return whether there is one."""
        member = self.members[region]
        since, source = member.view.seats[region][1:]
        if source == member.life:
            self.steps[region] = since
            return True

        key = region, member.boot, source, since
        if key not in self.copies:
            return False

        self.logs[region], self.waits[region], *rest = self.copies[key]
        member.oldest_step, self.own_steps[region] = rest
        self.steps[region] = since
        for sync in list(self.waits[region]):
            member.expect(sync, self.now)
        self.post(region)
        return True

    def assert_one_mean_a_sync(self):
        """Check that regions of one view have taken the same means, and every mean."""
        first_of = {}  # Of each epoch.
        for region, member in self.members.items():
            if not member.is_in or self.steps[region] is None:
                continue

            other = first_of.setdefault(member.view.epoch, region)
            log = self.logs[region]
            first = self.logs[other]
            for sync in log.keys() & first.keys():
                assert log[sync] == first[sync], (sync, region, other)

            done = self.steps[region] - len(self.waits[region])
            assert len(log) >= done - self.own_steps[region]

    def turn(self, regions=None, arrives=lambda dest, sender: True, seconds=1.0):
        """Let regions train; deliver in order what `arrives`, and lose the rest."""
        for region in list(self.members) if regions is None else regions:
            self.train(region)
        while self.network:
            if arrives(*self.network[0][:2]):
                self.deliver(0)
            else:
                self.network.pop(0)
        self.tick(seconds)

    def settle(self, seconds=120):
        for _ in range(seconds):
            self.turn()
        self.assert_one_mean_a_sync()

    def kill(self, region):
        """Remove a region and its messages that have not arrived."""
        del self.members[region]
        self.network = [m for m in self.network if m[1] != region]


def settled(num, seed=0, **options):
    world = World(num, seed, **options)
    world.settle(12)
    return world


def run(seed, num, num_events, timing=TIMING, leaves=False):
    world = World(num, seed, timing=timing)
    rng = world.random

    for _ in range(num_events):
        chance = rng.random()
        if chance < 0.55 and world.network:
            again = rng.random() < 0.05
            world.deliver(rng.randrange(len(world.network)), again)
        elif chance < 0.65:
            world.tick(rng.choice([0.3, 1.0, 2.0]))
        elif chance < 0.90 and world.members:
            world.train(rng.choice(sorted(world.members)))
        elif chance < 0.93 and world.network:
            world.network.pop(rng.randrange(len(world.network)))
        elif chance < 0.945 and len(world.members) > 1:
            del world.members[rng.choice(sorted(world.members))]
        elif leaves and chance < 0.955 and world.members:
            region = rng.choice(sorted(world.members))
            world.members[region].leave()
            world.post(region)
        elif chance < 0.97:
            away = sorted(set(range(num)) - world.members.keys())
            over = [r for r, m in world.members.items() if m.why_left]
            if away or over:
                world.boot(rng.choice(away + over))

        world.assert_one_mean_a_sync()
    return world


IMPATIENT = dataclasses.replace(TIMING, grace_s=1, max_behind=2)


@pytest.mark.parametrize("timing", [TIMING, IMPATIENT])
@pytest.mark.parametrize("leaves", [False, True])
@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
@settings(max_examples=50, deadline=None)
@example(3, 3)
def test_regions_of_a_view_never_take_different_means(timing, leaves, seed, num):
    run(seed, num, 400, timing, leaves)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_survivors_go_on_and_every_region_comes_back(seed):
    world = run(seed, 4, 300)
    for region in range(4):
        if region not in world.members or world.members[region].why_left:
            world.boot(region)

    for _ in range(6):  # Regions cut off from the larger part restart.
        world.settle(40)
        for region, member in world.members.items():
            # So does a region that has a seat without the copy for it.
            if member.why_left or world.steps[region] is None:
                world.boot(region)

    before = max(step or 0 for step in world.steps.values())
    world.settle(20)

    assert all(m.is_in for m in world.members.values())
    assert len({m.view.epoch for m in world.members.values()}) == 1
    assert min(world.steps.values()) > before
    last = [world.logs[r][0, before] for r in range(4)]
    assert all(rows == last[0] for rows in last)
    assert sorted(last[0]) == [0, 1, 2, 3]


def test_regions_begin_together_and_every_mean_has_every_region():
    world = settled(3)
    assert {m.view.epoch for m in world.members.values()} == {(1, 0, 1)}
    assert set(world.logs[0][0, 1]) == {0, 1, 2}
    for sync in world.logs[1]:
        assert world.logs[1][sync] == world.logs[0][sync]


def beat_of(view):
    """Return the heartbeat of a member of a view."""
    return messages.Beat(view, promised=messages.NO_EPOCH, oldest_step=0, hears=())


def until(world, kind):
    """Deliver in order up to a message of a kind; return its index."""
    for _ in range(400):
        for i, (*_, message) in enumerate(world.network):
            if isinstance(message, kind):
                return i

        if world.network:
            world.deliver(0)
        else:
            for region in list(world.members):
                world.train(region)
            world.tick(0.5)

    raise AssertionError(kind)


def test_a_request_to_join_that_arrives_after_a_beat_is_ignored():
    """A region that joins must not conclude that the others are joining too."""
    world = World(2)
    world.kill(1)
    world.boot(1)
    late = world.members[1]
    boot = world.members[0].boot

    request = messages.Join(step=0, hears=())
    late.receive(0, boot, request, 1.0)
    assert not late.hears_others()

    epoch = messages.Epoch(1, 0, boot)
    view = messages.View(epoch, {0: messages.Seat(boot, 0, (0, boot))})
    beat = messages.Beat(view, promised=epoch, oldest_step=6, hears=())
    late.receive(0, boot, beat, 1.0)

    late.receive(0, boot, request, 1.0)
    assert late.hears_others()
    assert late.others_step(1.0) == 6

    # A request of a new life cannot be an old one.
    new_request = messages.Join(step=0, hears=(late.life,))
    late.receive(0, boot + 9, new_request, 1.0)
    assert not late.hears_others()


def test_a_decision_that_one_survivor_knows_holds_for_every_survivor():
    world = settled(3)
    at_choice = until(world, messages.Choice)
    dest, sender, _, choice = world.network[at_choice]
    assert sender == 0

    for at in reversed(range(at_choice)):  # Rows that it sent before.
        if world.network[at][0] == dest and isinstance(
            world.network[at][3], messages.Row
        ):
            world.deliver(at)
            at_choice -= 1

    world.deliver(at_choice)
    world.kill(0)  # Before the other survivor receives the choice.
    world.settle(30)

    assert world.members[1].coordinator == 1
    other = ({1, 2} - {dest}).pop()
    assert set(world.logs[other][choice.sync]) == {r for r, _ in choice.members}
    assert 0 in world.logs[other][choice.sync]


def test_a_decision_that_died_with_its_coordinator_is_taken_without_it():
    world = settled(3)
    at_choice = until(world, messages.Choice)
    sync = world.network[at_choice][3].sync
    world.kill(0)
    world.settle(30)
    assert set(world.logs[1][sync]) == {1, 2}
    assert world.logs[1][sync] == world.logs[2][sync]


def test_the_message_of_a_dead_region_counts_once_the_coordinator_has_it():
    world = settled(3)
    del world.members[1]
    world.settle(2)  # Less than it takes to be missed.
    waiting = max(world.waits[0])
    world.settle(30)
    assert 1 not in world.logs[0][waiting]
    # All that it had sent before.
    assert 1 in world.logs[0][0, waiting[1] - 3]


def test_a_coordinator_that_falls_silent_is_left_behind():
    world = settled(3)
    silent = world.members.pop(0)
    world.settle(20)

    world.members[0] = silent
    world.settle(3)
    assert "went on without" in silent.why_left

    world.boot(0)
    world.settle(20)
    assert set(world.members[2].view.seats) == {0, 1, 2}


def test_after_a_promise_of_a_view_that_was_never_installed_every_region_takes_part():
    """The coordinator only seemed dead to the one that proposed it."""
    world = settled(3)
    world.members[1]._propose(world.members[1].view.seats, world.now)
    world.members[1].outbox.clear()
    world.settle(30)
    epochs = {(m.view.epoch, m._promised) for m in world.members.values()}
    assert epochs == {((3, 0, 1), (3, 0, 1))}
    assert all(set(log[max(log)]) == {0, 1, 2} for log in world.logs.values())


def test_a_promise_may_take_longer_than_until_the_next_proposal():
    world = settled(3, timing=dataclasses.replace(TIMING, dead_after_s=20))
    world.kill(2)
    world.settle(30)
    world.boot(2)

    late = []  # All messages from and to region 2 take 6 s.
    for _ in range(120):
        for region in list(world.members):
            world.train(region)
        late += [(world.now + 6 * (2 in x[:2]), x) for x in world.network]
        world.network = [x for at, x in late if at <= world.now]
        late = [entry for entry in late if entry[0] > world.now]
        while world.network:
            world.deliver(0)
        world.tick()

    assert {tuple(m.view.seats) for m in world.members.values()} == {(0, 1, 2)}


def test_rows_that_the_next_view_may_need_are_kept():
    world = settled(3)
    _, follower, _ = world.members.values()
    promised = follower._promised

    follower._promised = promised._replace(round=promised.round + 1)
    floor = follower._book.floor
    world.turn([])
    assert follower._book.floor == floor

    follower._promised = promised
    world.turn([])
    assert follower._book.floor > floor


def cut_in_two(world, left, seconds):
    for _ in range(seconds):
        world.turn(arrives=lambda dest, sender: (dest in left) == (sender in left))


def test_the_larger_part_of_a_partition_goes_on():
    world = settled(5)
    cut_in_two(world, {0, 1}, 30)
    assert {len(m.view.seats) for m in world.members.values()} == {2, 3}

    world.settle(3)
    assert {r for r, m in world.members.items() if m.why_left} == {0, 1}

    for region in (0, 1):
        world.boot(region)
    world.settle(20)
    assert all(len(m.view.seats) == 5 for m in world.members.values())


def test_fewer_than_min_regions_wait():
    world = settled(5, min_regions=3)
    before = world.steps[0]
    cut_in_two(world, {0, 1}, 60)
    assert world.steps[0] <= before + 3 < world.steps[4]
    world.settle(5)
    assert {r for r, m in world.members.items() if m.why_left} == {0, 1}


def come_back(world, seconds):
    """Let time pass; regions that were left behind restart from their own state."""
    for _ in range(seconds):
        world.turn()
        world.assert_one_mean_a_sync()
        for region, member in list(world.members.items()):
            if member.why_left:
                world.boot(region, world.steps[region] or 0)


@pytest.mark.parametrize(("num", "stays"), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_fewer_than_min_regions_go_on_once_others_are_back(num, stays):
    """The region that stays waits for a mean, as coordinator or not."""
    world = settled(num, min_regions=2)
    stays = (world.members[0].coordinator + stays) % num
    lost = [region for region in range(num) if region != stays]

    for region in lost:
        world.kill(region)
    world.settle(30)
    before = world.steps[stays]
    assert set(world.members[stays].view.seats) == set(range(num))

    for region in lost:
        world.boot(region)
    come_back(world, 60)

    assert min(world.steps.values()) > before + 10
    assert all(len(m.view.seats) == num for m in world.members.values())


def test_a_region_that_began_alone_goes_on_after_a_joiner_died():
    """A run may begin with a view of fewer than min_regions, which can be succeeded."""
    world = World(2, min_regions=2)
    world.boot(0, 100)
    while world.steps[0] is None:
        world.turn()
    world.train(0)
    assert world.members[0]._admitted

    world.kill(1)
    world.settle(20)
    world.boot(1)
    come_back(world, 40)

    assert min(world.steps.values()) > 110


def test_a_region_that_missed_a_restart_of_the_others_follows_them():
    """The epochs of the restarted regions may be lower than that of its own view."""
    world = settled(3, min_regions=2)
    for _ in range(3):  # Later views have higher epochs.
        world.kill(1)
        world.settle(12)
        world.boot(1)
        come_back(world, 30)

    silent = world.members.pop(2)
    world.network.clear()
    for region in (0, 1):
        world.kill(region)
        world.boot(region, 60)
    world.settle(40)
    assert world.members[0].view.epoch < silent.view.epoch

    world.members[2] = silent
    come_back(world, 60)
    assert all(len(m.view.seats) == 3 for m in world.members.values())


@pytest.mark.parametrize("seconds", [3, 8, 12, 40])
def test_a_copy_that_takes_long_is_waited_for_once(seconds):
    """Messages to a region wait behind a copy for it, as on a connection."""
    world = settled(3)
    world.kill(2)
    world.settle(12)
    world.boot(2)
    first = world.members[0].coordinator
    held = []
    until_s = 0.0

    def arrives(dest, sender):
        waits = (dest, sender) == (2, first) and world.now < until_s
        held.extend(world.network[:waits])
        return not waits

    for _ in range(2 * seconds + 30):
        if world.copies and not until_s:
            until_s = world.now + seconds
        if world.now >= until_s:
            world.network = held + world.network
            held = []
        world.turn(arrives=arrives)

    assert len(world.copies) == 1
    assert world.steps[2] > world.copies.popitem()[0][3] + 20
    assert all(len(m.view.seats) == 3 for m in world.members.values())


def test_a_clock_that_is_set_back_does_not_shut_a_region_out():
    world = settled(3)
    world.kill(2)
    world.settle(10)
    world.boots -= 2
    world.boot(2)
    world.boots += 2
    world.settle(30)
    assert 2 in world.members[0].view.seats


def test_a_dead_life_with_a_higher_number_does_not_end_the_one_after_it():
    """It starts before the others miss the dead life, and before it hears them."""
    world = settled(3)
    world.kill(2)

    world.boots = -9
    world.boot(2)
    world.turn()
    assert world.members[0].view.seats[2].boot > world.members[2].boot

    world.settle(40)
    assert not world.members[2].why_left
    assert all(len(m.view.seats) == 3 for m in world.members.values())


def test_a_region_that_leaves_says_so_until_the_others_hear_it():
    """The others have a mean without it after two heartbeats; dead_after is five."""
    world = settled(3)
    leaver = next(iter(world.members.values())).coordinator  # Any region may be it.
    world.members[leaver].leave()
    world.post(leaver)
    world.network.clear()  # Its message is lost, as are those in flight.

    began = world.now
    others = [r for r in range(3) if r != leaver]
    step = world.steps[others[0]]
    while any((0, step + 1) not in world.logs[r] for r in others):
        world.turn(others, seconds=0.25)

    assert world.now - began <= 3
    for region in others:
        assert set(world.members[region].view.seats) == set(others)
    assert world.members[leaver].why_left == "it has left"
    world.assert_one_mean_a_sync()


def part(world, last, stays):
    """Train up to a sync and leave, while messages arrive in random order.

    Messages of one region to another stay in order, as on a connection.

    Returns:
      The sets of regions that the mean of that sync is of, over all regions.
    """
    finished = set()
    logs = world.logs.copy()

    for _ in range(2000):
        for region, member in list(world.members.items()):
            if world.steps[region] < last:
                world.train(region)
            elif not world.waits[region] and region not in finished:
                finished.add(region)
                member.finish(world.now)
                world.post(region)
            elif region in finished and not (stays and member.is_needed(world.now)):
                member.leave()
                world.post(region)
                del world.members[region]

        for _ in range(world.random.randrange(8)):
            ways = {}
            for i, (dest, sender, *_) in enumerate(world.network):
                ways.setdefault((dest, sender), i)
            if ways:
                world.deliver(ways[world.random.choice(sorted(ways))])
        world.tick(0.02)

    assert not world.members
    return {frozenset(log[0, last]) for log in logs.values()}


def means_after_leaving(seed, num, stays):
    world = settled(num, seed)
    return part(world, max(world.steps.values()) + 1, stays)


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
@example(AT_ONCE, 3)
def test_a_region_that_stays_until_it_is_not_needed_loses_no_decision(seed, num):
    assert means_after_leaving(seed, num, stays=True) == {frozenset(range(num))}


def test_a_region_that_leaves_at_once_may_lose_a_decision():
    assert len(means_after_leaving(AT_ONCE, 3, stays=False)) > 1


@pytest.mark.parametrize("straggler", [0, 2])
def test_state_kept_for_a_straggler_is_bounded(straggler):
    """The straggler may be the coordinator; once restarted it catches up."""
    world = settled(3, timing=dataclasses.replace(TIMING, grace_s=1, max_behind=8))
    others = {0, 1, 2} - {straggler}
    kept = []

    for _ in range(120):
        world.turn(others)
        books = [world.members[r]._book for r in range(3)]
        tables = [(b.decided, b.rows, b.own, b.choices, b.quorum_s) for b in books]
        kept.append(max(len(table) for of_book in tables for table in of_book))

    assert max(kept) == max(kept[:60]) <= 8 + 3
    assert "behind the others" in world.members[straggler].why_left
    assert all(set(world.members[r].view.seats) == others for r in others)
    assert min(world.steps[r] for r in others) > world.steps[straggler] + 50

    world.boot(straggler)
    world.settle(20)
    assert max(world.steps.values()) - min(world.steps.values()) <= 1
    assert set(world.members[1].view.seats) == {0, 1, 2}


def test_a_view_that_was_promised_and_never_installed_is_proposed_again():
    world = settled(3)
    del world.members[2]
    at = until(world, messages.Propose)
    world.deliver(at)
    lost = messages.Propose | messages.Install
    world.network = [m for m in world.network if not isinstance(m[3], lost)]

    world.settle(30)
    assert set(world.members[1].view.seats) == {0, 1}
    assert world.steps[1] > 20


def test_a_region_that_sends_but_receives_nothing_is_left_out():
    world = settled(3)
    for _ in range(15):
        world.turn(arrives=lambda dest, sender: dest != 2)

    before = world.steps[0]
    assert set(world.members[0].view.seats) == {0, 1}
    for _ in range(5):
        world.turn([0, 1], arrives=lambda dest, sender: dest != 2)
    assert world.steps[0] > before

    world.settle(3)
    assert world.members[2].why_left


def test_a_region_that_listens_for_long_before_it_asks_is_admitted():
    world = settled(2)
    world.boot(1)
    world.members[1].is_announced = False
    world.settle(30)  # More than it takes to be missed.

    epoch = world.members[0].view.epoch.round
    seats = world.members[0].view.seats
    assert set(seats) == {0}

    world.members[1].announce(world.now)
    world.settle(10)
    assert set(world.members[0].view.seats) == {0, 1}
    assert world.members[0].view.epoch.round == epoch + 1
    assert world.members[1].view.epoch.round == epoch + 1


# --- Two lives of one region ---


def test_a_life_that_wakes_ends_if_a_newer_one_has_its_seat():
    world = settled(3)
    frozen = world.members.pop(1)
    world.settle(12)
    world.boot(1)
    world.settle(20)

    newer = world.members[1]
    world.members[1] = frozen
    world.settle(3)

    assert frozen.is_superseded
    assert world.members[0].view.has(newer.life)
    assert "started again" in frozen.why_left


def test_a_life_that_returns_is_older_than_one_that_started_meanwhile():
    """The frozen life wakes before the newer one has a seat, returns, and then ends."""
    world = settled(3)
    frozen = world.members.pop(1)
    world.settle(12)

    world.boots += 5
    world.boot(1)
    newer = world.members[1]
    world.members[0].receive(1, newer.boot, messages.Join(step=0, hears=()), world.now)
    world.members[2].receive(1, newer.boot, messages.Join(step=0, hears=()), world.now)

    place = dataclasses.replace(world.place, region=1)
    returned = Member(place, frozen.boot + 1, 9, world.now, is_new=False)
    for _ in range(30):
        world.turn()
        returned.tick(world.now)
        for dest, message in returned.outbox:
            world.network.append((dest, 1, returned.boot, message))
        returned.outbox.clear()
        for dest, sender, boot, message in world.network:
            if dest == 1:
                returned.receive(sender, boot, message, world.now)

    for region in (0, 2):
        beat = beat_of(world.members[region].view)
        returned.receive(region, world.members[region].boot, beat, world.now)

    assert world.members[0].view.has(newer.life)
    assert returned.is_superseded
    assert not newer.why_left


@pytest.mark.parametrize("listens", [True, False])
def test_a_start_with_a_clock_that_is_behind_learns_a_number_from_the_others(listens):
    """If it sends before it has received a message, it counts as the older life."""
    world = settled(3)
    older = world.members[1]
    boots = world.boots

    world.boots = -9
    world.boot(1)
    world.boots = boots
    newer = world.members[1]
    newer.is_announced = not listens

    world.turn()
    newer.announce(world.now)
    world.settle(40)  # Longer than a silent life is remembered.

    view = world.members[0].view
    assert view.has(newer.life)
    beat = beat_of(view)
    older.receive(0, world.members[0].boot, beat, world.now)
    assert older.is_superseded == listens

    # The new life ends if the other one gets the seat.
    seat = messages.Seat(older.boot, 0, older.life)
    view = messages.View(view.epoch, {**view.seats, 1: seat})
    beat = beat_of(view)
    newer.receive(0, world.members[0].boot, beat, world.now)
    assert newer.is_superseded != listens


def test_a_life_that_was_frozen_at_its_start_does_not_take_a_number_above_others():
    world = settled(2)
    world.boot(1)
    slow = world.members[1]
    slow.is_announced = False

    world.boot(1)
    newer = world.members[1]
    world.settle(12)

    beat = beat_of(world.members[0].view)
    slow.receive(0, world.members[0].boot, beat, world.now)
    assert slow.is_superseded
    assert world.members[0].view.has(newer.life)


def test_a_newer_life_that_hears_no_member_does_not_push_out_one_that_takes_part():
    """As one that a scheduler started elsewhere, before it moved the region's name."""
    world = settled(2)
    newer_boot = world.boots + 5
    asks = messages.Join(step=0, hears=())
    asks_and_knows_the_other = messages.Join(step=0, hears=(), knows=((0, 1),))

    for _ in range(30):
        for message in (asks, asks_and_knows_the_other):
            world.members[0].receive(1, newer_boot, message, world.now)
        world.turn()

    assert world.members[0].view.has(world.members[1].life)
    assert not world.members[1].why_left


def test_a_newer_life_that_hears_a_member_is_a_joiner():
    world = settled(2)
    member = world.members[0]
    newer_boot = world.boots + 5

    asks = messages.Join(step=0, hears=(member.life,))
    member.receive(1, newer_boot, asks, world.now)

    assert member.joiners(world.now) == {1: newer_boot}


# --- Which regions may decide, and when others count as dead ---


@pytest.mark.parametrize("who", ["another region", "another life", "another epoch"])
def test_only_the_life_that_coordinates_a_view_decides_in_it(who):
    world = settled(3)
    member = world.members[1]
    view = world.members[1].view
    assert view.epoch.region == 0

    sync = (0, 999)
    sender = 0
    boot = view.epoch.boot
    epoch = view.epoch
    member.offer(sync, b"own", world.now)

    if who == "another region":
        sender = 2
        boot = world.members[2].boot
    elif who == "another life":
        boot += 1
    else:
        epoch = epoch._replace(boot=boot + 1)

    decision = messages.Decision(epoch, sync, {1: b"own"})
    member.receive(sender, boot, decision, world.now)
    assert sync not in member._book.decided

    choice = messages.Choice(epoch, sync, (member.life,), {})
    member.receive(sender, boot, choice, world.now)
    assert sync not in member._book.decided


def test_only_the_life_that_a_view_names_proposes_and_installs_it():
    world = settled(3)
    member = world.members[1]
    before = member.view
    boots = [world.members[region].boot for region in range(3)]
    epoch = messages.Epoch(before.epoch.round + 1, 0, boots[0])
    view = messages.View(epoch, before.seats)

    propose = messages.Propose(view, before.epoch, ())
    member.receive(2, boots[2], propose, world.now)
    assert member._promised == before.epoch
    member.receive(0, boots[0], propose, world.now)
    assert member._promised == epoch

    install = messages.Install(view, ())
    member.receive(2, boots[2], install, world.now)
    assert member.view == before
    member.receive(0, boots[0], install, world.now)
    assert member.view == view


def test_views_of_a_region_that_restarts_have_different_epochs():
    names = []
    for _ in range(2):
        world = World(2)
        world.boots += len(names)
        world.boot(0)
        world.settle(12)
        names.append(world.members[0].view.epoch)

    assert names[0].round == names[1].round
    assert names[0] != names[1]


@pytest.mark.parametrize("region", [0, 1])
def test_a_region_that_was_frozen_does_not_take_the_others_for_dead(region):
    """It checks the time before it reads the messages that have arrived."""
    world = settled(3)
    frozen = world.members.pop(region)
    inbox = []

    for _ in range(4):  # Less than dead_after_s.
        for other in list(world.members):
            world.train(other)
        while world.network:
            inbox += world.network[:1] * (world.network[0][0] == region)
            world.deliver(0)
        world.tick()

    world.now += 60  # As if all machines had slept.
    for member in world.members.values():
        member._note_gap(world.now)

    world.members[region] = frozen
    frozen.tick(world.now)
    assert not frozen.outbox or not any(
        isinstance(message, messages.Propose) for _, message in frozen.outbox
    )

    world.network += inbox
    world.settle(10)
    assert all(len(m.view.seats) == 3 for m in world.members.values())
    assert {m.view.epoch.round for m in world.members.values()} == {1}


def test_time_that_a_region_was_frozen_does_not_count_as_silence_of_others():
    """The others were silent for 4 s of 5 before this region was frozen for 3 s."""
    hearing = Hearing((0, 1), 5.0)
    hearing.hear(1, 7, messages.Join(step=0, hears=()), 0.0, True)
    hearing.spare(3.0, 7.0)
    assert hearing.sends(1, 7, 11.9)
    assert not hearing.sends(1, 7, 12.1)

    hearing.spare(1.0, 11.0)  # Only this second is left out.
    assert hearing.sends(1, 7, 12.9)
    assert not hearing.sends(1, 7, 13.1)


def test_a_region_that_freezes_again_and_again_still_detects_a_death():
    world = settled(3)
    world.kill(2)
    for _ in range(30):
        world.now += 3  # Frozen once more.
        world.turn()
    assert set(world.members[0].view.seats) == {0, 1}


@pytest.mark.parametrize("is_cut", [False, True])
def test_rows_that_do_not_arrive_directly_are_requested_at_once(is_cut):
    """The link between the two regions that do not coordinate is dead."""
    world = settled(3)
    leader = world.members[0].coordinator
    ends = {0, 1, 2} - {leader}

    def arrives(dest, sender):
        return not is_cut or {dest, sender} != ends

    for _ in range(8):  # Until regions have noticed the dead link.
        world.turn(arrives=arrives)

    asked = 0
    steps = dict(world.steps)
    for _ in range(20):
        for region in list(world.members):
            world.train(region)
        while world.network:
            message = world.network[0][3]
            asked += isinstance(message, messages.Want)
            if isinstance(message, messages.Choice):
                assert len(message.rows) <= 1  # Only the missing rows.
            if arrives(*world.network[0][:2]):
                world.deliver(0)
            else:
                world.network.pop(0)
        world.tick(0.25)

    assert all(world.steps[r] >= steps[r] + 18 for r in range(3))  # No sync waits.
    assert bool(asked) == is_cut


# --- Outer models that differ ---


def marks_of(world, step, values):
    """Let regions report their outer fragments after the sync of a step."""
    for region, value in values.items():
        mark = messages.Mark((0, step), int(value * 1e12) % 2**60, value, 1.0)
        world.members[region].mark([mark])


@pytest.mark.parametrize(
    ("values", "astray"),
    [
        ({0: 0.5, 1: 0.5, 2: 0.7}, {2}),
        ({0: 0.5, 1: 0.7, 2: 0.7}, {0}),  # The coordinator too.
        ({0: 0.5, 1: 0.6, 2: 0.7}, {1, 2}),  # In a tie the coordinator is right.
        ({0: 0.5, 1: 0.5 + 1e-9, 2: 0.5}, set()),  # Rounding.
        ({0: 0.5, 1: 0.5}, set()),  # Region 2 has not reported.
    ],
)
def test_regions_whose_outer_model_differs_from_most_take_a_copy(values, astray):
    world = settled(3)
    assert world.members[0].coordinator == 0
    marks_of(world, world.steps[0] - 1, values)
    for _ in range(3):
        world.turn()

    gone = {r for r, m in world.members.items() if "was not that of" in m.why_left}
    assert gone == astray

    (finding, *_) = world.members[1].findings or [None]
    assert (finding is None) == (len(values) < 3)
    if finding:
        assert set(finding.astray) == astray
        assert finding.is_rounding == (not astray)

    come_back(world, 40)
    assert all(len(m.view.seats) == 3 for m in world.members.values())
