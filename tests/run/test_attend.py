"""What a run reports: MFU by hand, and Weights & Biases, also with a stand-in."""

import importlib.machinery
import importlib.util
import io
import json
import pathlib
import sys
import types

import jax
import pytest
from rich.console import Console

import cocodc_jax
from cocodc_jax.chips import peak_tokens_per_second
from cocodc_jax.models import TransformerConfig, flops_per_token, num_params
from cocodc_jax.report.progress import RunProgress
from cocodc_jax.report.records import MetricsWriter, weights_and_biases
from cocodc_jax.run.attend import Tracking, Watch
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.resume import open_records
from cocodc_jax.train.hooks import Clock
from experiments import train

TRAIN = {
    "kind": "train",
    "tokens": 16,
    "loss": 2.0,
    "loss_regions": [1.5, 2.5],
    "bytes_sent_per_region": 0,
}


class StandIn(types.ModuleType):
    """As much of `wandb` as is used; remembers each run's arguments and numbers."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")
        self.runs = []

    def init(self, **arguments):
        if arguments["project"] == "forbidden":
            raise self.Error("no permission")
        self.runs.append(Run(arguments))
        return self.runs[-1]


class Run:
    def __init__(self, arguments):
        self.arguments = arguments
        self.logged = []
        self.metrics = []
        self.is_finished = False

    def define_metric(self, name, **settings):
        self.metrics.append((name, settings))

    def log(self, numbers):
        assert not self.is_finished
        self.logged.append(numbers)

    def finish(self):
        self.is_finished = True


@pytest.fixture
def wandb(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def test_records_go_to_both_and_a_resumed_run_keeps_its_id(wandb, tmp_path):
    tracking = Tracking("project", "offline")
    position = {}
    for steps in ((1, 2), (2, 3)):  # Step 2 is written again.
        mirrors = tracking.mirrors("name", {"run": {"steps": 3}})
        with open_records(tmp_path, position, steps[0] - 1, mirrors) as writer:
            for step in steps:
                writer.write(TRAIN | {"step": step})
                if step == 1:
                    position = {"metrics_bytes": writer.offset}
            writer.write_timing(step, 1.0, 100.0, 0.0)

    first, second = wandb.runs
    assert first.arguments["id"] == second.arguments["id"]
    assert first.arguments == {
        "project": "project",
        "mode": "offline",
        "name": "name",
        "resume": None,
        "config": {"run": {"steps": 3}},
        "dir": str(tmp_path),
        "id": json.loads((tmp_path / "wandb.json").read_text())["id"],
    }

    assert first.metrics == [("step", {}), ("*", {"step_metric": "step"})]
    assert first.logged[0] == {
        "step": 1,
        "train/tokens": 16,
        "train/loss": 2.0,
        "train/loss_regions/region_0": 1.5,
        "train/loss_regions/region_1": 2.5,
        "train/bytes_sent_per_region": 0,
    }

    assert [numbers["step"] for numbers in second.logged] == [2, 3, 3]
    assert second.logged[-1]["timing/tokens_per_second"] == 100.0
    assert first.is_finished
    assert second.is_finished
    assert list((tmp_path / "tb").iterdir())


def test_online_goes_on_with_the_run_and_the_environment_may_choose(wandb, tmp_path):
    weights_and_biases(tmp_path, project="p").close()
    assert wandb.runs[0].arguments["resume"] == "allow"
    assert wandb.runs[0].arguments["mode"] is None


def test_an_error_of_wandb_is_named_in_one_line(wandb, tmp_path):
    with pytest.raises(OSError, match=r"'forbidden' \(no permission\); log in"):
        weights_and_biases(tmp_path, project="forbidden")


def test_only_process_0_shows_the_run(wandb, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert len(Tracking("p").mirrors("name", {})) == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    Tracking("p").check()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--wandb_mode=offline", "--wandb_mode=offline has no project; add --wandb"),
        ("--wandb=p --wandb_mode=of", "--wandb_mode='of' is unknown; use one of"),
        ("--wandb=p", "--wandb=p needs a package that is not installed: pip install"),
    ],
)
def test_wrong_flags_of_wandb_are_refused(flags, line, refused, tmp_path, monkeypatch):
    # A folder of that name, as W&B makes them, is not the package.
    (tmp_path / "wandb").mkdir()
    find = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name, [str(tmp_path)])
    )

    workdir = tmp_path / "run"
    words = ["--preset=smoke", f"--workdir={workdir}", *flags.split()]

    assert refused(train, *words).startswith(line)
    assert not workdir.exists()


@pytest.mark.slow
def test_a_run_sends_its_records_to_wandb(wandb, tmp_path):
    text = pathlib.Path(cocodc_jax.__file__).parent
    config = PRESETS["smoke"].replace(
        data_dir=str(tmp_path), dataset=f"text:{text}", steps=16
    )
    prepare(config, tmp_path / "run", tracking=Tracking("p", "offline")).train()

    (run,) = wandb.runs
    names = {name for numbers in run.logged for name in numbers}
    assert {"train/loss", "eval/eval_loss", "timing/wall_s"} <= names
    assert run.arguments["config"]["run"]["steps"] == 16
    assert run.arguments["name"] == "run"


def test_the_package_wandb_writes_offline_runs(tmp_path):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    mirrors = Tracking("p", "offline").mirrors("name", {"steps": 3})
    for offset in (None, 0):
        with MetricsWriter(tmp_path, offset, mirrors) as writer:
            writer.write(TRAIN | {"step": 1})

    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert files
    assert all(b"train/loss_regions" in path.read_bytes() for path in files)


MODEL = TransformerConfig(
    vocab_size=96, num_layers=2, width=32, num_heads=2, mlp_width=64, num_kv_heads=2
)
PER_TOKEN = flops_per_token(MODEL, 16)


def devices(*kinds):
    return [types.SimpleNamespace(device_kind=kind) for kind in kinds]


def test_peak_rate_is_peaks_over_operations_of_a_token():
    table = 0 if MODEL.tie_embeddings else 96 * 32
    flops = 6 * (num_params(MODEL) - table) + 12 * 2 * 32 * 16
    peak = peak_tokens_per_second(devices("TPU v5 lite", "TPU v4"), PER_TOKEN)
    assert peak == pytest.approx((197e12 + 275e12) / flops, rel=1e-12)


@pytest.mark.parametrize("kinds", [("cpu",), ("TPU v4", "cpu"), ("TPU v99",)])
def test_unknown_peaks_give_none(kinds):
    assert peak_tokens_per_second(devices(*kinds), PER_TOKEN) is None


@pytest.mark.parametrize(("peak", "share"), [(400.0, 0.25), (None, None)])
def test_the_share_goes_to_the_line_and_to_timing(tmp_path, peak, share):
    out = io.StringIO()
    bar = RunProgress(4, console=Console(file=out, width=140))
    with MetricsWriter(tmp_path, mirrors=()) as writer, bar:
        watch = Watch(writer, bar, 0.0, peak)
        watch(Clock(4, 2.0, 1.0, 100.0, 0.0, 1, 1000, 100.0))
    (line,) = (tmp_path / "timing.jsonl").read_text().splitlines()
    assert json.loads(line).get("mfu") == share
    assert ("MFU 25.0 %" in out.getvalue()) == (share is not None)
