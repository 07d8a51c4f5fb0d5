"""Faults of a network are named while regions train, and noise is not.

Regions are the state machines of the agreement; the network is a table of how long
each pair takes, and a clock that is turned by hand.
"""

import heapq
import itertools
import random

import numpy as np
import pytest

from cocodc_jax.elastic.messages import Choice, Decision, Row
from cocodc_jax.elastic.place import Place, Timing
from cocodc_jax.elastic.protocol import Member
from cocodc_jax.elastic.times import Measured, Silence, Silences
from cocodc_jax.files import read_lines
from cocodc_jax.run.fault_watch import FAULTS_FILE, FaultWatch

NUM = 4
TICK_S = 0.5
SYNC_STEPS = 10
WARM = 20
FAULT_AT_S = 240.0


class Lab:
    """Four regions, a step a second, a sync every ten, rows that take half a second."""

    def __init__(self, tmp_path, seed=0, on_fault="warn", **timing):
        timing = Timing(**({"beat_s": 0.5, "grace_s": 4, "start_s": 5} | timing))
        self.random = random.Random(seed)
        self.now = 0.0
        self.on_fault = on_fault
        self.order = itertools.count()
        self.heap = []
        self.folder = tmp_path

        self.last = np.zeros((NUM, NUM))
        self.row_s = np.full((NUM, NUM), 0.5)
        self.step_s = np.ones(NUM)
        self.lost = np.zeros((NUM, NUM), bool)
        self.shares = {}  # Of rows lost, and sent again a second later.

        self.clocks = [self.random.uniform(-1e4, 1e4) for _ in range(NUM)]
        self.members = [
            Member(
                Place(
                    region=r,
                    addresses=(),
                    key=b"k" * 32,
                    timing=timing,
                    via="/x",
                    regions=NUM,
                ),
                1,
                0,
                now,
            )
            for r, now in enumerate(map(self.clock, range(NUM)))
        ]

        self.steps = [0.0] * NUM
        self.busy_s = [0.0] * NUM
        self.straggler = None
        self.held = []
        self.has_bursts = False
        self.busy_until = [0.0] * NUM

        self.waits = [set() for _ in range(NUM)]
        self.means = [{} for _ in range(NUM)]
        self.offered = [{} for _ in range(NUM)]
        self.took = [{} for _ in range(NUM)]

        folders = [tmp_path / str(r) for r in range(NUM)]
        for folder in folders:
            folder.mkdir()
        self.watches = [FaultWatch(folder, on_fault, 0.05) for folder in folders]

    def clock(self, region):
        return self.now + self.clocks[region]

    def post(self, region):
        member = self.members[region]
        for dest, message in member.outbox:
            if self.lost[region, dest]:
                continue

            seconds = 0.04 * self.random.uniform(0.8, 1.3)
            if isinstance(message, Row | Decision | Choice):
                big = isinstance(message, Row) or len(message.rows) > 0
                noise = self.random.uniform(0.8, 1.25)
                seconds += big * self.row_s[region, dest] * noise
                seconds += big * self.burst_s(region, dest)
                while big and self.random.random() < self.shares.get((region, dest), 0):
                    seconds += 1.0

            # Messages stay in order.
            at = max(self.now + seconds, self.last[region, dest])
            self.last[region, dest] = at
            entry = (at, next(self.order), dest, region, member.boot, message)
            heapq.heappush(self.heap, entry)
        member.outbox.clear()

        for decision in member.delivered:
            self.waits[region].discard(decision.sync)
            sync = decision.sync
            self.means[region][sync] = tuple(sorted(decision.rows))
            self.took[region][sync] = self.now - self.offered[region][sync]
        member.delivered.clear()

        steps = int(self.steps[region])
        member.oldest_step = min((s for _, s in self.waits[region]), default=steps)

    def burst_s(self, sender, receiver):
        """Return the extra seconds of a message if an end is busy, or at random."""
        if not self.has_bursts:
            return 0.0

        rate = 0.0
        for region in (sender, receiver):
            if self.random.random() < 0.002:  # For half a minute, a few in an hour.
                self.busy_until[region] = self.now + self.random.uniform(5, 60)
            rate += 0.2 * (self.now < self.busy_until[region])

        spike = self.random.uniform(0.1, 2.0) * (self.random.random() < 0.003)
        return spike + (min(self.random.expovariate(1 / rate), 0.25) if rate else 0)

    def train(self, region):
        member = self.members[region]
        if not member.is_in or len(self.waits[region]) > 1:
            return
        self.busy_s[region] += TICK_S
        if self.is_stopped(region):
            return

        before = int(self.steps[region]) // SYNC_STEPS
        noise = self.random.uniform(0.9, 1.1)
        self.steps[region] += TICK_S / self.step_s[region] * noise
        at = int(self.steps[region]) // SYNC_STEPS

        if at > before:
            sync = (at % 3, at * SYNC_STEPS)
            member.times.step_s = self.busy_s[region] / SYNC_STEPS
            self.busy_s[region] = 0.0
            self.waits[region].add(sync)
            self.offered[region][sync] = self.now
            member.offer(sync, b"%d" % region, self.clock(region))

    def is_stopped(self, region):
        """Whether its process is stopped now: for 4 s of 5."""
        return region == self.straggler and self.now % 5 < 4

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S

            if not self.is_stopped(self.straggler):
                for entry in self.held:  # All at once when it wakes.
                    heapq.heappush(self.heap, (self.now, *entry))
                self.held.clear()

            while self.heap and self.heap[0][0] <= self.now:
                at, number, dest, sender, boot, message = heapq.heappop(self.heap)
                if self.is_stopped(dest):
                    self.held.append((number, dest, sender, boot, message))
                elif not self.lost[sender, dest]:
                    when = at + self.clocks[dest]
                    self.members[dest].receive(sender, boot, message, when)
                    self.post(dest)

            for region, member in enumerate(self.members):
                self.train(region)
                if self.is_stopped(region):
                    continue

                member.tick(self.clock(region))
                self.post(region)

                present = tuple(member.view.seats)
                silences = member.silent(self.clock(region))
                self.watches[region].silent(silences)

                for measured in member.times.finished(present, self.clock(region)):
                    faulty = self.watches[region](measured, present)
                    member.shunned, member.detours = faulty

    def faults(self, region=0):
        return read_lines(self.folder / str(region) / FAULTS_FILE, dict)

    def newest_mean(self, region):
        """Return the regions of the newest mean."""
        return self.means[region][max(self.means[region], key=lambda sync: sync[1])]

    def named(self, region=0, what="begins"):
        return [
            (line["kind"], tuple(line["where"]))
            for line in self.faults(region)
            if line["fault"] == what
        ]


