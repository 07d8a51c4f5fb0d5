"""Regions as real processes: stopped, cut off for a while, killed all at once."""

import json
import signal
import sys
import time

import pytest

from cocodc_jax.netlab import children
from cocodc_jax.run.exits import STOPPED
from cocodc_jax.train.checkpoint import steps_in
from experiments.faults import kills

pytestmark = pytest.mark.slow

STEPS = 240
FLAGS = [
    "--preset=smoke",
    f"--steps={STEPS}",
    "--step_seconds=0.2",
    "--eval_every=0",
    "--eval_batches=6",
    "--checkpoint_every=20",
    "--regions=3",
    "--log_every=1",
    "--outer_digests",
    "--dead_after_s=4",
]


class Run:
    """Three regions of a run."""

    def __init__(self, workdir, flags, num=3, num_processes=1, via=""):
        flags = [*flags, f"--via={via}"] if via else flags
        train = [sys.executable, "-m", "experiments.train", *flags]
        train.append(f"--workdir={workdir}")
        self.workdir = workdir
        self.num = num
        self.regions = children.make_regions(train, workdir, num, via, num_processes)
        for region in self.regions:
            region.start()

    def lines(self, region, name):
        return kills.lines(self.workdir / f"region_{region}" / name)

    def step(self, region):
        syncs = self.lines(region, "syncs.jsonl")
        return syncs[-1]["apply_step"] if syncs else 0

    def until(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.tail()
            time.sleep(0.1)

    def tail(self):
        paths = sorted(self.workdir.glob("region_*/output.log"))
        return "\n".join(p.read_text()[-1000:] for p in paths if p.exists())

    def end(self):
        self.until(lambda: all([r.code is not None for r in self.regions]), 600)
        assert [r.code for r in self.regions] == [0] * self.num, self.tail()

    def finish(self, steps=STEPS):
        self.end()

        losses = [
            json.loads((self.workdir / f"region_{r}" / "summary.json").read_text())
            for r in range(self.num)
        ]
        assert len({loss["eval_loss_outer"] for loss in losses}) == 1

        return kills.judge(
            self.workdir, self.num, steps, [], seconds=0, dead_after_s=10
        )

    def kill(self):
        for region in self.regions:
            region.send(signal.SIGKILL)


@pytest.fixture
def three(tmp_path, corpus):
    run = Run(tmp_path, [*FLAGS, *corpus])
    yield run
    run.kill()


def test_a_stopped_and_a_frozen_region_come_back(three):
    """SIGTERM leaves with a checkpoint; a frozen region comes back by itself."""
    three.until(lambda: min(map(three.step, range(3))) > 20)
    three.regions[0].send(signal.SIGTERM)  # Perhaps the coordinator.
    three.until(lambda: three.regions[0].code is not None)
    assert three.regions[0].code == STOPPED

    at = three.step(1)
    three.until(lambda: three.step(1) > at + 20, seconds=60)

    three.regions[0].start()
    three.regions[2].send(signal.SIGSTOP)
    at = three.step(1)
    three.until(lambda: three.step(1) > at + 40)
    three.regions[2].send(signal.SIGCONT)

    result = three.finish()
    assert not result["gaps_unexplained"]
    assert not result["merges_that_differ"]
    assert [region.lives for region in three.regions] == [2, 1, 1]

    assert three.lines(0, "joins.jsonl")[-1]["from_peer"]
    last = three.lines(2, "joins.jsonl")[-1]
    assert last["from_peer"]
    assert last["carried"]

    kinds = [(f["kind"], f["where"]) for f in three.lines(1, "faults.jsonl")]
    assert all(("gone", [region]) in kinds for region in (0, 2))
    left = [f for f in three.lines(2, "faults.jsonl") if f["kind"] == "left"]
    assert left[-1]["where"] == [2]
    assert "without this one" in left[-1]["reason"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sigterm_ends_the_wait_for_a_region_that_is_frozen(
    tmp_path, corpus, num_processes
):
    """Also where only the second process of a region is asked to stop."""
    flags = ["--preset=smoke", "--steps=4000", "--eval_every=0", "--dead_after_s=120"]
    flags += ["--regions=2", f"--data_axis={num_processes}", *corpus]
    run = Run(tmp_path, flags, 2, num_processes)
    first, frozen = run.regions

    try:
        run.until(lambda: min(map(run.step, range(2))) > 8)
        frozen.send(signal.SIGSTOP)
        time.sleep(5)  # All of its messages are merged: the other waits for it.

        begin_s = time.monotonic()
        first.processes[-1].send_signal(signal.SIGTERM)
        run.until(lambda: first.code is not None, 30)
        assert first.code == STOPPED

        # The wait ends within two seconds; then the checkpoint is written.
        assert time.monotonic() - begin_s < 15
        assert max(steps_in(tmp_path / "region_0" / "checkpoints")) > 8
    finally:
        run.kill()
        for region in run.regions:
            region.wait()


def test_regions_that_all_die_come_back_from_checkpoints(three):
    saved = [three.workdir / f"region_{r}" / "checkpoints" / "40" for r in range(3)]
    three.until(lambda: all(path.exists() for path in saved))
    for region in three.regions:
        region.send(signal.SIGKILL)

    three.until(lambda: not any(region.is_running for region in three.regions))
    for region in three.regions:
        region.start()
    assert not three.finish()["gaps_unexplained"]
    ends = [three.lines(r, "joins.jsonl")[-1] for r in range(3)]
    assert sorted(end["from_peer"] for end in ends) == [False, True, True]
    assert max(end["own_step"] for end in ends) >= 40


def test_with_min_regions_2_a_region_waits_until_the_killed_one_is_back(
    tmp_path, corpus
):
    """With min_regions, the one that is left waits; it coordinates, then not."""
    flags = [*FLAGS, "--regions=2", "--min_regions=2", "--start_s=20", *corpus]
    run = Run(tmp_path, flags, 2)
    try:
        run.until(lambda: min(map(run.step, range(2))) > 6)
        for region in run.regions:  # The second waits for a mean when it is asked.
            region.send(signal.SIGTERM)
            run.until(lambda region=region: region.code == STOPPED)
            time.sleep(2)

        for region in run.regions:
            region.start()
        for lost in (1, 0):
            at = run.step(0)
            run.until(lambda at=at: min(map(run.step, range(2))) > at + 20)
            run.regions[lost].send(signal.SIGKILL)
            run.until(lambda lost=lost: not run.regions[lost].is_running)
            time.sleep(8)  # It counts as dead, and the other one waits.

            run.regions[lost].start()
            stays = 1 - lost
            run.until(lambda r=stays: run.lines(r, "joins.jsonl")[-1]["carried"])

        result = run.finish()
    finally:
        run.kill()

    assert not result["merges_that_differ"]
    assert [region.lives for region in run.regions] == [3, 3]
    assert [len(run.lines(r, "joins.jsonl")) for r in range(2)] == [4, 4]


def test_sockets_and_a_folder_give_the_same_numbers(tmp_path, corpus):
    flags = ["--preset=smoke", "--steps=40", "--eval_batches=4", "--regions=2", *corpus]
    messages = tmp_path / "messages"

    runs = [
        Run(tmp_path / "sockets", flags, 2),
        Run(tmp_path / "folder", flags, 2, via=str(messages)),
    ]
    for run in runs:
        run.end()

    for region in ("region_0", "region_1"):
        one, other = (run.workdir / region / "metrics.jsonl" for run in runs)
        assert one.read_bytes() == other.read_bytes()

    assert not list(messages.iterdir())


SEVERAL = [
    "--preset=smoke",
    "--batch_per_region=96",
    "--eval_every=0",
    "--eval_batches=2",
    "--data_axis=2",
    "--regions=2",
    "--log_every=1",
    "--outer_digests",
    "--checkpoint_every=50",
    "--dead_after_s=8",
]


@pytest.fixture
def started(tmp_path, corpus):
    """Starts two regions of some processes each."""
    runs = []

    def start(name, num_processes, steps):
        flags = [*SEVERAL, *corpus, f"--steps={steps}"]
        runs.append(Run(tmp_path / name, flags, 2, num_processes))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def test_regions_of_two_processes_have_the_numbers_of_one_with_two_devices(started):
    def digests(folder):
        return [sync["digest"] for sync in kills.lines(folder / "syncs.jsonl")]

    one = started("one", 1, 40)
    two = started("two", 2, 40)
    one.finish(40)
    two.finish(40)
    expected = digests(one.workdir / "region_0")
    assert len(expected) > 10

    for folder in ("region_0", "region_1", "region_1/process_1"):
        assert digests(two.workdir / folder) == expected


@pytest.mark.parametrize("process", [0, 1])
def test_a_region_ends_with_any_of_its_processes_and_comes_back(started, process):
    run = started("run", 2, 900)
    run.until(lambda: min(map(run.step, range(2))) > 20)
    run.regions[1].processes[process].kill()
    run.until(lambda: run.regions[1].code is not None, seconds=30)
    run.regions[1].start()

    result = run.finish(900)
    assert not result["gaps_unexplained"]
    assert not result["merges_that_differ"]
    joins = run.lines(1, "joins.jsonl")
    assert [join["from_peer"] for join in joins] == [False, True]
    assert run.regions[0].lives == 1
