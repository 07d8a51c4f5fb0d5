"""The study of compressors: its errors, and the command."""

import numpy as np
import pytest

from cocodc_jax.transforms import compression
from experiments.studies import compressors


def test_errors_are_relative_and_of_all_tensors():
    built = compression.top_k(density=0.5)
    tensors = [np.float32([3, 0]), np.float32([0, 4, 4, 0, 0, 3])]
    assert compressors.relative_error(built, tensors) == 0
    tensors.append(np.float32([6, 8]))  # Loses the 6; 9 + 41 + 100 in all.
    error = compressors.relative_error(built, tensors)
    assert error == pytest.approx((36 / 150) ** 0.5)


def test_kinds():
    kinds = {
        "embedding": "embedding", "blocks/3/mlp/up": "mlp",
        "blocks/attention/query": "attention", "norm/scale": "norms",
    }  # fmt: skip
    assert {path: compressors.kind_of(path) for path in kinds} == kinds


@pytest.mark.slow
def test_the_command(call, corpus):
    flags = ["--preset=smoke", "--interval=2", "--rounds=1", "--warmup_steps=1"]
    out, _ = call(compressors, *flags, *corpus)
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    shown = {"normal", "Laplace", "attention", "mlp", "norms", compressors.TOP}
    assert shown < rows.keys()
    assert rows["normal"] == ["0.597", "0.423"]


@pytest.mark.parametrize(("flag", "message"), [
    ("--compressors=int2,int3", "--compressors=int2,int3: 'int3': 'int3' is not"),
    ("--compressors=,", "--compressors=, is empty; name some"),
    ("--interval=0", "--interval=0 must be at least 1"),
    ("--rounds=0", "--rounds=0 must be at least 1"),
    ("--warmup_steps=120", "--warmup_steps=120 must be less than steps=120"),
    ("--steps=7", "Unknown command line flag 'steps'"),
    ("--adopt_from=x", "Unknown command line flag 'adopt_from'"),
    ("--region_id=1", "--region_id=1 is of one elastic region, and this program"),
    ("--workdir=gs://models/run", "--workdir='gs://models/run' is in a bucket"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(refused, monkeypatch, tmp_path, flag, message):
    monkeypatch.chdir(tmp_path)
    assert refused(compressors, "--preset=smoke", flag).startswith(message)
    assert not list(tmp_path.iterdir())