FIVE_SYNCS_S = 5 * SYNC_STEPS + 10  # And what it takes to tell of one.


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    lab.run(FAULT_AT_S)
    assert min(lab.steps) > WARM * SYNC_STEPS
    assert all(lab.faults(r) == [] for r in range(NUM))
    return lab


def test_a_straggler_is_named_and_the_others_do_not_wait_for_it(lab):
    lab.step_s[2] = 4.0
    lab.run(4 * FIVE_SYNCS_S)  # Its own next syncs, of 40 s each, show it.
    for region in range(NUM):
        assert lab.named(region) == [("slow", (2,))]
    assert lab.faults()[0]["seconds"] > 3
    # Only 4 s of grace every 10 s.
    assert lab.steps[0] > FAULT_AT_S + 4 * FIVE_SYNCS_S * 0.6

    lab.step_s[2] = 1.0
    lab.run(2 * FIVE_SYNCS_S)
    assert ("slow", (2,)) in lab.named(0, "ends")


def test_a_process_that_stops_and_goes_on_again_and_again_is_slow(lab):
    """Messages from and to it are late too, but no link or other region is named."""
    lab.straggler = 2
    lab.run(5 * 5 * SYNC_STEPS)
    for region in {0, 1, 3}:
        assert lab.named(region) == [("slow", (2,))]
    lab.straggler = None
    lab.run(10 * SYNC_STEPS)
    assert lab.named(0, "ends") == [("slow", (2,))]


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_a_link_that_loses_messages_is_named(lab, share):
    lab.lost[1, 3] = share == 1
    lab.shares[1, 3] = share % 1
    lab.run(FIVE_SYNCS_S)
    assert ("link", (1, 3)) in lab.named(0)
    assert {kind for kind, _ in lab.named(0)} == {"link"}


