"""Setting up a run: errors before anything compiles, folders and records."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from cocodc_jax.report.records import MetricsWriter, read_records
from cocodc_jax.run import resume
from cocodc_jax.run.adoption import Source
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.run.preparing import prepare

PRESET = PRESETS["smoke"]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"num_fragments": 5, "sync_interval": 20}, "num_fragments=5 does not fit"),
        ({"model_axis": 3}, "model_axis|model=3"),
        ({"fragment_strategy": "experts"}, "experts has no meaning for a model with"),
        ({"expert_weights": "tokens"}, "expert_weights=tokens has no meaning for a"),
        (
            {"method": "diloco", "router_interval": 4},
            "router_interval=4 has no meaning for a model without experts",
        ),
        ({"transmission_score": "load"}, "transmission_score=load has no meaning"),
        ({"num_experts": 4}, "expert_width=0 is not a size"),
        ({"model_axis": 2**19 // 3}, "num_heads=.* model=174762; use"),
        ({"stage_subspace": 4096}, "stage_subspace=4096 must be .* the model's width="),
        ({"devices": 64}, "devices=64 asks for more than there are"),
        ({"dataset": "text:/nowhere"}, "dataset|/nowhere"),
        ({"eval_batches": 2**20}, "^eval_batches=1048576: .* and the corpus has"),
        ({"adopt_from": "/nowhere"}, "adopt_from='/nowhere' holds no run"),
    ],
)
def test_invalid_configurations_are_refused_before_anything_compiles(
    leaves, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    base = PRESET.replace(data_dir=str(tmp_path))
    with pytest.raises(ValueError, match=message):
        prepare(base.replace(**leaves), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_checkpoints_cannot_be_adopted(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(dumps(PRESET.to_json()))
    config = PRESET.replace(adopt_from=str(tmp_path), exchange="elastic")
    with pytest.raises(ValueError, match="holds no run with checkpoints"):
        Source.of(config)


def test_an_elastic_run_cannot_adopt_another(tmp_path):
    (tmp_path / "checkpoints" / "8").mkdir(parents=True)
    (tmp_path / "config.json").write_text(dumps(PRESET.to_json()))
    config = PRESET.replace(adopt_from=str(tmp_path), exchange="elastic")
    with pytest.raises(ValueError, match="is not possible with exchange='elastic'"):
        Source.of(config)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is no JSON"),
        (b"\xff{}", "it is no JSON"),
        (b"[]", "no JSON object"),
        (b'{"preset": "smoke", "run": 3}', "section 'run' is 3"),
        ({"steps": "48"}, "another type"),
        ({"regions": None}, "another type"),
    ],
)
def test_a_damaged_configuration_is_refused_with_a_repair(tmp_path, content, why):
    config = PRESET.resolve()
    if isinstance(content, dict):
        table = config.to_json()
        table["run"] |= content
        content = json.dumps(table).encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"holds a config.json .*{why}.*; bring it"):
        resume.check_workdir(config, tmp_path)


def test_a_configuration_that_is_there_is_not_written_again(tmp_path):
    config = PRESET.resolve()
    path = tmp_path / "run" / "config.json"
    resume.claim(config, path.parent)
    before = path.stat()
    resume.claim(config, path.parent)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    resume.check_workdir(config, path.parent)


def test_a_run_that_began_meanwhile_keeps_its_configuration(tmp_path):
    config = PRESET.resolve()
    other = PRESET.replace(seed=5).resolve()
    resume.check_workdir(other, tmp_path)
    with resume.only_writer(tmp_path):
        resume.claim(other, tmp_path)  # Training shows that the folder is in use.
    assert not (tmp_path / "config.json").exists()

    resume.claim(config, tmp_path)
    message = "another configuration .*seed: 0, not 5"
    with pytest.raises(ValueError, match=message):
        resume.claim(other, tmp_path)
    with pytest.raises(ValueError, match=message):
        resume.write_config(other, tmp_path)
    resume.check_workdir(config, tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(resume, "write_whole", refuse)
    with pytest.raises(ValueError, match=r"workdir='.*run' .*Read-only file system"):
        resume.claim(PRESET.resolve(), tmp_path / "run")


def test_a_file_in_place_of_the_checkpoints_is_named(tmp_path):
    (tmp_path / resume.CHECKPOINTS).touch()
    with pytest.raises(ValueError, match="has a file named checkpoints, where"):
        resume.check_workdir(PRESET.resolve(), tmp_path)


def test_a_folder_of_results_is_created_if_it_is_missing(tmp_path):
    for _ in range(2):
        resume.make_folder(tmp_path / "new" / "run")
        assert (tmp_path / "new" / "run").is_dir()


def test_an_invalid_folder_of_results_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"workdir='.*file' is a file; name a folder"):
        resume.make_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="run' cannot be written to .Not a dir"):
        resume.make_folder(tmp_path / "file" / "run")

    with pytest.raises(
        ValueError, match=r"workdir='.*' cannot be written to \(File na"
    ):
        resume.check_folder(tmp_path / ("x" * 300))

    with pytest.raises(ValueError, match="workdir='gs://models/run' is in a bucket"):
        resume.make_folder(pathlib.Path("gs://models/run"))


def take(folder):
    with resume.only_writer(folder):
        pass


def test_a_folder_has_one_writer(tmp_path):
    with resume.only_writer(tmp_path / "run"):
        message = rf"workdir='{tmp_path}/run' .* by process {os.getpid()} on "
        with pytest.raises(resume.FolderInUseError, match=message):
            take(tmp_path / "run")
        # Another process of the same run has a folder of its own.
        take(tmp_path / "run" / "process_1")
    take(tmp_path / "run")


def test_a_killed_process_gives_its_folder_back(tmp_path):
    code = """
