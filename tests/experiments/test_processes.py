"""Several real processes: equal to one, killed, damaged, and refused."""

import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import time

import pytest

from cocodc_jax.netlab import children
from cocodc_jax.run.exits import STOPPED
from cocodc_jax.train.checkpoint import steps_in
from experiments import launch_local, train
from tests.waiting import wait_until

TRAIN = train.__name__
LAUNCH = launch_local.__name__
SMOKE = [
    "--preset=smoke",
    "--steps=24",
    "--checkpoint_every=8",
    "--eval_every=0",
    "--num_fragments=2",
    "--sync_interval=8",
    "--delay_steps=2",
    "--num_layers=2",
    "--log_every=3",  # Every checkpoint is inside of a record's window.
    "--keep_checkpoints=3",
]
# Scans of two and of four steps.
STREAMING = [*SMOKE, "--method=streaming_diloco", "--steps=16", "--log_every=6"]
# Two regions of two devices, each device perhaps in another process.
PAIRS = ["--regions=2", "--data_axis=2"]
# The devices of a region share its experts.
EXPERTS = [
    "--regions=2",
    "--expert_axis=2",
    "--num_experts=4",
    "--expert_width=16",
    "--fragment_strategy=experts",
    "--expert_weights=tokens",
    "--steps=8",
    "--sync_interval=4",
    "--checkpoint_every=0",
]
BARE = ["--preset=smoke", "--steps=24", "--checkpoint_every=8", "--eval_every=0"]


