"""A region that comes when all others have ended takes their result, or is marked."""

import json

import numpy as np
import pytest

from experiments import status, train


@pytest.fixture(scope="module")
def words(corpus, tmp_path_factory):
    """Flags of two elastic regions with small models and little patience."""
    folder = tmp_path_factory.mktemp("elastic")
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)

    return folder, [
        "--preset=smoke",
        "--method=streaming_diloco",
        *corpus,
        "--regions=2",
        "--num_layers=1",
        "--num_fragments=1",
        "--width=16",
        "--mlp_width=32",
        "--num_heads=2",
        "--num_kv_heads=2",
        "--steps=40",
        "--eval_every=0",
        "--checkpoint_every=0",
        "--exchange=elastic",
        f"--via={folder / 'store'}",
        f"--key_file={key}",
        "--start_s=1",
        "--beat_s=0.1",
        "--dead_after_s=1",
        "--grace_s=1",
        f"--workdir={folder / 'run'}",
    ]


def test_a_late_region_takes_the_result_of_the_others(words, call, capsys):
    folder, flags = words
    out, _ = call(train, *flags, "--region_id=0")
    assert "finished alone since step 0: 40 of 40 steps" in out
    first = json.loads((folder / "run/region_0/summary.json").read_text())
    assert first["alone_since_step"] == 0

    out, err = call(train, *flags, "--region_id=1")
    assert "all other regions have ended: region 1 takes the result of region 0" in err
    assert "finished with the result of region 0: 40 of 40 steps" in out
    second = json.loads((folder / "run/region_1/summary.json").read_text())
    assert second["result_of_region"] == 0
    np.testing.assert_allclose(second["eval_loss"], first["eval_loss"], rtol=1e-6)
    assert (folder / "run/region_1/checkpoints/40").is_dir()

    assert status.main(["status", str(folder / "run")]) == 0
    shown = capsys.readouterr().out
    assert "finished alone since step 0" in shown
    assert "finished, result of region 0" in shown


def test_the_result_of_another_run_is_not_taken(words, call):
    """Its learning rate is another, and it trains alone."""
    folder, flags = words
    for name in ("run", "store"):
        (folder / name).mkdir(exist_ok=True)

    out, err = call(
        train,
        *flags,
        "--region_id=1",
        "--inner_lr=1e-3",
        f"--workdir={folder / 'other'}",
        f"--via={folder / 'other_store'}",
    )

    assert "have ended" not in err
    assert "finished alone since step 0" in out
