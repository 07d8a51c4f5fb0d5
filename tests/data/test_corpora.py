"""Corpora: what the builders store, that they prepare it once, and what they refuse."""

import dataclasses
import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from cocodc_jax.data import DataConfig
from cocodc_jax.data.corpora import corpus as prepare
from cocodc_jax.data.corpora import files
from cocodc_jax.data.corpora.corpus import open_corpus


def _open(paths, data_dir, **settings):
    name = ",".join(map(str, np.atleast_1d(paths)))
    return open_corpus(DataConfig(f"text:{name}", str(data_dir), **settings))


def _texts(corpus):
    return list(corpus.train), list(corpus.validation)


def _write(folder, contents):
    """Write files of some names; returns the folder."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def _numbered(count, text="text {}", name="{}.txt"):
    return {name.format(i): text.format(i) for i in range(count)}


def test_every_document_is_stored_once_and_on_one_side(text_folder, data_dir):
    corpus = _open(text_folder, data_dir, validation_fraction=0.2)
    train, validation = _texts(corpus)
    expected = [path.read_text() for path in text_folder.rglob("*.txt")]
    assert sorted(train + validation) == sorted(expected)
    assert len(expected) == 60
    assert 4 <= len(validation) <= 24  # binomial(60, 0.2), four standard deviations
    assert not set(train) & set(validation)


def test_source_is_the_first_sub_folder(text_folder, data_dir):
    corpus = _open(text_folder, data_dir)
    for index in range(len(corpus.train)):
        source, num_bytes = corpus.train.source_and_bytes(index)
        text = corpus.train.texts(index)[0]
        assert source == f"source{int(text.split()[0][1:]):02d}"
        assert num_bytes == len(text.encode())


def test_equal_documents_are_on_the_same_side(tmp_path):
    _write(tmp_path, {f"{i}.txt": f"text {i // 4}\n" for i in range(40)})
    corpus = _open(tmp_path, tmp_path / "data", validation_fraction=0.4)
    train, validation = _texts(corpus)
    assert len(train) + len(validation) == 40
    assert not set(train) & set(validation)


def test_a_document_stays_on_its_side_as_others_come(tmp_path):
    folder = _write(tmp_path / "texts", _numbered(30, "first {}"))
    train, validation = map(
        set, _texts(_open(folder, tmp_path, validation_fraction=0.3))
    )
    _write(folder, _numbered(30, "second {}", "a{}.txt"))
    more = _open(folder, tmp_path, validation_fraction=0.3)
    assert train < set(more.train)
    assert validation < set(more.validation)


def test_one_large_file_becomes_many_documents(tmp_path):
    lines = [f"line {i} of one large file\n" for i in range(12_000)]
    path = tmp_path / "input.txt"
    path.write_text("".join(lines))

    train, validation = _texts(_open(path, tmp_path / "data"))
    assert len(train) >= 3
    assert len(validation) >= 1

    documents = train + validation
    assert max(map(len, documents)) <= 1 << 16
    assert all(document.endswith("\n") for document in documents)

    stored = [line for text in documents for line in text.splitlines(keepends=True)]
    assert sorted(stored) == sorted(lines)


def test_a_line_longer_than_a_document_is_cut(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("ab" * 100)
    entry = files.CorpusFile(path, "key", "source")
    pieces = [d.text for d in files.read_documents([entry], max_document_chars=64)]
    assert [len(piece) for piece in pieces] == [64, 64, 64, 8]
    assert "".join(pieces) == "ab" * 100


def test_hidden_and_empty_files_are_passed_over(tmp_path):
    contents = {"a.txt": "some text", "b.md": "other text", "blank.txt": " \n"}
    contents |= {"empty.txt": "", ".hidden": "hidden text", ".git/config": "hidden too"}
    folder = _write(tmp_path / "texts", contents | {"__pycache__/x.txt": "cached"})
    train, validation = _texts(_open(folder, tmp_path / "data"))
    assert sorted(train + validation) == ["other text", "some text"]


@pytest.fixture
def with_bad_byte(tmp_path):
    """A folder with a text that is not UTF-8."""
    contents = {"a.txt": "one", "b.txt": "two", "c.txt": b"caf\xe9 three"}
    return _write(tmp_path / "texts", contents)


def test_a_bad_byte_is_refused(with_bad_byte, tmp_path):
    message = rf"{with_bad_byte}/c.txt is not UTF-8 text \(byte 3: .*=replace or"
    with pytest.raises(ValueError, match=message):
        _open(with_bad_byte, tmp_path / "data")


def test_a_bad_byte_can_be_replaced_without_a_warning(with_bad_byte, tmp_path, capfd):
    corpus = _open(
        with_bad_byte,
        tmp_path / "data",
        undecodable="replace",
        validation_fraction=0.4,
    )
    train, validation = _texts(corpus)
    assert sorted(train + validation) == ["caf\ufffd three", "one", "two"]
    assert capfd.readouterr() == ("", "")


def test_a_file_with_a_bad_byte_can_be_skipped_with_a_warning(
    with_bad_byte, tmp_path, capfd
):
    corpus = _open(with_bad_byte, tmp_path / "data", undecodable="skip")
    train, validation = _texts(corpus)
    assert sorted(train + validation) == ["one", "two"]
    warning = capfd.readouterr().err
    assert warning == (
        "warning: undecodable=skip leaves out 1 of 3 files of the text: "
        f"{with_bad_byte / 'c.txt'}\n"
    )


def test_texts_are_read_from_several_paths(tmp_path):
    _write(tmp_path, {f"{name}/same.txt": f"text of {name}" for name in ("one", "two")})
    paths = [tmp_path / "one", tmp_path / "two" / "same.txt"]
    train, validation = _texts(_open(paths, tmp_path / "data"))
    assert sorted(train + validation) == ["text of one", "text of two"]


def test_texts_are_prepared_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    folder = _write(tmp_path / "texts", _numbered(4))
    first = _open(folder, tmp_path)

    monkeypatch.setattr(prepare, "_prepare_beside", _fail)
    assert _open(folder, tmp_path).fingerprint == first.fingerprint
    monkeypatch.undo()

    (folder / "0.txt").write_text("changed")
    second = _open(folder, tmp_path)
    assert second.fingerprint != first.fingerprint
    assert "changed" in [*second.train, *second.validation]


def test_fingerprint_does_not_depend_on_the_place(tmp_path):
    here, there = (
        _open(_write(tmp_path / name, _numbered(4)), tmp_path / "d")
        for name in ("here", "there")
    )
    assert here.fingerprint == there.fingerprint
    assert _texts(here) == _texts(there)


def test_names_and_folders_are_part_of_the_fingerprint(tmp_path):
    # They decide in which order documents are stored, and whose source they are.
    fingerprints = set()
    for root, name in (("a", "{}.txt"), ("b", "x{}.txt"), ("c", "folder/{}.txt")):
        folder = _write(tmp_path / root, _numbered(4, name=name))
        fingerprints.add(_open(folder, tmp_path / "d").fingerprint)
    assert len(fingerprints) == 3


def test_the_later_of_two_preparations_gives_way(text_folder, tmp_path, monkeypatch):
    beside = prepare._prepare_beside

    def prepare_after_another(make, target):
        # Between this process's look and its rename, another one prepares the same.
        monkeypatch.setattr(prepare, "_prepare_beside", beside)

        def make_after_another(data_dir):
            _open(text_folder, tmp_path)
            return make(data_dir=data_dir)

        beside(make_after_another, target)

    monkeypatch.setattr(prepare, "_prepare_beside", prepare_after_another)
    corpus = _open(text_folder, tmp_path)
    assert len(corpus.train) + len(corpus.validation) == 60
    assert [path.name for path in tmp_path.iterdir()] == ["text_files"]


def test_a_failed_preparation_leaves_no_files(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.TextFiles, "_generate_examples", _fail)
    with pytest.raises(RuntimeError, match="cut short"):
        _open(text_folder, tmp_path)
    assert not list(tmp_path.rglob("*.array_record*"))
    monkeypatch.undo()
    corpus = _open(text_folder, tmp_path)
    assert len(corpus.train) + len(corpus.validation) == 60


@pytest.mark.parametrize("lost", ["*train.array_record*", "dataset_info.json"])
def test_missing_files_of_prepared_data_are_named(text_folder, tmp_path, lost):
    _open(text_folder, tmp_path)
    (file,) = tmp_path.rglob(lost)
    file.unlink()
    (folder,) = (tmp_path / "text_files").iterdir()
    with pytest.raises(ValueError, match=f"{folder} lack .*; remove that folder, and"):
        _open(text_folder, tmp_path)


def test_two_processes_may_prepare_at_the_same_time(text_folder, tmp_path):
    program = (
        "from cocodc_jax.data import DataConfig\n"
        "from cocodc_jax.data.corpora.corpus import open_corpus\n"
        f"c = open_corpus(DataConfig('text:{text_folder}', {str(tmp_path)!r}))\n"
        "print(len(c.train) + len(c.validation), c.fingerprint)\n"
    )

    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]

    outputs, errors = zip(*(p.communicate(timeout=120) for p in started), strict=True)
    assert errors == (b"", b"")
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith(b"60 text-")
    assert [path.name for path in tmp_path.iterdir()] == ["text_files"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "texts does not exist"),
        ({"__pycache__/x.txt": "x"}, "texts holds no readable file"),
        ({"a.txt": " "}, "a.txt holds no readable UTF-8 text"),
        ({"a.txt": "\n", "b.txt": ""}, "texts holds no readable UTF-8 text"),
        ({"a.txt": "alone"}, "a.txt holds one document; at least two different"),
        ({"a.txt": "same", "b.txt": "same"}, "texts holds one document"),
    ],
)
def test_folder_without_text_is_named(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        _open(_write(tmp_path / "texts", content), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "text:~nobody-here/x"}, "dataset='text:...': ~nobody-here.x is"),
        ({"dataset": "hf:~nobody-here/x"}, "dataset='hf:~nobody-here/x': .* without ~"),
        ({"data_dir": "~nobody-here/x"}, "data_dir='~nobody-here/x': .* without ~"),
        # As of a folder that is closed, the system has another answer than no.
        ({"dataset": f"hf:/{'x' * 300}"}, "x' has no file of .*, as it is not there"),
        ({"data_dir": f"/{'x' * 300}"}, "data_dir='/x*' cannot be written to .File na"),
    ],
)
def test_a_dataset_path_that_does_not_exist_is_named(text_folder, settings, message):
    with pytest.raises(ValueError, match=message):
        open_corpus(DataConfig(**{"dataset": f"text:{text_folder}"} | settings))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_named(name, text_folder, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / name

    with pytest.raises(
        ValueError, match=f"data_dir='{folder}' cannot .*XDG_CACHE_HOME"
    ):
        _open(text_folder, folder)


def test_broken_links_are_passed_over(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no readable file"):
        _open(tmp_path, tmp_path / "data")


def test_links_to_folders_are_left_out_with_a_warning(tmp_path):
    folder, elsewhere = (
        _write(tmp_path / name, {"a.txt": "text"}) for name in ("text", "elsewhere")
    )
    (folder / "more").symlink_to(elsewhere)
    (folder / "b.txt").symlink_to(elsewhere / "a.txt")
    with pytest.warns(UserWarning, match="text/more is a link to a folder and is left"):
        listed = files.list_text_files([str(folder)])
    assert [file.key for file in listed] == ["0/a.txt", "0/b.txt"]


def test_files_whose_names_are_not_utf8_are_read(tmp_path):
    folder = _write(tmp_path / "text", _numbered(4, name=os.fsdecode(b"caf\xe9{}.txt")))
    corpus = _open(folder, tmp_path)
    assert {*corpus.train, *corpus.validation} == {f"text {i}" for i in range(4)}
    sources = {corpus.train.source_and_bytes(i)[0] for i in range(len(corpus.train))}
    assert sources <= {rf"caf\udce9{index}" for index in range(4)}


def test_file_without_permission_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    # Root, as which tests may run, reads every file, so the refusal is played.
    monkeypatch.setattr(pathlib.Path, "read_bytes", _refuse)
    with pytest.raises(ValueError, match="a.txt cannot be read .Permission denied.; c"):
        _open(tmp_path, tmp_path / "data")


@pytest.mark.parametrize("kind", ["text", "hf"])
def test_a_folder_without_permission_is_named(tmp_path, monkeypatch, kind):
    folder = tmp_path / "set"
    for name in ("a", "b", "locked"):
        row = f'{{"text": "text {name}"}}\n'
        _write(folder / name, {"x.txt": f"text {name}", "x.jsonl": row})
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    config = DataConfig(f"{kind}:{folder}", str(tmp_path / "data"))
    with pytest.raises(ValueError, match="set/locked cannot be read .Permission den"):
        open_corpus(config)
    if kind == "text":
        corpus = open_corpus(dataclasses.replace(config, undecodable="skip"))
        assert not any("locked" in text for text in (*corpus.train, *corpus.validation))


def _refuse(path):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def _fail(*args, **kwargs):
    raise RuntimeError("cut short")


class _ToySet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Prepare a TFDS set, as another program may have done."""

    VERSION = tfds.core.Version("1.2.0")
    code_path = pathlib.Path(__file__)
    features = {"text": tfds.features.Text(), "title": tfds.features.Text()}
    splits = {"train": 50}

    def _info(self):
        features = tfds.features.FeaturesDict(self.features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {s: self._generate_examples(s, n) for s, n in self.splits.items()}

    def _generate_examples(self, split, count):
        for index in range(count):
            yield index, {name: f"{name} {split} {index}" for name in self.features}


def _prepare_toy(data_dir, file_format="array_record", **attributes):
    builder_class = type("ToySet", (_ToySet,), attributes, skip_registration=True)
    with prepare._quiet():
        builder_class(data_dir=data_dir, file_format=file_format).download_and_prepare()


def _open_toy(data_dir):
    config = DataConfig("tfds:toy_set", str(data_dir), validation_fraction=0.1)
    return open_corpus(config)


def test_a_tfds_set_with_one_split_is_cut(tmp_path):
    _prepare_toy(tmp_path)
    train, validation = _texts(_open_toy(tmp_path))
    assert len(train) == 45
    assert len(validation) == 5
    assert {*train, *validation} == {f"text train {index}" for index in range(50)}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_tfds_set_keeps_its_validation_split(tmp_path, split):
    _prepare_toy(tmp_path, splits={"train": 20, split: 6, "unsupervised": 3})
    train, validation = _texts(_open_toy(tmp_path))
    assert set(train) == {f"text train {index}" for index in range(20)}
    assert set(validation) == {f"text {split} {index}" for index in range(6)}


def test_the_text_of_a_tfds_set_may_have_another_name(tmp_path):
    _prepare_toy(tmp_path, features={"article": tfds.features.Text()})
    assert all(text.startswith("article train") for text in _open_toy(tmp_path).train)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"features": dict.fromkeys(("question", "answer"), tfds.features.Text())},
            r"no text feature 'text' .* features are \['answer', 'question'\]",
        ),
        ({"splits": {"test": 3}}, r"no split 'train', only \['test'\]"),
    ],
)
def test_a_tfds_set_without_text_to_train_on_is_refused(tmp_path, attributes, message):
    _prepare_toy(tmp_path, **attributes)
    with pytest.raises(ValueError, match=message):
        _open_toy(tmp_path)


