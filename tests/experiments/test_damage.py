"""Damaged checkpoints of several processes: the last good one is gone on from."""

import json
import pathlib
import shutil

import pytest

from experiments import launch_local

LAUNCH = launch_local.__name__
FLAGS = [
    "--processes=2", "--", "--preset=smoke", "--regions=2", "--steps=24",
    "--checkpoint_every=8", "--keep_checkpoints=3", "--eval_every=0",
    "--method=streaming_diloco", "--num_fragments=2", "--sync_interval=8",
    "--delay_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(run, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    code, _, err = run(LAUNCH, *FLAGS, *corpus, f"--workdir={workdir}")
    assert code == 0, err
    return workdir


def files_of_process_1(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """What the second process wrote: its shards of the arrays."""
    paths = checkpoint.rglob("*process_1/**/*")
    return sorted(path for path in paths if path.is_file() and path.stat().st_size)


def flip(paths):
    largest = max(paths, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0x40
    largest.write_bytes(data)


def cut(paths):
    largest = max(paths, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def half(paths):
    for path in paths[::2]:
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut, half])
def test_what_one_process_wrote_is_damaged(run, corpus, finished, tmp_path, damage):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    damage(files_of_process_1(workdir / "checkpoints" / "24"))
    for path in [workdir, workdir / "process_1"]:
        (path / "summary.json").unlink(missing_ok=True)
    code, _, err = run(LAUNCH, *FLAGS, *corpus, f"--workdir={workdir}")
    assert code == 0, err
    assert "24" in err
    assert "damaged" in err
    mine, theirs = (
        json.loads((path / "summary.json").read_text()) for path in (workdir, finished)
    )
    for name in ("eval_loss", "eval_loss_outer", "region_drift"):
        assert mine[name] == theirs[name]
    for name in ("metrics.jsonl", "process_1/metrics.jsonl"):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes()