import pathlib, sys, time
from cocodc_jax.run.resume import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print('has it', flush=True)
    time.sleep(60)
"""
    words = [sys.executable, "-c", code, tmp_path]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(resume.FolderInUseError, match=f"process {other.pid} on"):
            take(tmp_path)

        other.send_signal(signal.SIGKILL)
        other.wait()

    take(tmp_path)


class TestRecordsOfAnotherNumberOfProcesses:
    """Records up to the checkpoint stay, whichever process resumes."""

    @pytest.fixture
    def written(self, tmp_path):
        """Records of steps 1 to 4 here and in process_1, and extras of a save at 3."""
        saved = []
        for folder in (tmp_path, tmp_path / "process_1"):
            with MetricsWriter(folder) as writer:
                for step in range(1, 5):
                    record = {
                        "kind": "train",
                        "step": step,
                        "tokens": step,
                        "loss": 1.0,
                        "loss_regions": [1.0],
                        "bytes_sent_per_region": 0,
                    }
                    writer.write(record)
                    if step == 3:
                        position = {
                            "metrics_bytes": writer.offset,
                            "seconds": 7.0,
                            "began_s": 0.0,
                            "stream": {"regions": {str(len(saved)): 0}},
                        }
                        saved.append(position)

        return tmp_path, saved

    @pytest.mark.parametrize("num_saved", [1, 2])
    @pytest.mark.parametrize("process", [0, 1])
    def test_records_up_to_a_position_are_kept(
        self, written, monkeypatch, process, num_saved
    ):
        folder, saved = written
        monkeypatch.setattr(jax, "process_index", lambda: process)
        position = resume.position(saved[:num_saved])
        assert position["seconds"] == 7.0
        assert len(position["stream"]["regions"]) == num_saved

        its_files = folder / "process_1" if process else folder
        resume.open_records(its_files, position, 3).close()
        records = read_records(its_files / "metrics.jsonl")
        assert [record["step"] for record in records] == [1, 2, 3]

    @pytest.mark.parametrize("damage", ["a line", "all but the first line"])
    def test_damaged_records_are_named(self, written, damage):
        folder, saved = written
        path = folder / "metrics.jsonl"
        first, second, *rest = path.read_bytes().split(b"\n")

        kept = [first, b"#" * len(second), *rest] if damage == "a line" else [first]
        path.write_bytes(b"\n".join(kept))

        with pytest.raises(
            resume.ResumeError,
            match=f"{folder} cannot go on: .*{path}.*; bring the file back",
        ):
            resume.open_records(folder, saved[0], 3)
