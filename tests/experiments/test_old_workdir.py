"""A run that version 0.24.0 began goes on in this one.

The archive is what was left of it when it was killed after the checkpoint of step 7, in
the middle of a sync, with error feedback.
"""

import json
import pathlib
import random
import tarfile

import numpy as np

from experiments import train

ARCHIVE = pathlib.Path(__file__).with_name("workdir_0_24_0.tar.xz")
FLAGS = [
    "--preset=smoke", "--regions=2", "--width=4", "--num_layers=2", "--num_heads=2",
    "--mlp_width=4", "--sequence_length=16", "--steps=12", "--warmup_steps=2",
    "--checkpoint_every=7", "--eval_every=0", "--eval_batches=4", "--log_every=1",
    "--method=cocodc", "--sync_interval=8", "--num_fragments=2", "--delay_steps=3",
    "--compress=ef+int8",
]  # fmt: skip
# What 0.24.0 itself gave after step 12.
LOSS, OUTER_LOSS, BYTES = 5.821626663208008, 5.859086036682129, 4284


def test_it_ends_as_it_would_have(call, tmp_path):
    text, workdir = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    rng = random.Random(0)
    for i in range(40):
        words = "".join(rng.choice("abcdefgh ") for _ in range(2000))
        (text / f"{i}.txt").write_text(words)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(workdir, filter="data")
    where = [f"--dataset=text:{text}", f"--data_dir={tmp_path / 'data'}"]
    code, _, err = call(train, *FLAGS, *where, f"--workdir={workdir}")
    assert code == 0, err
    assert "from step 7" in err
    *_, last = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert (last["step"], last["bytes_sent_per_region"]) == (12, BYTES)
    found = last["eval_loss"], last["eval_loss_outer"]
    np.testing.assert_allclose(found, (LOSS, OUTER_LOSS), rtol=1e-5)
