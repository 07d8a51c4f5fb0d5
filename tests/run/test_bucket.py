"""Runs and texts in a bucket, which is a folder here under the name of one."""

import json
import os
import pathlib
import shutil
import types

import pytest
from etils.epath import backend, gpath
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from cocodc_jax import buckets
from cocodc_jax._extras import MissingExtraError
from cocodc_jax.files import TransientError
from cocodc_jax.run.bucket import Bucket
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.resume import only_writer
from cocodc_jax.train.checkpoint import Checkpoints

NAME = "gs://bucket/runs/one"


def mapped(root):
    """`gs://X` as `root/X`, for whatever takes a path."""

    def one(path):
        text = os.fspath(path) if isinstance(path, os.PathLike) else path
        if isinstance(text, str) and text.startswith("gs://"):
            return str(root / text.removeprefix("gs://"))
        return text

    return one


@pytest.fixture
def gs(tmp_path, monkeypatch):
    """A folder that stands for all buckets; the cache is the test's own."""
    root = tmp_path / "buckets"
    (root / "bucket").mkdir(parents=True)
    one = mapped(root)

    class Folder(type(backend.os_backend)):
        """A backend of buckets over the folder, which neither appends nor renames."""

        def __getattribute__(self, name):
            attribute = super().__getattribute__(name)
            if name.startswith("_") or not callable(attribute):
                return attribute
            assert name not in ("rename", "replace"), "a bucket does not rename"

            def call(*args, **kwargs):
                assert name != "open" or "a" not in args[1], "a bucket does not append"
                return attribute(*map(one, args), **kwargs)

            return call

        def glob(self, path):
            paths = super().glob(path)
            return ["gs://" + os.path.relpath(x, root) for x in paths]

        def open(self, path, mode):
            if "w" in mode:  # A bucket has no folders that have to be there.
                os.makedirs(os.path.dirname(path), exist_ok=True)
            return super().open(path, mode)

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Folder())
    # TensorStore's own client writes arrays without `epath`.
    monkeypatch.setattr(tensorstore_utils, "_use_gcs_driver", lambda directory: False)
    monkeypatch.setattr(tensorstore_utils, "_normalize_path", one)
    plain = types.SimpleNamespace(hierarchical_namespace_enabled=False)
    monkeypatch.setattr(gcs_utils, "get_bucket", lambda name: plain)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


class KilledError(Exception):
    """The machine is gone."""


def config(tmp_path, dataset):
    return PRESETS["smoke"].replace(
        regions=2,
        num_layers=1,
        steps=6,
        checkpoint_every=2,
        eval_every=0,
        log_every=1,
        method="diloco",
        sync_interval=2,
        data_dir=str(tmp_path / "data"),
        dataset=dataset,
    )


def write_text(folder: pathlib.Path):
    (folder / "deep").mkdir(parents=True)
    words = " ".join(f"word{i % 97}" for i in range(30_000))
    (folder / "a.txt").write_text(words)
    (folder / "deep" / "b.txt").write_text(words[::-1])
    (folder / ".hidden.txt").write_text("not read")