def test_a_tfds_set_that_is_not_prepared_is_refused(tmp_path):
    message = (
        r"dataset='tfds:c4/en' is not prepared in data_dir='.*'; nothing is downloaded "
        r"here: run `tfds build c4/en --file_format=array_record`"
    )
    with pytest.raises(ValueError, match=message):
        open_corpus(DataConfig("tfds:c4/en", str(tmp_path)))


@pytest.mark.parametrize("name", ["c4/en:9.9", "c4/en/x", "!"])
def test_an_invalid_name_of_a_tfds_set_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"^dataset='tfds:{name}' is no name of a TFD"):
        open_corpus(DataConfig(f"tfds:{name}", str(tmp_path)))


def test_a_tfds_set_without_random_access_is_refused(tmp_path):
    _prepare_toy(tmp_path)
    (info,) = tmp_path.glob("toy_set/*/dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"stored as \['tfrecord'\], which cannot be"):
        _open_toy(tmp_path)


MARKED = "A first line\nand another \ufeffone\n"


@pytest.fixture
def with_mark(tmp_path):
    """A folder with a text that begins with a byte order mark, and another text."""
    folder = _write(tmp_path / "texts", {"b.txt": "other"})
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + MARKED.encode())
    return folder


def test_byte_order_marks_are_left_out_of_texts_unless_they_are_kept(with_mark):
    listed = files.list_text_files([str(with_mark)])
    assert [d.text for d in files.read_documents(listed)] == [MARKED, "other"]

    kept = files.read_documents(listed, keeps_marks=True)
    assert next(kept).text == "\ufeff" + MARKED


def test_byte_order_marks_are_left_out_of_a_corpus(with_mark, tmp_path):
    train, validation = _texts(_open(with_mark, tmp_path / "data"))
    assert {*train, *validation} == {MARKED, "other"}


def test_files_without_a_mark_keep_their_fingerprint_of_text(tmp_path):
    plain = _open(_write(tmp_path / "a", {"a.txt": "x", "b.txt": "y"}), tmp_path / "d")
    marked = _write(tmp_path / "b", {"a.txt": "\ufeffx", "b.txt": "y"})
    assert _open(marked, tmp_path / "d").fingerprint == plain.fingerprint