def test_a_slow_uplink_is_a_sender_and_a_downlink_a_receiver(lab):
    lab.row_s[1] = 3.0
    lab.run(FIVE_SYNCS_S)
    assert lab.named(2) == [("sender", (1,))]

    lab.row_s[1] = 0.5
    lab.run(FIVE_SYNCS_S)
    assert lab.named(2, "ends") == [("sender", (1,))]

    lab.row_s[:, 3] = 3.0
    lab.run(FIVE_SYNCS_S)
    assert lab.named(0)[1:] == [("receiver", (3,))]


def cut(lab, part, is_cut=True):
    for i, j in itertools.product(range(NUM), repeat=2):
        if (i in part) != (j in part):
            lab.lost[i, j] = is_cut


def test_a_region_cut_off_for_a_minute_is_gone(lab):
    cut(lab, {3})
    lab.run(60)
    cut(lab, {3}, is_cut=False)
    assert lab.named(0) == lab.named(2) == [("gone", (3,))]
    lab.run(5)
    assert "went on" in lab.members[3].why_left or "larger" in lab.members[3].why_left


def test_a_partition_is_named_on_both_sides(lab):
    cut(lab, {2, 3})
    lab.run(60)
    assert lab.named(0) == [("gone", (2,)), ("gone", (3,))]
    assert lab.named(3) == [("gone", (0,)), ("gone", (1,))]


def test_a_partition_among_the_patient_is_named(tmp_path):
    """With a long dead_after_s the matrix of times shows the silence."""
    lab = Lab(tmp_path, dead_after_s=600, grace_s=2)
    lab.run(FAULT_AT_S)
    leader = lab.members[0].coordinator
    part = {leader, (leader + 1) % NUM}
    rest = set(range(NUM)) - part
    cut(lab, part)
    lab.run(FIVE_SYNCS_S + 20)  # Means wait a while for a silent region.

    named = lab.named(leader)
    parted = ("partition", tuple(part if 0 in rest else rest))
    assert [x for x in named if x[0] != "silent"] == [parted]
    assert sorted(named)[1:] == [("silent", (r,)) for r in sorted(rest)]


def test_half_an_hour_of_noise_is_not_named(tmp_path):
    lab = Lab(tmp_path, seed=1, grace_s=60)
    lab.has_bursts = True
    lab.run(1800)
    assert min(lab.steps) > 1700
    assert all(lab.faults(r) == [] for r in range(NUM))


def test_every_region_excludes_the_same_faulty_regions(tmp_path):
    lab = Lab(tmp_path, on_fault="exclude")
    lab.run(FAULT_AT_S)
    lab.row_s[1] = 3.0
    lab.run(2 * FIVE_SYNCS_S)

    last = sorted(lab.means[0].keys() & lab.means[3].keys(), key=lambda s: s[1])[-3:]
    for sync in last:
        assert lab.means[0][sync] == lab.means[3][sync] == (0, 2, 3)
    lab.row_s[1] = 0.5

    lab.run(3 * FIVE_SYNCS_S)
    assert lab.newest_mean(0) == (0, 1, 2, 3)


def test_messages_go_around_a_link(tmp_path):
    lab = Lab(tmp_path, on_fault="route")
    lab.run(FAULT_AT_S)

    leader = lab.members[0].coordinator
    sender = (leader + 1) % NUM
    receiver = (leader + 2) % NUM

    lab.lost[sender, receiver] = True
    lab.run(FIVE_SYNCS_S)
    assert (sender, receiver) in lab.members[leader].detours
    assert lab.newest_mean(receiver) == (0, 1, 2, 3)