def test_a_run_in_a_bucket_is_killed_and_resumed_on_another_machine(
    gs, tmp_path, monkeypatch, capsys
):
    write_text(gs / "bucket" / "texts")
    run = config(tmp_path, "text:gs://bucket/texts")
    plain = tmp_path / "plain"

    first = prepare(run, plain)
    expected = first.train()
    save = Checkpoints.save
    steps = []

    def save_twice(self, program, state, extra):
        if len(steps) == 2:
            steps.append("killed")
            raise KilledError
        steps.append(state.step)
        state = save(self, program, state, extra)
        self.wait()
        return state

    def send(*args):
        if "killed" in steps:
            raise KilledError
        buckets.send(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save_twice)
        patched.setattr("cocodc_jax.run.bucket.send", send)
        with pytest.raises(KilledError):
            prepare(run, NAME, earlier=[first]).train()

    there = gs / "bucket" / "runs" / "one"
    assert {"2", "4"} <= {path.name for path in (there / "checkpoints").iterdir()}
    assert not (there / "summary.json").exists()

    # Another machine has none of these files.
    shutil.rmtree(tmp_path / "cache")
    assert "warning" not in capsys.readouterr().err
    summary = prepare(run, NAME, earlier=[first]).train()
    warning = capsys.readouterr().err
    assert "gs://bucket/runs/one was written to by process" in warning

    assert summary["eval_loss"] == expected["eval_loss"]
    for name in ("config.json", "metrics.jsonl"):
        assert (there / name).read_bytes() == (plain / name).read_bytes()
    assert json.loads((there / "summary.json").read_text()) == summary
    assert not (there / ".writer").exists()

    # The next command finds it finished.
    shutil.rmtree(tmp_path / "cache")
    assert prepare(run, NAME, earlier=[first]).train() == summary
    with pytest.raises(ValueError, match="holds a run of another configuration"):
        prepare(run.replace(steps=8), NAME)


def test_a_text_of_a_bucket_is_read_as_it_is_there(gs, tmp_path):
    folder = gs / "bucket" / "texts"
    write_text(folder)
    (folder / "c.log").write_text("a text too")

    def here():
        folder = buckets.fetched("gs://bucket/texts/", tmp_path / "cache")
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}

    first = here()
    assert set(first) == {"a.txt", "c.log", "deep/b.txt"}
    assert first["a.txt"] == (folder / "a.txt").read_text()

    (folder / "c.log").unlink()
    (folder / "a.txt").write_text("other")
    assert here() == {"a.txt": "other", "deep/b.txt": first["deep/b.txt"]}

    one = buckets.fetched("gs://bucket/texts/deep/b.txt", tmp_path / "other")
    assert one.read_text() == first["deep/b.txt"]

    shutil.rmtree(folder / "deep")
    assert here() == {"a.txt": "other"}
    with pytest.raises(ValueError, match="gs://bucket/none does not exist"):
        buckets.fetched("gs://bucket/none", tmp_path)


def test_a_process_sends_its_own_files_when_they_changed(gs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = Bucket.of(NAME)
    there = gs / "bucket" / "runs" / "one"
    assert Bucket.of(str(tmp_path)) is None

    folder = run.workdir / "process_1"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / "output.log").write_text("what the launcher keeps")
    run.send(1)
    assert [path.name for path in there.rglob("*.*")] == ["metrics.jsonl"]

    written = there / "process_1" / "metrics.jsonl"
    os.utime(written, (1, 1))
    run.send(1)
    assert written.stat().st_mtime == 1  # Not sent again.

    (folder / "metrics.jsonl").write_text("1\n2\n")
    run.send(1)
    assert written.read_text() == "1\n2\n"

    # Files that are only here belong to no run.
    (run.workdir / "config.json").write_text("{}")
    with only_writer(run.workdir):  # A run that resumes here keeps its files.
        run.begin(0)
    assert (run.workdir / "config.json").exists()
    run.begin(0)
    assert not (run.workdir / "config.json").exists()

    (there / "config.json").write_text('{"a": 1}')
    run.begin(1)
    assert (run.workdir / "config.json").read_text() == '{"a": 1}'

    with pytest.raises(KeyError), run.writing(1):  # It has ended by itself.
        raise KeyError
    assert not list(there.rglob(".writer"))


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            ImportError("Please install gcsfs to access Google Storage"),
            MissingExtraError,
            r"gcsfs is not installed: pip .*cocodc_jax\[gcs\]",
        ),
        (
            RuntimeError("401 anonymous caller"),
            TransientError,
            "gs://.*one cannot be reached: 401 anony",
        ),
    ],
)
def test_a_bucket_that_cannot_be_reached_is_named_at_once(
    raised, kind, message, monkeypatch
):
    def exists(path):
        raise raised

    failing = types.SimpleNamespace(exists=exists)
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", failing)
    with pytest.raises(kind, match=message):
        Bucket.of(NAME)
