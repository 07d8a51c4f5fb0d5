"""MaxText's own train step with `RegionSync` after it: `pytest -m trainers`.

The children run in the environment that `environments.py` makes. The tests
compare the parameters that they leave.
"""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.integrations import environments, figures
from tests.integrations import maxtext_runs as runs

pytestmark = pytest.mark.trainers

# Of float32 parameters that moved by 0.05 to 0.15. Two programs sum in another order,
# so the last bits differ; after 13 steps 1e-6 was seen.
TOLERANCE = 5e-6
AS_A_PLAIN_LOOP = ("diloco", "patterns", "layers")
RUNS = (*AS_A_PLAIN_LOOP, "own", "cocodc", "one_bit")


def start(folder, what, *numbers):
    """Start a child of `maxtext_runs`."""
    return start_module("maxtext_runs", folder, what, folder, *numbers)


def start_module(name, folder, *words):
    """Start a module in MaxText's environment, with nothing of pytest's."""
    python = environments.python_of("maxtext")
    if not python.exists():
        pytest.fail(
            f"{python} is not there; make the environment by "
            f"{environments.command_for('maxtext')}",
            pytrace=False,
        )

    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(environments.ROOT),
    }
    command = [python, "-m", f"tests.integrations.{name}", *words]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=environments.ROOT,
        env=env,
        stdout=sys.stderr,
    )


def finish(*children, code=0):
    try:
        assert [child.wait(600) for child in children] == [code] * len(children)
    finally:
        for child in children:
            child.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs of `alone`, `stacked` and two elastic regions."""
    folder = tmp_path_factory.mktemp("maxtext")
    finish(start(folder, "alone"))
    finish(start(folder, "stacked"))
    finish(*(start(folder, "region", index) for index in range(runs.NUM_REGIONS)))
    return folder


def params_of(folder, name, run):
    return dict(np.load(folder / name / f"{run}.npz"))


def facts_of(folder, name):
    return json.loads((folder / name / "facts.json").read_text())


def difference(one, other):
    assert one.keys() == other.keys()
    return max(np.abs(one[path] - other[path]).max() for path in one)


@pytest.mark.parametrize("name", ["stacked", "region"])
@pytest.mark.parametrize("run", AS_A_PLAIN_LOOP)
def test_the_parameters_are_a_plain_loops(folder, run, name):
    """DiLoCo at H 1 is data parallel; streaming by two cuts is a loop in NumPy."""
    first = params_of(folder, "alone", "start")
    apart = []
    for region in range(runs.NUM_REGIONS):
        where = name if name == "stacked" else f"region{region}"
        ours = params_of(folder, where, f"{run}{region}")
        plain = params_of(folder, "alone", f"{run}{region}")
        apart.append(float(difference(ours, plain)))

        assert difference(plain, first) > 0.05
    seen = {f"{run}_{name}": max(apart), "versions": facts_of(folder, "alone")}
    figures.record("maxtext", **seen)
    assert max(apart) < TOLERANCE


@pytest.mark.parametrize("region", range(runs.NUM_REGIONS))
@pytest.mark.parametrize("name", ["stacked", "region"])
def test_diloco_is_maxtexts_own(folder, name, region):
    where = name if name == "stacked" else f"region{region}"
    ours = params_of(folder, where, f"own{region}")
    theirs = params_of(folder, "stacked", f"maxtext{region}")
    print(f"MaxText's own DiLoCo, {where} {region}: {difference(ours, theirs):.2g}")
    assert difference(ours, theirs) < TOLERANCE
    other = params_of(folder, where, f"patterns{region}")
    assert difference(other, theirs) > 0.01


def test_the_plain_loops_differ():
    """Else tests could not tell the two cuts, or a run without a cut, apart."""
    shape = (2, 4, 3)
    for path in ("['layers']['mlp']", "['layers']['attention']"):
        where = [cut(path, shape) for cut in (runs.by_pattern, runs.by_layer)]
        one, other = ([np.broadcast_to(x, shape[1:]) for x in w] for w in where)
        assert not np.array_equal(one, other)
        np.testing.assert_array_equal(sum(other), np.ones(shape[1:]))


@pytest.mark.parametrize("run", ["cocodc", "one_bit"])
def test_other_methods_run_and_learn(folder, run):
    facts = [facts_of(folder, name)[run] for name in ("stacked", "region0")]
    for fact in facts:
        assert np.isfinite(fact["losses"]).all()
        assert fact["losses"][-1] < fact["losses"][0]

    assert facts[0]["bytes_sent"] == facts[1]["bytes_sent"]
    plain = facts_of(folder, "stacked")["patterns"]["bytes_sent"]
    figures.record("maxtext", **{run: figures.learning(facts[0], plain)})

    if run == "cocodc":
        stacked = params_of(folder, "stacked", "cocodc0")
        elastic = params_of(folder, "region0", "cocodc0")
        assert difference(stacked, elastic) < TOLERANCE
    else:
        assert facts[0]["bytes_sent"] < plain / 20


@pytest.mark.parametrize("run", RUNS)
def test_elastic_regions_have_one_outer_model(folder, run):
    outer = [params_of(folder, f"region{r}", f"{run}_outer") for r in range(2)]
    assert difference(*outer) == 0


@pytest.mark.parametrize("name", ["stacked", "region0", "region1"])
def test_maxtexts_state_keeps_its_form_and_its_program(folder, name):
    for fact in facts_of(folder, name).values():
        assert fact["same_form"]
        assert fact["recompiled"] == 0


def test_a_checkpoint_in_mid_flight_goes_on_bit_for_bit(folder):
    resumed = facts_of(folder, "stacked")["patterns"]["resumed"]
    figures.record("maxtext", resumed=0.0 if resumed["bit_for_bit"] else None)
    assert resumed == {"in_flight": 1, "bit_for_bit": True}


@pytest.fixture
def launched(tmp_path):
    """Start regions of the documentation's launcher in new folders."""
    numbers = itertools.count()

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "key").write_bytes(b"a shared secret of 32 bytes ....")
        (folder / "key").chmod(0o600)
        return folder

    return make