def summary(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


def assert_same_run(many: pathlib.Path, one: pathlib.Path) -> None:
    """Sums have another order, and steps of training amplify the difference."""
    mine = summary(many)
    theirs = summary(one)
    for name in ("eval_loss", "eval_loss_outer", "region_drift"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
    for name in ("bytes_sent_per_region", "tokens", "steps", "outer_bytes"):
        assert mine[name] == theirs[name]


def assert_equal_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Bit for bit."""
    for name in ("metrics.jsonl", "process_1/metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    for name in ("eval_loss", "eval_loss_outer", "region_drift"):
        assert summary(one)[name] == summary(other)[name]


def children_of(pid: int) -> list[int]:
    """Return ids of processes in the order in which they were started."""
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return sorted(map(int, path.read_text().split()))


def results_of(started: list) -> list[tuple[int, str]]:
    """Exit codes and standard errors, after all have ended."""
    errors = [process.communicate(timeout=300)[1] for process in started]
    return [(p.returncode, err) for p, err in zip(started, errors, strict=True)]


def wait_for(path: pathlib.Path, process) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None)


@pytest.fixture
def port():
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def streaming_in_one(call_once, corpus, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("one")
    call_once(train, *STREAMING, *corpus, f"--workdir={workdir}")
    return workdir


@pytest.fixture(scope="module")
def killed(command, run, corpus, tmp_path_factory):
    """Two processes, one of them killed after a checkpoint, and the run resumed."""
    workdir = tmp_path_factory.mktemp("killed")
    flags = ["--processes=2", "--", *STREAMING, *corpus, f"--workdir={workdir}"]
    launcher = command(LAUNCH, *flags)
    wait_for(workdir / "checkpoints" / "8", launcher)
    _, victim = children_of(launcher.pid)

    os.kill(victim, signal.SIGKILL)
    begin_s = time.monotonic()
    _, err = launcher.communicate(timeout=60)

    assert launcher.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - begin_s < 15  # 1.4 s on a machine with time to spare.
    assert re.search(r"^process 1 was killed by signal 9; .*output\.log$", err, re.M)
    assert not (workdir / "summary.json").exists()

    out, _ = run(LAUNCH, *flags)

    return workdir, out


def test_two_processes_of_which_one_is_killed_and_resumed_train_as_one(
    killed, streaming_in_one
):
    workdir, out = killed
    assert_same_run(workdir, streaming_in_one)
    assert f"loss: {summary(workdir)['eval_loss']:.4f} on validation text" in out
    # Process 0 reports; process 1 has records of its own and prints nothing.
    log = (workdir / "process_1" / "output.log").read_text()
    assert "step" not in log
    records = (workdir / "process_1" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(x)["kind"] for x in records} == {"train", "sync", "eval"}


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_unbroken_one(run, corpus, killed, tmp_path):
    flags = ["--processes=2", "--", *STREAMING, *corpus, f"--workdir={tmp_path}"]
    run(LAUNCH, *flags)
    assert_equal_run(killed[0], tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, halve, None])
def test_a_run_with_damaged_shards_resumes_from_an_earlier_checkpoint(
    run, corpus, killed, tmp_path, damage
):
    """The numbers are the same."""
    workdir = pathlib.Path(shutil.copytree(killed[0], tmp_path / "run"))
    # The second process's shards of the arrays.
    written = (workdir / "checkpoints" / "16").rglob("*process_1/**/*")
    paths = sorted(x for x in written if x.is_file() and x.stat().st_size)

    if damage:
        damage(max(paths, key=lambda path: path.stat().st_size))
    else:
        for path in paths[::2]:
            path.unlink()

    for path in [workdir, workdir / "process_1"]:
        (path / "summary.json").unlink(missing_ok=True)
    flags = ["--processes=2", "--", *STREAMING, *corpus, f"--workdir={workdir}"]
    _, err = run(LAUNCH, *flags)
    assert "step 16" in err
    assert "damaged" in err
    assert_equal_run(workdir, killed[0])


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(command, run, corpus, tmp_path):
    one = tmp_path / "one"
    many = tmp_path / "many"
    flags = [*STREAMING, *PAIRS, *corpus]
    run(TRAIN, *flags, f"--workdir={one}")

    flags.append(f"--workdir={many}")
    launcher = command(LAUNCH, "--processes=4", "--", *flags)
    wait_for(many / "checkpoints" / "8", launcher)
    os.kill(children_of(launcher.pid)[3], signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL

    run(LAUNCH, "--processes=2", "--", *flags)
    assert_same_run(many, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, [*STREAMING, "--exchange=program"]),
        (4, STREAMING),
        (2, [*STREAMING, "--compress=int8"]),
        (2, [*STREAMING, "--compress=int8", "--exchange=program"]),
        # Each fragment is sent again as soon as it arrives: two are in flight.
        pytest.param(
            2, [*STREAMING, "--delay_steps=8", "--outer_channels=2"], id="2-lanes"
        ),
        (4, [*BARE, "--method=noloco"]),
        (2, [*BARE, "--method=demo"]),
        (2, [*BARE, "--method=data_parallel"]),
        (4, [*STREAMING, *PAIRS, "--exchange=program"]),
        (4, [*STREAMING, *PAIRS, "--compress=int8"]),
        (4, [*STREAMING, "--regions=2", "--model_axis=2"]),
        (4, [*STREAMING, "--regions=2", "--data_axis=2", "--model_axis=2"]),
        (4, [*STREAMING, "--regions=2", "--stages=2", "--scan_layers"]),
        pytest.param(4, [*STREAMING, *EXPERTS], id="4-experts"),
        (4, [*BARE, *PAIRS, "--method=noloco"]),
        (4, [*BARE, *PAIRS, "--method=co2"]),
    ],
    ids=lambda x: (
        "-".join(re.findall(r"--(?!preset|steps|\w+_)(\w+=\w+)", str(x))) or str(x)
    ),
)
def test_several_processes_train_as_one(run, corpus, tmp_path, count, flags):
    one = tmp_path / "one"
    many = tmp_path / "many"
    flags = [*flags, *corpus]
    of_many = ("--exchange", "--outer_channels")
    alone = [f for f in flags if not f.startswith(of_many)]
    run(TRAIN, *alone, f"--workdir={one}")
    run(LAUNCH, f"--processes={count}", "--", *flags, f"--workdir={many}")
    assert_same_run(many, one)


@pytest.mark.slow
def test_two_regions_of_two_processes_train_as_two_of_one_process(
    run, corpus, tmp_path
):
    one = tmp_path / "one"
    many = tmp_path / "many"
    short = ["--steps=8", "--sync_interval=4", "--checkpoint_every=0"]
    flags = [*STREAMING, *PAIRS, *short, *corpus]
    run(TRAIN, *flags, f"--workdir={one}")
    run(LAUNCH, "--processes=4", "--", *flags, f"--workdir={many}")

    assert_same_run(many, one)
    # Processes of a region write the same records, those of another region do not.
    names = ("", "process_1", "process_2", "process_3")
    files = [(many / name / "metrics.jsonl").read_bytes() for name in names]
    assert files[0] == files[1] != files[2] == files[3]


@pytest.mark.slow
@pytest.mark.parametrize("compress", [[], ["--compress=int8"]], ids=["plain", "int8"])
def test_processes_agree_on_delays_and_slots_that_are_measured(
    run, corpus, tmp_path, compress
):
    auto = ["--method=cocodc", "--delay_steps=auto", "--syncs_per_interval=auto"]
    flags = [*SMOKE, *auto, *compress, *corpus, f"--workdir={tmp_path}"]
    run(LAUNCH, "--processes=2", "--", *flags)
    syncs = []
    for folder in ("", "process_1"):
        table = json.loads((tmp_path / folder / "timeline.json").read_text())
        syncs.append(
            [(s["fragment"], s["start_step"], s["apply_step"]) for s in table["syncs"]]
        )

    one, other = syncs
    assert one == other

    assert len({apply - start for _, start, apply in one if apply}) > 1
    starts = [start for _, start, _ in one]
    assert len({b - a for a, b in itertools.pairwise(starts)}) > 1


@pytest.mark.slow
def test_sigterm_to_one_stops_all_at_one_step(command, run, corpus, tmp_path):
    flags = [*STREAMING, *corpus, f"--workdir={tmp_path}", "--steps=100000"]
    launcher = command(LAUNCH, "--processes=2", "--", *flags, "--checkpoint_every=0")
    wait_for(tmp_path / "process_1" / "metrics.jsonl", launcher)
    _, one = children_of(launcher.pid)
    os.kill(one, signal.SIGTERM)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == STOPPED, err
    (saved,) = steps_in(tmp_path / "checkpoints")
    assert f"stopped at step {saved}; the same command resumes there" in out


@pytest.mark.slow
def test_with_num_processes_0_slurm_gives_the_processes(
    command, corpus, tmp_path, streaming_in_one
):
    # What `srun` sets; JAX makes the coordinator's port from the job's number.
    job = {"JOB_ID": os.getpid(), "NTASKS": 2, "STEP_NODELIST": "localhost"}
    flags = [*STREAMING, *corpus, f"--workdir={tmp_path}", "--num_processes=0"]
    started = []

    for number in range(2):
        environment = job | {"PROCID": number, "LOCALID": number}
        env = {f"SLURM_{name}": str(value) for name, value in environment.items()}
        started.append(command(TRAIN, *flags, env=env))

    for code, err in results_of(started):
        assert code == 0, err
    assert_same_run(tmp_path, streaming_in_one)


def test_each_difference_between_two_processes_is_named(
    command, corpus, tmp_path, port
):
    def start(number, *flags):
        who = ["--num_processes=2", f"--process_id={number}"]
        address = f"--coordinator_address=127.0.0.1:{port}"
        where = f"--workdir={tmp_path / str(number)}"
        return command(TRAIN, *STREAMING, *corpus, *who, address, where, *flags)

    started = [start(0), start(1, "--outer_lr=0.25", "--seed=7")]
    for code, err in results_of(started):
        assert code == 2, err
        (line,) = [line for line in err.splitlines() if line.startswith("error")]
        assert "outer_lr is 0.4 in process 0, 0.25 in 1" in line
        assert "seed is 0 in process 0, 7 in 1" in line
        assert "steps" not in line
        assert "Traceback" not in err

    assert not list(tmp_path.iterdir())


# Processes other than 0 connect to the address of process 0.
@pytest.mark.parametrize("process", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_gives_up_if_the_others_do_not_connect(run, port, process):
    begin_s = time.monotonic()
    _, err = run(
        TRAIN,
        "--preset=smoke",
        f"--coordinator_address=127.0.0.1:{port}",
        "--num_processes=2",
        f"--process_id={process}",
        "--start_timeout_s=2",
        code=1,
    )

    message = (
        f"error: --coordinator_address='127.0.0.1:{port}': process {process} of 2 "
    )
    assert err.startswith(f"{message}did not meet the others within start_timeout_s=2")
    assert err.count("\n") == 1
    assert time.monotonic() - begin_s < 60  # 6 s where there is time to spare.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--processes=3 --",
            "--num_processes=3 must divide regions=4, so that each process has full "
            "regions, or be a multiple of it, so that each region has equally many "
            "processes",
        ),
        ("--processes=8 --", "--num_processes=8 makes 2 processes of each of"),
        ("--regions=2 -- --regions=4", "--regions=4 after -- is decided before it"),
        ("--regions=2 -- --step=3", "Unknown command line flag 'step'"),
        (
            "--elastic -- --method=mla",
            "--exchange='elastic' is not possible for method='mla'",
        ),
    ],
)
def test_the_launcher_refuses_wrong_flags_in_one_line(
    refused, tmp_path, words, message
):
    workdir = f"--workdir={tmp_path / 'run'}"
    error = refused(launch_local, *words.split(), "--preset=smoke", workdir)
    assert error.startswith(message)
    assert not (tmp_path / "run").exists()


def test_elastic_regions_get_the_bucket_and_write_logs_to_the_cache(
    call, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        children, "wait", lambda regions, *_: started.extend(regions) or 0
    )
    monkeypatch.setattr(children.Region, "start", lambda region: None)
    started = []
    words = "--elastic --regions=2 -- --preset=smoke --workdir=gs://bucket/run"
    call(launch_local, *words.split())
    here = tmp_path / "cocodc_jax" / "buckets" / "gs" / "bucket" / "run"

    for number, region in enumerate(started):
        values = dict(word.split("=", 1) for word in region._command if "=" in word)
        assert values["--workdir"] == "gs://bucket/run"
        assert values["--key_file"] == str(here / "key")
        assert region._log == here / f"region_{number}" / "output.log"

    assert len(started) == 2


# Stops its launcher as soon as it ignores the signal itself.
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.fixture
def elastic(tmp_path, monkeypatch):
    """Starts jobs of some program in place of elastic regions; returns the code."""

    def launch(program, num, **how):
        command = [sys.executable, "-S", "-c", program]
        monkeypatch.setattr(launch_local.commands, "python_m", lambda _: command)
        begin_s = time.monotonic()
        code = launch_local.launch_elastic([], tmp_path, num, **how)
        assert time.monotonic() - begin_s < 15
        return code

    return launch


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_job_that_starts_during_a_stop_is_stopped_too(elastic, tmp_path, monkeypatch):
    start = children.Region.start

    def started(region):
        if not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)  # Before the job handles signals.
        start(region)

    monkeypatch.setattr(children.Region, "start", started)
    code = elastic("import time; time.sleep(60)", 2, restarts=False, grace_s=20)
    assert code == 128 + signal.SIGTERM


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_job_that_does_not_end_when_asked_is_killed(elastic):
    code = elastic(DEAF, 1, restarts=True, grace_s=0.5)
    assert code == 128 + signal.SIGKILL
