"""The plain loop that chaos kills: its files, and how it resumes."""

import threading

import numpy as np
import pytest

from cocodc_jax.files import read_lines
from cocodc_jax.netlab.children import make_key
from experiments.faults import plain_loop
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")


def place(tmp_path, *words):
    flags = plain_loop.program.own_flags(*plain_loop.OWN_FLAGS)
    flags(["plain_loop", f"--key_file={make_key(tmp_path)}", *words])
    return plain_loop.place_of(flags)


def records(folder, name):
    return read_lines(folder / name, dict)


@pytest.mark.slow
def test_a_region_that_was_stopped_goes_on_from_its_own_checkpoint(tmp_path):
    alone = place(tmp_path, f"--via={tmp_path / 'messages'}", "--regions=1")
    folder = tmp_path / "region_0"
    ends = []

    for life in range(2):
        region = plain_loop.Region(alone, tmp_path, 0.0, checkpoint_every=1000)
        thread = threading.Thread(target=region.train)
        thread.start()

        syncs_before = 3 * life
        wait_until(lambda num=syncs_before: len(records(folder, "syncs.jsonl")) > num)

        region.stop()
        thread.join(60)
        ends.append(records(folder, "metrics.jsonl")[-1]["step"])

    first, second = records(folder, "joins.jsonl")
    assert (first["own_step"], second["own_step"]) == (0, ends[0])
    assert [x["from_peer"] for x in (first, second)] == [False, False]

    steps = [line["step"] for line in records(folder, "metrics.jsonl")]
    assert steps == [*range(1, ends[1] + 1)]

    syncs = records(folder, "syncs.jsonl")
    # A mean that was in flight at the checkpoint came before its regions were noted.
    known = [sync["regions"] for sync in syncs if sync["regions"] is not None]
    assert all(regions == [0] for regions in known)
    assert len(known) >= len(syncs) - 1
    assert len({sync["digest"] for sync in syncs}) == len(syncs)


def test_a_region_has_its_own_data_at_every_step():
    batch = plain_loop.batch_of(0, 3)

    assert batch.shape == (16, 8)
    np.testing.assert_array_equal(plain_loop.batch_of(0, 3), batch)
    assert not np.array_equal(plain_loop.batch_of(1, 3), batch)
    assert not np.array_equal(plain_loop.batch_of(0, 4), batch)


def test_contradicting_flags_are_refused(tmp_path):
    with pytest.raises(ValueError, match="regions=3 must be the 2 of region_addresses"):
        place(tmp_path, "--region_addresses=a:1,b:2", "--regions=3")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="via='.*file' cannot be reached"):
        place(tmp_path, f"--via={tmp_path / 'file'}", "--regions=2")