def test_maxtexts_own_loop_and_checkpoints_go_on_bit_for_bit(launched):
    full = launched()
    cut = launched()
    finish(start(full, "launcher", 0, 1, 0))
    finish(start(cut, "launcher", 0, 1, 10), code=-9)
    finish(start(cut, "launcher", 0, 1, 10))

    losses = [facts_of(folder, "launcher0")["losses"] for folder in (full, cut)]
    assert min(map(int, losses[1])) == 7  # After MaxText's last checkpoint.
    assert losses[1] == {step: losses[0][step] for step in losses[1]}

    for run in ("params", "outer"):
        one, other = (params_of(folder, "launcher0", run) for folder in (full, cut))
        assert difference(one, other) == 0


def test_a_region_of_maxtexts_own_loop_dies_and_comes_back(launched):
    folder = launched()
    stays = start(folder, "launcher", 0, 2, 17)
    finish(start(folder, "launcher", 1, 2, 17), code=-9)
    finish(start(folder, "launcher", 1, 2, 17), stays)

    facts = [facts_of(folder, f"launcher{index}") for index in range(2)]
    assert [fact["step"] for fact in facts] == [runs.LAUNCHED_STEPS] * 2
    assert [fact["programs"] for fact in facts] == [1, 1]
    # At the step that the other one was at: where it waited for the message of the one
    # that died, or later.
    assert 17 < min(map(int, facts[1]["losses"])) <= runs.MEETING

    outer = [params_of(folder, f"launcher{index}", "outer") for index in range(2)]
    assert difference(*outer) == 0


# Small, for a compiler on one core; the chips of each slice shard it fully.
COMPILED = """
    hardware=cpu attention=dot_product base_emb_dim=256 base_mlp_dim=512 head_dim=128
    base_num_query_heads=2 base_num_kv_heads=2 base_num_decoder_layers=4
    vocab_size=512 max_target_length=128 per_device_batch_size=2
    compile_topology=v5p-8 compile_topology_num_slices=2
"""


def test_messages_cross_between_slices_while_maxtexts_step_computes(tmp_path):
    """In scheduled programs for two v5p slices, which are not there.

    Send and receive start before the loop of MaxText's steps, and end after it.
    """
    result = tmp_path / "result.json"
    words = ["--only=^.streaming_diloco.$", *COMPILED.split()]
    finish(start_module("maxtext_compile", tmp_path, result, *words))

    about = json.loads(result.read_text())
    (row,) = about["rows"]
    print(f"a device, in a period: {row['between_bytes']:,.0f} B between slices")
    windows = [program["name"] for program in row["programs"]]
    assert sorted(windows) == [
        f"start fragment {k}, inner steps, merge" for k in range(3)
    ]
    for program in row["programs"]:
        assert program["num_messages"] > 0
        assert program["spans"]

    # Float32 parameters, and momentum beside the outer ones, over a slice's 4 chips.
    num_chips = about["num_devices"] // 2
    assert num_chips == 4

    share = 4 * about["num_params"] / num_chips
    assert row["between_bytes"] == pytest.approx(share, rel=0.01)
    assert row["outer_bytes"] == pytest.approx(2 * share, rel=0.01)
    assert row["outer_memory"] == "pinned_host"
    assert row["fits"]
