"""`experiments.compile`: files, output and refused flags; a run for a small TPU."""

import importlib.util
import io
import json
import pathlib
import signal

import pytest
from rich.console import Console

from cocodc_jax.aot import report
from cocodc_jax.aot.job import CompileError, Job, UnknownProgramError
from cocodc_jax.aot.programs import place
from cocodc_jax.aot.targets import Target
from cocodc_jax.run.config.presets import PRESETS
from experiments import compile as program
from tests.waiting import is_over, wait_until

MODULE = program.__name__
# JAX runs in this process; in the program it does not.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
# Small: one block, one fragment, two regions of two chips.
SMALL = dict(regions=2, eval_batches=2, num_layers=1, num_fragments=1, remat="full")


@pytest.mark.slow
@needs_libtpu
def test_a_run_is_compiled_for_a_tpu(run, tmp_path):
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    out, _ = run(
        MODULE,
        "--preset=smoke",
        "--method=streaming_diloco",
        *flags,
        "--target=v5e:1x2",
        "--slices=2",
        f"--workdir={tmp_path}",
        "--keep_hlo",
    )

    result = json.loads((tmp_path / "compile.json").read_text())
    assert result["fits"]
    assert result["overlapped"]
    assert result["hbm_bytes"] == int(15.75 * 2**30)
    assert 0 < result["temp_bytes"] < 10**8
    assert 0 < result["mfu"] < 1

    # Few other products are computed, and none of these is missing.
    assert 0.97 <= result["excess_ratio"] < 1.05
    again = result["recomputed_flops"] / result["about"]["model_flops"]
    assert again == pytest.approx(result["flops_ratio"] / result["excess_ratio"] - 1)
    assert 0.1 < again < 1 / 3

    programs = {program["name"]: program for program in result["programs"]}
    window = "start fragment 0, inner steps, merge"
    assert set(programs) == {
        "first state",
        "inner steps",
        "mean of regions",
        window,
        "evaluation",
    }

    rows = programs[window]["collectives"]
    (mean,) = [row for row in rows if row["where"] == "between"]
    assert (mean["kind"], mean["spans"]) == ("all-reduce", True)
    assert programs[window]["calls_steps"] == 2

    sent_bytes = programs[window]["sent_bytes"]
    assert mean["num_bytes"] >= sent_bytes / 2
    # Outer parameters and momentum, half of both with each chip's host, in tiles.
    assert programs[window]["host_bytes"] >= sent_bytes

    inside = programs["inner steps"]["collectives"]
    assert all(row["axes"] == ["data"] for row in inside)
    assert "inner steps" in out
    assert (tmp_path / "hlo" / "inner_steps.txt").stat().st_size > 0


@needs_libtpu
def test_progress_is_printed_and_the_compiler_ends_with_the_command(command, tmp_path):
    process = command(
        MODULE,
        "--preset=smoke",
        "--target=v5e:1x2",
        "--slices=2",
        f"--workdir={tmp_path}",
    )
    with process:
        progress = " s  compiling first state for v5e:1x2 (1 of "
        assert progress in process.stderr.readline()
        tasks = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (child,) = tasks.read_text().split()
        process.send_signal(signal.SIGKILL)

    wait_until(lambda: is_over(child), 10)


@pytest.mark.slow
@needs_libtpu
def test_moments_in_host_memory_take_no_memory_of_a_tpu():
    target = Target.parse("v5e:1x2", 2)
    small = SMALL | dict(remat="none", optimizer_memory="host")
    config = place(PRESETS["smoke"].replace(**small), target, keep_data_axis=False)

    about, (program,) = Job(config, target, "^inner steps$").run()

    # Two moments of every parameter, all in tiles, and the parameters themselves.
    assert program["host_bytes"] > 8 * 16_000
    assert program["host_bytes"] / 2 < program["argument_bytes"] < program["host_bytes"]

    lines = report.lines(config, about, [program], report.summarise(about, [program]))
    assert any("of the optimizer's state are in host memory" in line for line in lines)


@pytest.mark.slow
@needs_libtpu
def test_offloaded_activations_take_no_memory_of_a_tpu():
    target = Target.parse("v5e:1x2", 2)
    by_region = {}
    model = dict(num_layers=4, width=128, scan_layers=True, sequence_length=256)

    for remat in ("attention", "offload"):
        small = SMALL | model | dict(remat=remat, batch_per_region=64)
        config = place(PRESETS["smoke"].replace(**small), target, keep_data_axis=False)
        about, (by_region[remat],) = Job(config, target, "^inner steps$").run()

    # The input of each block, for half of the sequences.
    kept_bytes = 4 * 32 * 256 * 128 * 4
    near = by_region["attention"]
    far = by_region["offload"]
    assert near["host_temp_bytes"] == 0
    assert far["host_temp_bytes"] >= kept_bytes
    assert far["temp_bytes"] <= near["temp_bytes"] - 0.7 * kept_bytes
    # The flash kernel's forward pass is in backward again.
    assert near["flops"] < far["flops"] < 1.1 * near["flops"]

    lines = report.lines(config, about, [far], report.summarise(about, [far]))
    assert any("what remat=offload keeps" in line for line in lines)