@pytest.mark.parametrize("is_from_it", [True, False])
def test_the_list_goes_around_a_link_of_the_coordinator(tmp_path, is_from_it):
    """Another region coordinates, whose lists make the means arrive in time."""
    lab = Lab(tmp_path, on_fault="route", grace_s=20, dead_after_s=60)
    lab.run(FAULT_AT_S)
    leader = lab.members[0].coordinator
    other = (leader + 1) % NUM
    link = (leader, other) if is_from_it else (other, leader)
    lab.row_s[link] = 0.8 * SYNC_STEPS
    lab.run(FIVE_SYNCS_S)

    assert max(lab.took[other].values()) > 6
    assert all(lab.named(r) == [("link", link)] for r in range(NUM))

    lab.run(60)  # No sooner does another one coordinate.
    assert {member.coordinator for member in lab.members} == {min({0, 1, 2} - {*link})}
    assert all(set(member.view.seats) == set(range(NUM)) for member in lab.members)

    since = lab.steps[0]
    lab.run(100)
    for region in range(NUM):
        new = [sync for sync in lab.means[region] if sync[1] > since]
        assert len(new) >= 8
        assert max(lab.took[region][sync] for sync in new) < 5
        assert {lab.means[region][sync] for sync in new} == {(0, 1, 2, 3)}


def hear(silences, rng, seconds, now=0.0, regions=(1, 2)):
    """Signs of life twice a second, some late; a sync every 0.8 s."""
    overdue = []
    due = dict.fromkeys(regions, now)

    for tick in range(int(seconds * 10)):
        at = now + tick / 10
        for region in regions:
            if at >= due[region]:
                silences.heard((region, 7), at)
                late = rng.random() < 0.01
                due[region] = at + rng.uniform(0.3, 0.8) + late * rng.uniform(0, 1)

        if tick % 8 == 0 and len(regions) == 2:
            silences.decided(at)
        overdue += [(at, r) for r in silences.overdue({(1, 7), (2, 7)}, at)]
    return overdue


def test_a_silent_region_is_named_within_five_syncs_and_noise_is_not():
    silences = Silences(0.5)
    rng = random.Random(0)
    assert hear(silences, rng, 3600) == []

    at, region = hear(silences, rng, 10, now=3600, regions=(1,))[0]
    assert region == 2
    assert at - 3600 < 5 * 0.8
    assert hear(silences, rng, 60, now=3610) == []

    # This process slept, not the others.
    assert silences.overdue({(1, 7), (2, 7)}, 4000) == {}


def test_a_silence_is_reported_when_it_begins_and_when_it_ends(tmp_path):
    reported = []
    watch = FaultWatch(tmp_path, "warn", 0.05, lambda *report: reported.append(report))
    for now in ({2: Silence(2.5, 0.7)}, {2: Silence(3.0, 0.7)}, {}):
        watch.silent(now)

    lines = read_lines(tmp_path / FAULTS_FILE, dict)
    reports = [(x["fault"], x["kind"], x["where"], x["seconds"]) for x in lines]
    assert reports == [("begins", "silent", [2], 2.5), ("ends", "silent", [2], 3.0)]

    assert [(is_on, x.kind, x.where) for is_on, x, _ in reported] == [
        (True, "silent", (2,)),
        (False, "silent", (2,)),
    ]
    assert reported[0][2].startswith("region 2 is silent for 2.5 s")


def test_the_reason_why_a_region_left_is_in_its_file(tmp_path):
    watch = FaultWatch(tmp_path, "warn", least_s=0.05)
    watch.note_left(1, "region 1: region 0 and others went on without this one")

    (line,) = read_lines(tmp_path / FAULTS_FILE, dict)
    assert (line["fault"], line["kind"], line["where"]) == ("left", "left", [1])
    assert line["reason"] == "region 1: region 0 and others went on without this one"


def test_a_region_that_is_left_alone_reports_the_others_as_gone(tmp_path):
    watch = FaultWatch(tmp_path, "warn", 0.05)
    nan = float("nan")
    quiet = [[nan] * 3 for _ in range(3)]
    watch(Measured((0, 0), quiet, [1.0, 1.0, 1.0]), (0, 1, 2))
    for start in range(1, 8):
        faulty = watch(Measured((0, start), quiet, [1.0, nan, nan]), (0,))
        assert faulty == (frozenset(), frozenset())

    lines = read_lines(tmp_path / FAULTS_FILE, dict)
    assert {(line["start_step"], line["seconds"]) for line in lines} == {(1, None)}
    named = [(x["kind"], x["where"]) for x in lines]
    assert named == [("gone", [1]), ("gone", [2])]
