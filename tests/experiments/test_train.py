"""`experiments.train` end to end: its files, a kill, a stop, and wrong flags."""

import json
import pathlib
import re
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from cocodc_jax.elastic.link import LeftBehindError, SupersededError
from cocodc_jax.report.records import MetricsWriter, read_records
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.resume import only_writer
from cocodc_jax.run.session import CHECKPOINTS
from cocodc_jax.train.checkpoint import Checkpoints, steps_in
from cocodc_jax.train.spikes import Spike, Spikes
from experiments import train
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("programs_shared")

MODULE = train.__name__
# Two blocks, two fragments: half of what four and four take to compile.
SMALL = [
    "--preset=smoke",
    "--num_layers=2",
    "--num_fragments=2",
    "--syncs_per_interval=8",
]
FLAGS = [*SMALL, "--method=cocodc", "--checkpoint_every=8", "--seed=3"]


@pytest.fixture(scope="module")
def unbroken(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    out, _ = call_once(train, *FLAGS, *corpus, f"--workdir={workdir}")
    return workdir, out


def records(workdir: pathlib.Path, kind: str) -> list[dict]:
    records = read_records(workdir / "metrics.jsonl")
    return [record for record in records if record["kind"] == kind]


def final_state(session, workdir: pathlib.Path):
    """All arrays of the last checkpoint, as NumPy."""
    with Checkpoints(workdir / CHECKPOINTS) as saved:
        state, _ = saved.restore(session.program)
    assert state.step == session.config.run.steps
    return jax.tree.map(np.asarray, (state.region, state.sync and state.sync.arrays))


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    mine, theirs = ((w / "metrics.jsonl").read_bytes() for w in (one, other))
    assert mine == theirs
    config, same = (json.loads((w / "config.json").read_text()) for w in (one, other))
    assert config == same
    session = prepare(TrainConfig.from_json(config), one)
    states = (final_state(session, workdir) for workdir in (one, other))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_run_writes_its_summary_and_prints_its_progress(unbroken):
    workdir, out = unbroken
    summary = json.loads((workdir / "summary.json").read_text())
    first, *_, last = out.splitlines()

    about = " CPU devices: 29.3 k parameters, 48 steps of 512 tokens, in "
    assert first.startswith("training ")
    assert about in first
    assert out.splitlines()[1].startswith("compiling")
    assert last.startswith(f"next: python -m experiments.timeline --workdir={workdir}")
    assert out.splitlines()[-5].startswith("finished: 48 of 48 steps in ")
    assert f"loss: {summary['eval_loss']:.4f} on validation text" in out

    assert list(summary) == [
        "method",
        "preset",
        "seed",
        "regions",
        "parameters",
        "steps",
        "tokens",
        "eval_loss",
        "eval_perplexity",
        "eval_loss_outer",
        "region_drift",
        "outer_bytes",
        "bytes_sent_per_region",
        "seconds",
        "stall_seconds",
        "exposed_share",
        "goodput",
        "tokens_per_second",
        "mfu",
        "correction_ratio",
    ]

    assert summary["tokens"] == 48 * 4 * 4 * 32
    assert 0 <= summary["exposed_share"] < 1
    assert 0 < summary["goodput"] < 1
    assert summary["eval_perplexity"] == pytest.approx(np.exp(summary["eval_loss"]))
    assert list((workdir / "tb").glob("events.out.tfevents.*"))
    assert "step 48/48" in out  # Plain lines, since this is no terminal.


def test_records_have_the_steps_losses_and_syncs_of_the_run(unbroken):
    steps = [r["step"] for r in read_records(unbroken[0] / "metrics.jsonl")]
    assert steps == sorted(steps)

    rows = records(unbroken[0], "train")
    assert [r["step"] for r in rows] == list(range(4, 49, 4))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1

    evals = records(unbroken[0], "eval")
    assert [r["step"] for r in evals] == [16, 32, 48]

    syncs = records(unbroken[0], "sync")
    # Every 2 steps one of 2 fragments starts and lands 2 steps later.
    assert [r["start_step"] for r in syncs] == list(range(2, 47, 2))
    assert all(r["apply_step"] - r["start_step"] == 2 for r in syncs)
    assert {r["fragment"] for r in syncs} == {0, 1}

    # The sync that left at step 48 is counted, but not yet applied.
    sent = evals[-1]["bytes_sent_per_region"] - sum(r["bytes"] for r in syncs)
    assert sent in {r["bytes"] for r in syncs}


def test_a_killed_and_resumed_run_equals_an_unbroken_one(
    command, call, corpus, unbroken, tmp_path
):
    step = np.random.default_rng(11).integers(9, 40)
    flags = [*FLAGS, *corpus, f"--workdir={tmp_path}"]
    process = command(MODULE, *flags)
    path = tmp_path / "metrics.jsonl"

    def has_come():
        lines = path.read_text().splitlines() if path.exists() else []
        is_far = lines and json.loads(lines[-1])["step"] >= step
        return is_far and steps_in(tmp_path / CHECKPOINTS)

    wait_until(lambda: has_come() or process.poll() is not None)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "summary.json").exists()
    assert steps_in(tmp_path / CHECKPOINTS)[-1] > 0
    call(train, *flags)
    assert_same_run(tmp_path, unbroken[0])


