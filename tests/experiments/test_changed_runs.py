"""The same folder with other flags or another version: moved, longer, or old."""

import json
import pathlib
import random
import re
import shutil
import tarfile

import numpy as np
import pytest

from cocodc_jax.report.records import read_records
from cocodc_jax.run.resume import check_exchange
from experiments import train

pytestmark = pytest.mark.usefixtures("programs_shared")

FLAGS = [
    "--preset=smoke",
    "--method=streaming_diloco",
    "--num_layers=2",
    "--steps=16",
    "--num_fragments=2",
    "--sync_interval=8",
    "--checkpoint_every=5",
    "--log_every=2",  # As far apart as events: another length is another program.
    "--eval_every=8",
]


@pytest.fixture(scope="module")
def finished(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    words = (*FLAGS, "--keep_checkpoints=9", *corpus, f"--workdir={workdir}")
    call_once(train, *words)
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
    records = read_records(workdir / "metrics.jsonl")
    return [r["loss_regions"] for r in records if r["kind"] == "train"]


def test_a_run_resumes_with_other_devices_and_data_folders_and_notes_it(
    killed, finished, call, corpus, tmp_path
):
    """On one device, with the corpus in another folder; the finished run is noted."""
    data = tmp_path / "data"
    shutil.copytree(corpus[0].partition(":")[2], data)
    moved = [f"--dataset=text:{data}", f"--data_dir={tmp_path / 'prepared'}"]
    others = {"devices": 1, "optimizer_memory": "host", "exchange": "outer"}
    others |= {"attention": "plain", "loader_threads": 2, "eval_every": 4}
    words = [*FLAGS, *moved, *(f"--{k}={v}" for k, v in others.items())]
    before = json.loads((killed / "config.json").read_text())["run"]
    _, err = call(train, *words, f"--workdir={killed}")
    assert "goes on from step 5 with devices=1 (was 0), optimizer_memory=host" in err
    (line,) = (killed / "changes.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert noted["step"] == 5
    assert noted["changes"]["eval_every"] == [8, 4]
    moved = {"dataset", "data_dir", "keep_checkpoints"}
    assert noted["changes"].keys() == others.keys() | moved
    after = json.loads((killed / "config.json").read_text())["run"]
    others = {k: v for k, v in others.items() if k in before}
    assert after == before | others | {"keep_checkpoints": 2}
    np.testing.assert_allclose(losses(killed), losses(finished), rtol=1e-4)
    _, err = call(train, *words, f"--workdir={killed}", "--log_every=4")
    assert f"note: the run in {killed} is finished; it was not run again with" in err
    assert "log_every=4 (was 2)" in err


def test_other_data_under_another_name_are_refused(finished, call, corpus, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"other {number}\n" * 300)
    before = (finished / "config.json").read_text()
    words = (*FLAGS, *corpus, f"--dataset=text:{tmp_path / 'text'}")
    _, err = call(train, *words, f"--workdir={finished}", code=2)
    assert "but this stream reads" in err
    assert (finished / "config.json").read_text() == before
    assert not (finished / "changes.jsonl").exists()


@pytest.mark.slow
def test_a_finished_run_goes_on_for_more_steps(call, refused, corpus, tmp_path):
    longer = tmp_path / "longer"
    whole = tmp_path / "whole"
    words = [*FLAGS, *corpus, "--final_lr_fraction=1"]
    words += ["--num_layers=1", "--num_fragments=1"]
    call(train, *words, "--steps=8", f"--workdir={longer}")
    out, err = call(train, *words, f"--workdir={longer}", "--json")
    assert "goes on from step 8 with steps=16 (was 8)\n" in err
    assert "learning rate" not in err
    assert json.loads(out[out.index("{") :])["steps"] == 16
    call(train, *words, f"--workdir={whole}")
    np.testing.assert_allclose(losses(longer), losses(whole), rtol=1e-4)
    refusal = refused(train, *words, f"--workdir={longer}", "--steps=15")
    assert "for steps give 16 or more, as so many are done" in refusal


@pytest.mark.slow
def test_a_mixture_goes_on_with_its_experts_on_another_number_of_devices(
    call, corpus, tmp_path
):
    many = tmp_path / "many"
    one = tmp_path / "one"
    words = [*FLAGS, *corpus, "--regions=2", "--num_experts=4", "--expert_width=16"]
    words += ["--fragment_strategy=experts", "--expert_weights=tokens"]
    words += ["--final_lr_fraction=1", "--num_layers=1"]
    # The last fragment is in flight.
    half = ["--steps=9", "--expert_axis=2", f"--workdir={many}"]
    call(train, *words, *half)
    _, err = call(train, *words, f"--workdir={many}")
    assert "goes on from step 9 with steps=16 (was 9), expert_axis=1 (was 2)\n" in err
    call(train, *words, f"--workdir={one}")
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-4)


def test_a_schedule_that_follows_the_length_changes_where_that_is_asked_for(
    finished, call, refused, corpus, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    words = [*FLAGS, *corpus, f"--workdir={workdir}", "--steps=20"]
    message = "for steps add --change_schedule, as the learning rate follows"
    assert message in refused(train, *words)
    out, err = call(train, *words, "--change_schedule")
    assert "goes on from step 16 with steps=20 (was 16)" in err
    assert "  the learning rate of its next step is 0.000747, not 0.0003\n" in err
    assert "finished: 20 of 20 steps" in out


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
def test_a_refusal_names_the_repair_for_each_field(
    finished, refused, corpus, words, message
):
    refusal = refused(train, *FLAGS, *corpus, f"--workdir={finished}", *words)
    assert refusal.startswith(f"--workdir='{finished}' holds a run of another conf")
    assert re.search(message.format(finished), refusal), refusal


def test_elastic_regions_do_not_go_on_with_a_run_of_one_job(tmp_path):
    one = tmp_path / "one"
    elastic = tmp_path / "elastic"
    for folder in (one, elastic / "region_0"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        check_exchange(folder, is_elastic=folder != one)

    with pytest.raises(ValueError, match=f"workdir='{one}' .* leave out exchange='el"):
        check_exchange(one / "region_0", is_elastic=True)
    with pytest.raises(ValueError, match=f"workdir='{elastic}' .* use exchange='el"):
        check_exchange(elastic, is_elastic=False)


# Files of a stopped run of version 0.24.0.
ARCHIVE = pathlib.Path(__file__).with_name("workdir_0_24_0.tar.xz")
OLD_FLAGS = [
    "--preset=smoke",
    "--regions=2",
    "--width=4",
    "--num_layers=2",
    "--num_heads=2",
    "--mlp_width=4",
    "--sequence_length=16",
    "--steps=12",
    "--warmup_steps=2",
    "--checkpoint_every=7",
    "--eval_every=0",
    "--eval_batches=4",
    "--log_every=1",
    "--method=cocodc",
    "--sync_interval=8",
    "--num_fragments=2",
    "--delay_steps=3",
    "--compress=ef+int8",
]
# Losses of 0.24.0 after step 12.
LOSS = 5.821626663208008
OUTER_LOSS = 5.859086036682129
BYTES = 4284


def test_a_run_of_an_earlier_version_ends_as_it_would_have(call, tmp_path):
    """Killed after the checkpoint of step 7, in a sync, with error feedback."""
    text = tmp_path / "text"
    workdir = tmp_path / "run"
    text.mkdir()
    rng = random.Random(0)

    for i in range(40):
        words = "".join(rng.choice("abcdefgh ") for _ in range(2000))
        (text / f"{i}.txt").write_text(words)

    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(workdir, filter="data")
    config = workdir / "config.json"  # The changelog names the change.
    config.write_text(config.read_text().replace('"fuse_syncs"', '"overlap"'))
    where = [f"--dataset=text:{text}", f"--data_dir={tmp_path / 'data'}"]
    _, err = call(train, *OLD_FLAGS, *where, f"--workdir={workdir}")
    assert "from step 7" in err
    *_, last = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert (last["step"], last["bytes_sent_per_region"]) == (12, BYTES)
    losses = last["eval_loss"], last["eval_loss_outer"]
    np.testing.assert_allclose(losses, (LOSS, OUTER_LOSS), rtol=1e-5)