@pytest.mark.slow
@needs_libtpu
def test_one_program_alone_is_compiled_by_name():
    target = Target.parse("v5e:1x2", 2)
    config = place(PRESETS["smoke"].replace(**SMALL), target, keep_data_axis=False)
    message = "'fragment 3' is found in none of first sta"
    with pytest.raises(UnknownProgramError, match=message):
        Job(config, target, "fragment 3").run()
    _, programs = Job(config, target, "^first|mean of").run()
    names = [program["name"] for program in programs]
    assert names == ["first state", "mean of regions"]


@pytest.mark.slow
@needs_libtpu
def test_fsdp_inside_a_region_gathers_weights_and_no_activations(run, tmp_path):
    batch = 48
    model = dict(
        num_layers=2,
        width=512,
        mlp_width=1024,
        num_heads=4,
        num_kv_heads=4,
        scan_layers=True,
        compute_dtype="bfloat16",
        remat="attention",
    )
    flags = [f"--{name}={value}" for name, value in model.items()]
    run(
        MODULE,
        "--preset=smoke",
        "--method=streaming_diloco",
        *flags,
        "--num_fragments=1",
        "--regions=2",
        "--eval_batches=2",
        "--overlap=no",
        f"--batch_per_region={batch}",
        "--sequence_length=256",
        "--target=v5e:2x2",
        "--slices=2",
        "--propose=false",
        f"--workdir={tmp_path}",
    )
    result = json.loads((tmp_path / "compile.json").read_text())

    assert result["fits"]
    assert result["inside_ratio"] < 1.2
    # Of the products a few are outside of a model's own count.
    assert 0.97 < result["excess_ratio"] < 1.05 < result["flops_ratio"]

    programs = {program["name"]: program for program in result["programs"]}
    for row in programs["inner steps"]["collectives"]:
        dims = row["largest"].split("[")[1].rstrip("]").split(",")
        assert str(batch) not in dims, row

    # A fragment crosses in shards: each device sends its part of the embedding too.
    sent = programs["send fragment 0"]
    moved = sum(row["num_bytes"] for row in sent["collectives"])
    assert moved <= 1.01 * sent["sent_bytes"] / 4


@pytest.mark.slow
@needs_libtpu
def test_a_window_of_experts_that_devices_share_is_compiled_for_a_tpu():
    target = Target.parse("v5e:2x2", 2)
    model = SMALL | dict(
        num_experts=4,
        expert_width=128,
        width=128,
        sequence_length=64,
        remat="none",
        num_fragments=3,
        fragment_strategy="experts",
        sync_interval=6,
        delay_steps=2,
        expert_axis=2,
        method="streaming_diloco",
    )
    config = place(PRESETS["smoke"].replace(**model), target, keep_data_axis=False)

    about, (program,) = Job(config, target, "^start fragment 1, inner").run()

    # An even router needs the rows of one round of two, and no padding.
    assert 0.97 < report.excess_ratio(about, program) < 1.1
    (mean,) = report._rows(program, "between")
    assert mean["spans"]

    # Each chip has its own part of the two experts.
    assert mean["num_bytes"] == pytest.approx(program["sent_bytes"] / 4, rel=1e-3)

    rows = [row for row in report._rows(program, "inside") if row["axes"] == ["expert"]]
    # In each of two steps there and back, rows and cotangents.
    steps = [row for row in rows if row["kind"] == "all-to-all"]
    assert sum(row["executions"] for row in steps) >= 2 * 4


def test_wrong_flags_are_refused_in_a_line(refused):
    error = refused(program, "--preset=smoke")
    assert error.startswith("--target=None is no machine; use one of v4, v5e")

    error = refused(program, "--preset=smoke", "--target=v5e:1x2", "--programs=(")
    assert "programs='(' is not a regular expression" in error

    words = ["--preset=smoke", "--target=v5e:1x2", "--regions=2"]
    error = refused(program, *words, "--exchange=elastic")
    assert error.startswith("--exchange='elastic' has a run for each region")

    error = refused(program, *words, "--region_id=2")
    assert "--region_id=2 is of one elastic" in error