@pytest.fixture
def heard():
    """Ctrl-C is, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at_first_record(path, monkeypatch, *numbers):
    """Have the signals come while the first record is written."""
    numbers = list(numbers)
    write = MetricsWriter.write

    def write_and_stop(self, *args, **kwargs):
        while numbers and not path.stat().st_size:
            signal.raise_signal(numbers.pop())
        return write(self, *args, **kwargs)

    monkeypatch.setattr(MetricsWriter, "write", write_and_stop)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_signal_ends_with_a_checkpoint_to_go_on_from(
    call, corpus, unbroken, tmp_path, monkeypatch, heard, number
):
    flags = [*FLAGS, "--checkpoint_every=0", *corpus, f"--workdir={tmp_path}"]
    path = tmp_path / "metrics.jsonl"
    handler = signal.getsignal(number)
    interrupt_at_first_record(path, monkeypatch, number)
    out, err = call(train, *flags)

    assert ("Ctrl-C again" in err) == (number == signal.SIGINT)
    assert signal.getsignal(number) == handler
    assert "stopped at step" in out
    assert "stopped at step 48" not in out

    stopped = json.loads((tmp_path / "config.json").read_text())
    assert stopped["run"]["checkpoint_every"] == 0
    assert [x.name for x in (tmp_path / CHECKPOINTS).iterdir()] != []

    call(train, *flags)
    assert path.read_bytes() == (unbroken[0] / "metrics.jsonl").read_bytes()


def test_a_second_interrupt_ends_at_once(call, corpus, tmp_path, monkeypatch, heard):
    path = tmp_path / "metrics.jsonl"
    interrupt_at_first_record(path, monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        call(train, *FLAGS, *corpus, f"--workdir={tmp_path}")
    assert not (tmp_path / "summary.json").exists()


def test_a_damaged_summary_of_a_finished_run_is_written_again(
    unbroken, call, refused, corpus, tmp_path
):
    workdir = pathlib.Path(shutil.copytree(unbroken[0], tmp_path / "run"))
    before = json.loads((workdir / "summary.json").read_text())
    (workdir / "summary.json").write_text("")
    timeline = workdir / "timeline.json"
    timeline.write_text(timeline.read_text()[:100])
    flags = [*FLAGS, *corpus, f"--workdir={workdir}"]
    _, err = call(train, *flags)

    for name in ("summary.json", "timeline.json"):
        assert f"warning: {workdir / name} is damaged" in err
    after = json.loads((workdir / "summary.json").read_text())
    assert list(after) == list(before)

    for name in (
        "seconds",
        "stall_seconds",
        "exposed_share",
        "tokens_per_second",
        "goodput",
    ):
        del after[name], before[name]

    assert after == before
    mine, theirs = (w / "metrics.jsonl" for w in (workdir, unbroken[0]))
    assert mine.read_bytes() == theirs.read_bytes()

    with only_writer(workdir):  # The process that has the folder is left alone.
        error = refused(train, *flags, code=1)
    assert error.startswith(f"workdir='{workdir}' is in use by process ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SupersededError("region 1 was started again elsewhere"), 2),
        (LeftBehindError("region 1: the others went on"), 1),
    ],
)
def test_a_region_that_was_superseded_ends_with_the_code_for_no_restart(
    refused, monkeypatch, tmp_path, error, code
):
    """Launchers do not restart a process that ends with code 2."""
    session = mock.Mock()
    session.train.side_effect = error
    monkeypatch.setattr(train, "prepare", lambda *_, **__: session)
    line = refused(train, "--preset=smoke", f"--workdir={tmp_path}", code=code)
    assert line == str(error)


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_rolls_back_from_a_spike(call, corpus, tmp_path, monkeypatch, is_stopped):
    """A spike at step 12: the run goes back to step 8 and skips the data."""
    progress = []

    def observe(self, step, losses, first_region):
        if step == 12 and not progress:
            progress.append(Spike(step, 1, 9.0, 5.0, 40.0))
            if is_stopped:
                signal.raise_signal(signal.SIGTERM)
            return progress
        return []

    monkeypatch.setattr(Spikes, "observe", observe)
    flags = ["--preset=smoke", "--method=diloco", "--steps=24", "--checkpoint_every=8"]
    flags += ["--regions=2", "--eval_batches=2"]
    flags += ["--spike_zscore=10", "--max_rollbacks=2", "--exclude_above=50"]
    out, err = call(train, *flags, *corpus, f"--workdir={tmp_path}")
    assert "loss 9.0 at step 12 in region 1 is a spike (usually 5, z = 40)" in err
    assert "last good checkpoint: step 8; the run returns to it" in err

    if is_stopped:
        assert "stopped at step 8;" in out
        return

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(x["step"], x["to_step"]) for x in summary["rollbacks"]] == [(12, 8)]
    assert summary["steps"] == 24
    assert summary["left_out"] == {}
    steps = [r["step"] for r in records(tmp_path, "train")]
    assert steps == sorted(set(steps))
    assert all(r["left_out"] == [0, 0] for r in records(tmp_path, "sync"))
    assert not records(tmp_path, "spike")  # Written after the checkpoint.


def test_a_workdir_of_another_configuration_is_refused(unbroken, refused, corpus):
    workdir, _ = unbroken
    before = (workdir / "config.json").read_text()
    flags = [*FLAGS, *corpus, f"--workdir={workdir}", "--outer_lr=0.3"]
    error = refused(train, *flags)
    assert error.startswith(f"--workdir='{workdir}' holds a run of another")
    assert "outer_lr: 0.4, not 0.3" in error
    assert (workdir / "config.json").read_text() == before


def test_a_corpus_that_changed_under_a_run_is_refused(call, corpus, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(pathlib.Path(corpus[0].split(":")[1]) / "sync", text)
    flags = [
        "--preset=smoke",
        "--method=data_parallel",
        "--steps=6",
        "--num_layers=1",
        f"--dataset=text:{text}",
        f"--data_dir={tmp_path}",
        f"--workdir={tmp_path / 'run'}",
    ]
    call(train, *flags)
    (tmp_path / "run" / "summary.json").unlink()  # As if it had not finished.
    (text / "new.txt").write_text("one more document\n" * 100)
    _, err = call(train, *flags, code=2)  # Started again, it would be refused again.
    assert err.startswith(f"error: the run in {tmp_path / 'run'} cannot go on")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--slow_beta=0.9"], "--slow_beta=0.9 has no meaning for the inner optimizer"),
        (["--method=demo", "--grad_clip=1"], "--grad_clip=1.0 has no meaning for the"),
        (["--inner_optimizer=muon", "--fast_weight=0.5"], "--fast_weight=0.5 has no"),
    ],
)
def test_a_flag_without_effect_on_the_inner_optimizer_is_refused(
    refused, tmp_path, words, line
):
    error = refused(train, "--preset=smoke", *words, f"--workdir={tmp_path}")
    assert error.startswith(line)


@pytest.mark.parametrize(
    ("flags", "what", "good"),
    [
        (
            ["--inner_lr=1e30", "--grad_clip=0", "--warmup_steps=0"],
            "(loss is|a parameter is not finite)",
            "[12]",
        ),
        pytest.param(
            ["--outer_lr=1e9", "--checkpoint_every=4"],
            "(loss|pseudo_|correction_ratio|a parameter)",
            r"\d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--compensation_strength=1e38"],
            "(loss|correction_ratio|a param)",
            "[34]",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_diverging_run_names_step_region_and_checkpoint(
    call, corpus, tmp_path, flags, what, good
):
    words = [*SMALL, "--checkpoint_every=1", *corpus, f"--workdir={tmp_path}", *flags]
    _, err = call(train, *words, code=1)
    line = err.splitlines()[-1]
    assert re.match(rf"error: {what}.* at step \d+ in (region \d|the mean)", line)
    assert re.search(rf"last good checkpoint: step {good}", line)


def test_a_run_of_another_method_adopts_a_checkpoint(unbroken, call, corpus, tmp_path):
    """CoCoDC in four regions, then DiLoCo in two; losses of state are printed."""
    flags = [
        "--preset=smoke",
        "--num_layers=2",
        "--method=diloco",
        "--regions=2",
        "--attention=plain",
        "--remat=full",
        "--steps=52",
        "--sync_interval=2",
        f"--adopt_from={unbroken[0]}@40",
        *corpus,
    ]
    out, err = call(train, *flags, f"--workdir={tmp_path}")

    assert f"goes on from step 40 of {unbroken[0]}" in err
    assert "  kept inner optimizer: the mean of 4 regions" in err
    assert "  kept outer optimizer: cut anew" in err

    for name in ("regions: 4 are 2", "schedule: it begins after step 40", "keys", "da"):
        assert f"  lost {name}" in err

    rows = records(tmp_path, "train")
    assert [r["step"] for r in rows] == [44, 48, 52]

    syncs = [r["apply_step"] for r in records(tmp_path, "sync")]
    assert syncs == [42, 44, 46, 48, 50, 52]
    # It has not restarted: every loss is below the first one of the run.
    # (By how much is a matter of the processor's rounding: few, small batches.)
    assert max(r["loss"] for r in rows) < records(unbroken[0], "train")[0]["loss"]
    assert "finished: 52 of 52 steps" in out


@pytest.mark.parametrize(
    ("source", "flag", "message"),
    [
        ("nowhere", "", "adopt_from='nowhere' holds no run with checkpoints"),
        ("{}", "--width=64", "is of another model or tokenizer .*width"),
        ("{}", "--steps=48", "adopt_from=.* is at step 48, where steps=48, .* over"),
        ("{}@48", "--steps=40", "is at step 48, where steps=40, .* are over"),
        ("{}@7", "", "adopt_from=.*@7' has no checkpoint of step 7; there are 40, 48"),
    ],
)
def test_a_source_that_cannot_be_adopted_is_named(
    unbroken, refused, corpus, tmp_path, source, flag, message
):
    adopt = f"--adopt_from={source.format(unbroken[0])}"
    flags = [*FLAGS, "--steps=52", *corpus, adopt, f"--workdir={tmp_path}"]
    error = refused(train, *flags, *([flag] if flag else []))
    assert re.search(message, error), error
