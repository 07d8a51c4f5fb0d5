"""The benchmark of one accelerator, tried on a CPU at the least size."""

import json
import math
import time

import jax
import pytest
from rich.console import Console

from experiments import accelerator
from experiments.accelerator import Results, Row

SILENT = Console(quiet=True)
LATER_S = 1e9


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """JAX has its devices already."""
    monkeypatch.setattr(accelerator.cc, "use_cpu_devices", lambda _: None)


def words(tmp_path, **flags):
    least = {"shapes": "tiny", "regions": "2", "interval": "8", "repeats": "1"}
    flags = least | {"workdir": str(tmp_path)} | flags
    return [f"--{name}={value}" for name, value in flags.items()]


def read(tmp_path):
    return json.loads((tmp_path / accelerator.RESULT_FILE).read_text())


def test_a_row_is_measured_once_and_shown_again(call, tmp_path, monkeypatch):
    smoke = accelerator.PRESETS["smoke"].replace(num_layers=1)
    monkeypatch.setattr(accelerator, "PRESETS", {"smoke": smoke})
    flags = words(tmp_path, contenders="scan,diloco", methods="")
    out, _ = call(accelerator, *flags)

    content = read(tmp_path)
    assert content["device"] == jax.devices()[0].device_kind
    assert list(content["rows"]) == [
        "speed/tiny/2 regions/scan",
        "speed/tiny/2 regions/diloco",
    ]

    for row in content["rows"].values():
        assert row["tokens_per_step"] == 2 * 2 * 32
        per_s = 8 * row["tokens_per_step"] / row["seconds"][0]
        assert row["tokens_per_second"] == pytest.approx(per_s)
        assert row["mfu"] is None  # Of a CPU there is no peak.
    assert "over the scan" in out

    def refuse(*_):
        raise AssertionError("it ran again")

    monkeypatch.setattr(accelerator, "make_turn", refuse)
    again, _ = call(accelerator, *flags)
    assert read(tmp_path) == content
    assert "tiny/2 regions/diloco" in again


@pytest.mark.parametrize("regions", [2, 4])
def test_every_method_has_a_configuration_and_one_batch_for_all(regions):
    """Of four regions as of two: the device computes the same tokens in a step."""
    config = accelerator.SHAPES["150m"].config(regions)
    assert regions * config.data.batch_per_region == 16

    for flags in accelerator.METHODS.values():
        chosen = config.replace(**({"sync_interval": 40} | flags)).method.build()
        assert chosen.schedule is not None
        assert chosen.schedule.sync_interval in (4, 40)


def test_a_compiled_program_reports_its_memory():
    """Of a CPU here; of an H100 with the flag, where the extra `cuda` is installed."""
    smoke = accelerator.SHAPES["tiny"].config(2).replace(num_layers=1)
    device = jax.devices()[0]
    ((part, program, arguments),) = accelerator.programs_of(smoke, "scan", 8, device)
    assert part == "steps"
    summary = accelerator.compiled(program, arguments, "cpu")
    assert "GB, without a flash kernel" in summary


def row(name, tokens=0, **measured):
    return Row(name, lambda: measured, tokens)


def test_rows_that_do_not_fit_into_the_minutes_are_measured_later(tmp_path):
    rows = [
        row("a", mfu=None, tokens_per_second=100.0),
        row("b", mfu=0.5, eval_loss=1.0),
    ]
    results = Results(tmp_path, "cpu")
    assert accelerator.measure(iter(rows), results, time.monotonic(), SILENT) == [
        "a",
        "b",
    ]
    assert not (tmp_path / accelerator.RESULT_FILE).exists()

    end_s = time.monotonic() + LATER_S
    assert accelerator.measure(iter(rows[:1]), results, end_s, SILENT) == []
    later = Results(tmp_path, "cpu")
    assert later.rows == {"a": {"mfu": None, "tokens_per_second": 100.0}}
    # A row of part 2 that would not end in time is left for another call.
    long = row("c", tokens=10**12)
    assert accelerator.seconds_needed(long, later) == 10**10 + accelerator.START_S
    assert accelerator.measure(iter([long]), later, end_s, SILENT) == ["c"]


def test_a_row_that_fails_has_its_error_and_runs_again(tmp_path):
    results = Results(tmp_path, "cpu")

    def fail():
        raise RuntimeError("RESOURCE_EXHAUSTED: 90 GB\nof which ...")

    end_s = time.monotonic() + LATER_S
    accelerator.measure(iter([Row("a", fail)]), results, end_s, SILENT)
    why = "RuntimeError: RESOURCE_EXHAUSTED: 90 GB"
    assert read(tmp_path)["rows"] == {"a": {"error": why}}
    again = row("a", mfu=None, tokens_per_second=1.0)
    accelerator.measure(iter([again]), Results(tmp_path, "cpu"), end_s, SILENT)
    assert read(tmp_path)["rows"]["a"] == {"mfu": None, "tokens_per_second": 1.0}


def test_rows_of_another_device_are_not_mixed(tmp_path):
    Results(tmp_path, "NVIDIA H200").add("a", {})
    with pytest.raises(ValueError, match="rows of device=NVIDIA H200, but this is cpu"):
        Results(tmp_path, "cpu")


def test_the_trained_model_has_the_documented_size():
    config = accelerator.TRAINED
    model = config.model
    block = 4 * model.width**2 + 3 * model.width * model.mlp_width
    assert model.num_layers * block == pytest.approx(31.6e6, rel=0.01)
    for name in accelerator.TRAINED_METHODS:
        trained = accelerator.loss_config(config, name)
        assert trained.method.build().name in (name, "streaming_diloco")
        assert math.isclose(trained.optimizer.inner_lr, 8e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"shapes": "7b"}, "shapes='7b' is unknown; use some of 30m, 150m, tiny"),
        ({"contenders": "ddp"}, "contenders='ddp' is unknown; use some of scan"),
        ({"methods": "co2"}, "methods='co2' is unknown; use some of streaming_diloco"),
        ({"regions": "0"}, "regions=0 must be at least 1 each"),
        ({"regions": "two"}, "regions=two must be whole numbers"),
        ({"compile_for": "a100"}, "target='a100:1' is no chip of"),
        ({"interval": "10"}, "interval=10 must be a multiple of 4 and at least 8"),
    ],
)
def test_a_wrong_flag_is_named(call, tmp_path, flags, message):
    _, error = call(accelerator, *words(tmp_path, **flags), code=2)
    assert message in error