@pytest.mark.parametrize(
    ("error", "code"), [(CompileError("died"), 1), (UnknownProgramError("none"), 2)]
)
def test_a_name_of_no_program_is_a_wrong_flag(error, code, monkeypatch, capsys):
    def compile_run(job, console):
        raise error

    monkeypatch.setattr(program, "read_flags", lambda: (None, None))
    monkeypatch.setattr(program, "compile_run", compile_run)
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_compiler_that_dies_is_reported(monkeypatch):
    target = Target.parse("v5e:1x2", 2)
    config = place(
        PRESETS["smoke"].replace(regions=2, eval_batches=2),
        target,
        keep_data_axis=False,
    )

    # Without packages Python finds no compiler.
    monkeypatch.setenv("PYTHONPATH", "/no/such")
    monkeypatch.setattr(
        Target, "environment", lambda self: {"JAX_PLATFORMS": "no_such_platform"}
    )

    with pytest.raises(CompileError, match="ended with code 1 at 'what comes first'"):
        Job(config, target).run()


ABOUT = dict(
    num_devices=8,
    hbm_bytes=16 * 10**9,
    peak_flops=1e12,
    scan_steps=5,
    syncs_per_step=0.1,
    num_fragments=1,
    model_flops=2e9,
    recomputed_flops=5e8,
    least_bytes_inside=1e6,
)
STEPS = dict(
    name="inner steps",
    fits=True,
    sent_bytes=0,
    argument_bytes=10**9,
    temp_bytes=2 * 10**9,
    peak_bytes=3 * 10**9,
    flops=5 * 2.5e9,
    seconds=7.0,
    estimate=dict(seconds=5 * 0.004, limit="memory", compute_s=5 * 0.0025),
    collectives=[
        dict(
            kind="all-gather",
            where="inside",
            axes=["data"],
            is_async=False,
            spans=False,
            count=2,
            executions=10,
            num_bytes=6e6,
            largest="bf16[8]",
        ),
    ],
)
SEND = dict(
    name="send fragment 0",
    fits=True,
    sent_bytes=80,
    argument_bytes=1,
    temp_bytes=1,
    peak_bytes=1,
    flops=0,
    seconds=1.0,
    estimate=dict(seconds=0.01, limit="network", compute_s=0),
    collectives=[
        dict(
            kind="all-reduce",
            where="between",
            axes=["slice"],
            is_async=True,
            spans=True,
            count=1,
            executions=1,
            num_bytes=20,
            largest="f32[8]",
        ),
    ],
)


def test_a_summary_by_hand():
    summary = report.summarise(ABOUT, [STEPS, SEND])
    assert summary == dict(
        fits=True,
        overlapped=True,
        temp_bytes=2 * 10**9,
        peak_bytes=3 * 10**9,
        hbm_bytes=16 * 10**9,
        step_seconds=0.004,
        mfu=pytest.approx(0.5),
        step_seconds_with_syncs=pytest.approx(0.005),
        mfu_with_syncs=pytest.approx(0.4),
        limit="memory",
        flops_ratio=pytest.approx(1.25),
        recomputed_flops=5e8,
        excess_ratio=pytest.approx(1.0),
        inside_ratio=pytest.approx(1.2),
    )


def test_one_message_that_does_not_span_is_no_overlap():
    late = SEND | dict(collectives=[SEND["collectives"][0] | dict(spans=False)])
    assert not report.summarise(ABOUT, [STEPS, SEND, late])["overlapped"]
    assert not report.summarise(ABOUT, [STEPS])["overlapped"]


def test_a_program_that_is_refused_is_in_the_table():
    refused = dict(
        name="inner steps",
        fits=False,
        sent_bytes=0,
        temp_bytes=40 * 10**9,
        refused="RESOURCE_EXHAUSTED: too much",
        seconds=1.0,
    )
    summary = report.summarise(ABOUT, [refused, SEND])

    assert (summary["fits"], summary["mfu"]) == (False, None)
    assert summary["temp_bytes"] == 40 * 10**9

    console = Console(width=200, record=True, quiet=False, file=io.StringIO())
    console.print(report.table(ABOUT, [refused, SEND]))
    text = console.export_text()
    assert "40.0 GB" in text
    assert "80.0 B" not in text

    config = PRESETS["smoke"]
    lines = list(report.lines(config, ABOUT, [refused, SEND], summary))
    assert lines[0] == "inner steps: RESOURCE_EXHAUSTED: too much"
    assert any("spans the inner steps" in line for line in lines)
