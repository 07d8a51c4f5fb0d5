"""Regions as real processes: stopped, cut off for a while, killed all at once."""

import json
import signal
import sys
import time

import pytest

from cocodc_jax.netlab import independent
from experiments import chaos

pytestmark = pytest.mark.slow

STEPS = 240
FLAGS = [
    "--preset=smoke", f"--steps={STEPS}", "--step_seconds=0.2", "--eval_every=0",
    "--eval_batches=6", "--checkpoint_every=20", "--regions=3", "--log_every=1",
    "--outer_digests", "--dead_after_s=4",
]  # fmt: skip


class Run:
    """Three regions of a run."""

    def __init__(self, workdir, corpus):
        train = [sys.executable, "-m", "experiments.train", *FLAGS, *corpus]
        self.workdir = workdir
        self.regions = [
            independent.Region(*each)
            for each in zip(
                independent.commands(train, workdir, 3),
                independent.logs(workdir, 3),
                strict=True,
            )
        ]
        for region in self.regions:
            region.start()

    def lines(self, region, name):
        return chaos.lines(self.workdir / f"region_{region}" / name)

    def step(self, region):
        syncs = self.lines(region, "syncs.jsonl")
        return syncs[-1]["apply_step"] if syncs else 0

    def until(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.tail()
            time.sleep(0.1)

    def tail(self):
        paths = independent.logs(self.workdir, 3)
        return "\n".join(p.read_text()[-1000:] for p in paths if p.exists())

    def finish(self):
        self.until(lambda: all(r.code is not None for r in self.regions))
        assert [r.code for r in self.regions] == [0, 0, 0], self.tail()
        losses = [
            json.loads((self.workdir / f"region_{r}" / "summary.json").read_text())
            for r in range(3)
        ]
        assert len({loss["eval_loss_outer"] for loss in losses}) == 1
        return chaos.judge(self.workdir, 3, STEPS, [], seconds=0)


@pytest.fixture
def three(tmp_path, corpus):
    run = Run(tmp_path, corpus)
    yield run
    for region in run.regions:
        region.send(signal.SIGKILL)


def test_one_is_asked_to_stop_and_one_is_silent_for_a_while(three):
    """SIGTERM leaves with a checkpoint; who was only silent comes back by itself."""
    three.until(lambda: min(map(three.step, range(3))) > 20)
    three.regions[0].send(signal.SIGTERM)  # Whichever coordinates.
    three.until(lambda: three.regions[0].code is not None)
    assert three.regions[0].code == 0
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
    assert ("gone", [0]) in kinds
    assert ("gone", [2]) in kinds


def test_all_die_and_come_back_from_checkpoints(three):
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
