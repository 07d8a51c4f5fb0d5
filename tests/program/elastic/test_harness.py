"""Real links in real processes, without a model: kills, freezes, and second lives.

The processes are `region.py`. Whatever happens, two regions that applied a sync have
the same outer model after it, unless one of them was to be left behind.
"""

import collections
import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest

from cocodc_jax.elastic import objects
from cocodc_jax.netlab.children import free_addresses
from tests.program.elastic.meeting import MovableAddress
from tests.waiting import wait_until

TIMING = {"beat_s": 0.1, "dead_after_s": 1.5, "grace_s": 20, "start_s": 20}
LONGER_THAN_KEPT_S = objects._KEPT * TIMING["dead_after_s"] + 0.5


class Regions:
    """Some regions as processes; a region may have several."""

    def __init__(self, folder, num, via):
        self.folder = folder
        self.num = num
        where = {"via": "", "addresses": free_addresses(num)}
        if via:
            where = {"via": str(folder / "via"), "addresses": ()}
            (folder / "via").mkdir()

        self.settings = where | {
            "regions": num,
            "folder": str(folder),
            "timing": TIMING,
            "step_s": 0.03,
            "spoils_at": None,
            "clock_s": 0,  # By so much the wall clock of a region is ahead.
            "late_s": 0,  # By so much, at most, a folder shows files late.
        }
        self.processes = []

    def start(self, region, **options):
        settings = json.dumps(self.settings | {"region": region} | options)
        command = [sys.executable, "-m", "tests.program.elastic.region", settings]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        process.region = region
        self.processes.append(process)
        return process

    def lines(self, process):
        path = self.folder / f"{process.region}-{process.pid}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(x) for x in text.split("\n")[:-1]]

    def synced(self, process, num=5, regions=None):
        """Wait until a process has applied `num` more syncs, of all or some regions."""
        before = len(self.lines(process))

        def is_there():
            new = [x for x in self.lines(process)[before:] if "sync" in x]
            of = [x for x in new if regions is None or x["regions"] == regions]
            return len(of) >= num

        wait_until(is_there, 40)

    def check(self, *but):
        """All that the processes applied is the same."""
        seen = collections.defaultdict(set)
        for process in set(self.processes) - set(but):
            for line in self.lines(process):
                if "sync" in line:
                    seen[line["sync"]].add(line["outer"])
        assert seen
        differ = {sync: outers for sync, outers in seen.items() if len(outers) > 1}
        assert not differ


@pytest.fixture(params=["sockets", "folder"])
def make(request, tmp_path):
    """Makes regions, and ends them."""
    with contextlib.ExitStack() as stack:

        def regions(num):
            made = Regions(tmp_path, num, request.param == "folder")

            def end():
                for process in made.processes:
                    process.kill()
                    process.communicate()

            stack.callback(end)
            return made

        yield regions


def wait_for_end(process):
    _, err = process.communicate(timeout=40)
    return process.returncode, err


def test_a_region_that_is_killed_comes_back(make):
    regions = make(3)
    first, second, third = map(regions.start, range(3))
    regions.synced(first, regions=[0, 1, 2])
    second.kill()
    regions.synced(third, regions=[0, 2])
    regions.start(1)
    regions.synced(first, regions=[0, 1, 2])
    regions.check()


def test_a_clock_that_is_set_back_across_a_restart_loses_no_region(make):
    """The others still know the former life, of a higher number.

    The folder shows its files late and out of order.
    """
    regions = make(3)
    regions.settings["late_s"] = 0.2
    processes = [regions.start(region) for region in range(3)]
    regions.synced(processes[0], regions=[0, 1, 2])
    for region, clock_s in ((1, 3600), (1, -3600)):
        processes[region].kill()
        processes[region].wait()
        processes[region] = regions.start(region, clock_s=clock_s)
        regions.synced(processes[2], regions=[0, 1, 2])
        regions.synced(processes[region], regions=[0, 1, 2])
    regions.check()


