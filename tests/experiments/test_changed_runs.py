"""The same folder with other flags: on another machine, or longer than it was."""

import json
import re
import shutil

import numpy as np
import pytest

from cocodc_jax.run.resume import check_exchange
from experiments import train

FLAGS = [
    "--preset=smoke", "--method=streaming_diloco", "--num_layers=2", "--steps=16",
    "--num_fragments=2", "--sync_interval=8", "--checkpoint_every=5", "--log_every=8",
    "--eval_every=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    words = (*FLAGS, "--keep_checkpoints=9", *corpus, f"--workdir={workdir}")
    code, _, err = call_once(train, *words)
    assert code == 0, err
    return workdir


@pytest.fixture
def killed(finished, tmp_path):
    """The same run as if it had been killed after step 5, with a fragment in flight."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    for step in ("10", "15", "16"):
        shutil.rmtree(workdir / "checkpoints" / step)
    (workdir / "summary.json").unlink()
    return workdir


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [r["loss_regions"] for r in found if r["kind"] == "train"]


def test_a_run_goes_on_elsewhere_and_notes_it(killed, finished, call, corpus, tmp_path):
    """On one device, with the corpus in another place; and is asked for once more."""
    data = tmp_path / "data"
    shutil.copytree(corpus[0].partition(":")[2], data)
    moved = [f"--dataset=text:{data}", f"--data_dir={tmp_path / 'prepared'}"]
    others = {"devices": 1, "optimizer_memory": "host", "exchange": "outer"}
    others |= {"attention": "plain", "loader_threads": 2, "eval_every": 4}
    words = [*FLAGS, *moved, *(f"--{k}={v}" for k, v in others.items())]
    before = json.loads((killed / "config.json").read_text())["run"]
    code, _, err = call(train, *words, f"--workdir={killed}")
    assert code == 0, err
    assert "goes on from step 5 with devices=1 (was 0), optimizer_memory=host" in err
    (line,) = (killed / "changes.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert noted["step"] == 5
    assert noted["changes"]["eval_every"] == [8, 4]
    assert noted["changes"].keys() == {*others, "dataset", "data_dir"} | {
        "keep_checkpoints"
    }
    after = json.loads((killed / "config.json").read_text())["run"]
    assert after == before | {k: v for k, v in others.items() if k in before} | {
        "keep_checkpoints": 2
    }
    np.testing.assert_allclose(losses(killed), losses(finished), rtol=1e-4)
    code, _, err = call(train, *words, f"--workdir={killed}", "--log_every=2")
    assert code == 0
    assert f"note: the run in {killed} is finished; it was not run again with" in err
    assert "log_every=2 (was 8)" in err


def test_other_data_under_another_name_are_refused(finished, call, corpus, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"other {number}\n" * 300)
    before = (finished / "config.json").read_text()
    words = (*FLAGS, *corpus, f"--dataset=text:{tmp_path / 'text'}")
    code, _, err = call(train, *words, f"--workdir={finished}")
    assert code == 2
    assert "but this stream reads" in err
    assert (finished / "config.json").read_text() == before
    assert not (finished / "changes.jsonl").exists()


def test_a_finished_run_goes_on_for_more_steps(call, corpus, tmp_path):
    longer, whole = tmp_path / "longer", tmp_path / "whole"
    words = [*FLAGS, *corpus, "--final_lr_fraction=1"]
    assert call(train, *words, "--steps=8", f"--workdir={longer}")[0] == 0
    code, out, err = call(train, *words, f"--workdir={longer}")
    assert code == 0, err
    assert "goes on from step 8 with steps=16 (was 8)\n" in err
    assert "learning rate" not in err
    assert json.loads(out[out.index("{") :])["steps"] == 16
    assert call(train, *words, f"--workdir={whole}")[0] == 0
    np.testing.assert_allclose(losses(longer), losses(whole), rtol=1e-4)
    code, _, err = call(train, *words, f"--workdir={longer}", "--steps=15")
    assert code == 2
    assert "for steps give 16 or more, as so many are done" in err


def test_a_mixture_goes_on_with_its_experts_on_another_number_of_devices(
    call, corpus, tmp_path
):
    many, one = tmp_path / "many", tmp_path / "one"
    words = [*FLAGS, *corpus, "--regions=2", "--num_experts=4", "--expert_width=16"]
    words += ["--fragment_strategy=experts", "--expert_weights=tokens"]
    words += ["--final_lr_fraction=1"]
    # The last fragment is in flight.
    half = ["--steps=9", "--expert_axis=2", f"--workdir={many}"]
    assert call(train, *words, *half)[0] == 0
    code, _, err = call(train, *words, f"--workdir={many}")
    assert code == 0, err
    assert "goes on from step 9 with steps=16 (was 9), expert_axis=1 (was 2)\n" in err
    assert call(train, *words, f"--workdir={one}")[0] == 0
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-4)


def test_a_schedule_that_follows_the_length_changes_where_that_is_asked_for(
    finished, call, corpus, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    words = [*FLAGS, *corpus, f"--workdir={workdir}", "--steps=20"]
    code, _, err = call(train, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert "for steps add --change_schedule, as the learning rate follows" in err
    code, out, err = call(train, *words, "--change_schedule")
    assert code == 0, err
    assert "goes on from step 16 with steps=20 (was 16)" in err
    assert "  the learning rate of its next step is 0.000747, not 0.0003\n" in err
    assert json.loads(out[out.index("{") :])["steps"] == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--outer_lr=0.3"], "lr: 0.4, not 0.3.: for outer_lr give --outer_lr=0.4 as "),
        (["--outer_lr=0.3"], "or train in another workdir with --adopt_from={}, which"),
        (["--width=64", "--devices=1"], "for width give --width=32 as before, or begi"),
        (["--init_from=x"], "for init_from give --init_from=, which the run began wi"),
        (["--seed=1", "--num_layers=1"], "for seed give .*; for num_layers give "),
    ],
)
def test_a_refusal_says_what_to_do_for_each_field(
    finished, call, corpus, words, message
):
    code, _, err = call(train, *FLAGS, *corpus, f"--workdir={finished}", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: --workdir='{finished}' holds a run of another conf")
    assert re.search(message.format(finished), err.strip()), err


def test_elastic_regions_do_not_go_on_with_a_run_of_one_job(tmp_path):
    one, elastic = tmp_path / "one", tmp_path / "elastic"
    for folder in (one, elastic / "region_0"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        check_exchange(folder, is_elastic=folder != one)
    with pytest.raises(ValueError, match=f"workdir='{one}' .* leave out exchange='el"):
        check_exchange(one / "region_0", is_elastic=True)
    with pytest.raises(
        ValueError, match=f"workdir='{elastic}' .* use exchange='elastic', o"
    ):
        check_exchange(elastic, is_elastic=False)