def test_a_region_that_wakes_does_not_merge_alone(make):
    """The others went on without it for long; it comes back in its process."""
    regions = make(3)
    first, second, third = map(regions.start, range(3))
    regions.synced(first, regions=[0, 1, 2])
    second.send_signal(signal.SIGSTOP)
    regions.synced(third, num=20, regions=[0, 2])
    second.send_signal(signal.SIGCONT)
    regions.synced(second, regions=[0, 1, 2])
    regions.check()
    assert not any(x.get("regions") == [1] for x in regions.lines(second))


def assert_newer_goes_on(regions, newer, older):
    """Check that the older life ends with a reason, and the newer one goes on."""
    code, err = wait_for_end(older)

    assert code == 2
    assert "was started again elsewhere, and its newer life takes part" in err

    regions.synced(newer, num=20, regions=[0, 1])
    assert not any("left" in x for x in regions.lines(newer))
    regions.check(older)


# Over sockets the newer one has the address: see below.
@pytest.mark.parametrize("make", ["folder"], indirect=True)
@pytest.mark.parametrize("wakes", ["early", "late"])
def test_the_newer_of_two_lives_of_a_region_goes_on(make, wakes):
    """The older life wakes before the newer one has its seat, or long after."""
    regions = make(2)
    other = regions.start(0)
    older = regions.start(1)
    regions.synced(other, regions=[0, 1])
    older.send_signal(signal.SIGSTOP)
    regions.synced(other, num=3, regions=[0])
    newer = regions.start(1)
    if wakes == "late":
        end_s = time.monotonic() + LONGER_THAN_KEPT_S
        while time.monotonic() < end_s:
            regions.synced(newer, regions=[0, 1])
    older.send_signal(signal.SIGCONT)
    assert_newer_goes_on(regions, newer, older)


@pytest.mark.parametrize("make", ["sockets"], indirect=True)
@pytest.mark.parametrize("wakes", ["early", "late"])
def test_an_older_life_ends_once_a_newer_one_at_its_address_has_a_seat(make, wakes):
    """A scheduler moves a region, and its name with it.

    The others connect only to the newer life; they answer on the older one's
    connections.
    """
    regions = make(2)
    of_other, of_older, of_newer = free_addresses(3)
    with MovableAddress(of_older) as movable:
        other = regions.start(0, addresses=[of_other, movable.address])
        older = regions.start(1, addresses=[of_other, of_older])
        regions.synced(other, regions=[0, 1])
        older.send_signal(signal.SIGSTOP)
        regions.synced(other, num=3, regions=[0])
        movable.move(of_newer)
        newer = regions.start(1, addresses=[of_other, of_newer])
        if wakes == "late":
            regions.synced(newer, regions=[0, 1])
        older.send_signal(signal.SIGCONT)
        assert_newer_goes_on(regions, newer, older)


@pytest.mark.parametrize("make", ["folder"], indirect=True)
def test_one_of_two_starts_of_a_region_through_a_store_goes_on(make):
    regions = make(2)
    other, older, newer = map(regions.start, (0, 1, 1))
    codes = {}

    def one_has_ended():
        codes.update({x: x.poll() for x in (older, newer)})
        return any(code is not None for code in codes.values())

    wait_until(one_has_ended, 40)
    (left,) = [x for x, code in codes.items() if code is None]
    assert sorted(map(str, codes.values())) == ["2", "None"]
    regions.synced(left, num=20, regions=[0, 1])
    assert other.poll() is None


def test_a_region_whose_outer_model_differs_takes_a_copy(make):
    regions = make(3)
    spoiled = regions.start(1, spoils_at=40)
    regions.start(0)
    regions.start(2)
    wait_until(lambda: any("left" in x for x in regions.lines(spoiled)), 40)
    (left,) = [x["left"] for x in regions.lines(spoiled) if "left" in x]

    assert "its outer fragment 0 was not that of regions [0, 2] after the sync" in left
    regions.synced(spoiled, num=20, regions=[0, 1, 2])
    spoils = [x for x in regions.lines(spoiled) if x.get("outer") == "f" * 15]
    assert len(spoils) == 1

    right = {}
    for process in (*regions.processes[1:], spoiled):
        applied = [x for x in regions.lines(process) if "sync" in x]
        for line in applied[-10:] if process is spoiled else applied:
            assert right.setdefault(line["sync"], line["outer"]) == line["outer"]
