"""Rows of `datasets`: every file kind, each document once, splits, resume, errors."""

import dataclasses
import gzip
import itertools
import json
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax._extras import MissingExtraError
from cocodc_jax.data import DataConfig, load
from cocodc_jax.data.corpora.corpus import open_corpus
from cocodc_jax.data.corpora.hf_sets import _split
from cocodc_jax.data.corpora.row_files import (
    JsonLines,
    RecordError,
    open_arrow,
    open_parquet,
)

RNG = np.random.default_rng(0)
TEXTS = [
    f"text {i}: größer " + " ".join(map(str, RNG.integers(0, 10**6, i % 60 + 3)))
    for i in range(600)
]


def json_lines(texts, field="text"):
    rows = [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
    return ("\n".join(rows) + "\n").encode()


def write(path, texts, field="text", rows=50):
    """Write a file of rows in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(texts)), field: texts})

    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".arrow":
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=rows)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json_lines(texts, field)))
    else:
        path.write_bytes(json_lines(texts, field))


def config_of(folder, tmp_path, **changes):
    changes = {"validation_fraction": 0.2, "shuffle_window_bytes": 1 << 13} | changes
    return DataConfig(
        f"hf:{folder}",
        str(tmp_path / "cache"),
        sequence_length=15,
        batch_per_region=4,
        **changes,
    )


def take(stream, count):
    return np.stack(list(itertools.islice(stream, count)))


@given(
    lines=st.lists(st.text("a\u00fc\n ", min_size=0, max_size=12), max_size=12),
    size=st.integers(1, 60),
)
@settings(max_examples=40)
def test_chunks_of_json_lines_are_every_line_once(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    rows = [json.dumps({"text": line}, ensure_ascii=False) for line in lines]
    path.write_text("\n\n".join(rows))  # Empty lines, and none at the end.
    file = JsonLines(path, "text", size, "refuse", path)
    chunks = [file.texts(chunk) for chunk in range(file.num_chunks)]
    assert sum(chunks, []) == [line for line in lines if line.strip()]


@pytest.mark.parametrize("kind", [open_parquet, open_arrow])
@pytest.mark.parametrize("size", [1, 700, 10**6])
def test_chunks_of_columns_are_every_row_once(tmp_path, kind, size):
    path = tmp_path / f"a.{kind.__name__.removeprefix('open_')}"
    texts = [None if i % 9 == 4 else text for i, text in enumerate(TEXTS[:130])]
    write(path, texts)

    file = kind(path, "text", size)
    chunks = [file.texts(chunk) for chunk in range(file.num_chunks)]

    assert sum(chunks, []) == [text for text in texts if text]
    # Of groups of 50 rows one in nine has no text.
    most = max(map(len, chunks))
    assert most == {1: 1, 10**6: 45}.get(size, most)
    assert file.num_bytes > sum(len(text) for text in texts if text)


def test_arrow_files_in_file_format_are_read(tmp_path):
    table = pa.table({"text": TEXTS[:5]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    assert open_arrow(tmp_path / "a.arrow", "text", 10**6).texts(0) == TEXTS[:5]


@pytest.mark.parametrize("suffix", ["jsonl", "json.gz", "parquet", "arrow"])
def test_every_document_is_on_one_side(tmp_path, suffix):
    folder = tmp_path / "set"
    for part in range(3):
        write(folder / f"{part}.{suffix}", TEXTS[200 * part :][:200])
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")

    corpus = open_corpus(config_of(folder, tmp_path))
    train = list(corpus.train)
    held = list(corpus.validation)
    assert sorted(train + held) == sorted(TEXTS)
    assert 70 < len(held) < 170  # binomial(600, 0.2), five standard deviations

    assert [t for t in TEXTS if t in train] != train  # In another order.
    sources = {corpus.train.source_and_bytes(i)[0] for i in range(len(corpus.train))}
    assert sources == {"0", "1", "2"}


def test_splits_are_those_of_names(tmp_path):
    folder = tmp_path / "set"
    texts_of = {
        "data/train-0-of-2.jsonl": TEXTS[:100],
        "data/train-1-of-2.parquet": TEXTS[100:200],
        "data/test-0.parquet": TEXTS[200:300],
        "more.jsonl": TEXTS[300:],
    }
    for name, texts in texts_of.items():
        write(folder / name, texts)

    corpus = open_corpus(config_of(folder, tmp_path))
    assert sorted(corpus.train) == sorted(TEXTS[:200])
    assert sorted(corpus.validation) == sorted(TEXTS[200:300])

    write(folder / "validation/x.arrow", TEXTS[400:])
    again = open_corpus(config_of(folder, tmp_path))
    assert sorted(again.validation) == sorted(TEXTS[400:])
    assert again.fingerprint != corpus.fingerprint

    alone = open_corpus(config_of(folder / "data/test-0.parquet", tmp_path))
    assert sorted([*alone.train, *alone.validation]) == sorted(TEXTS[200:300])


@pytest.mark.parametrize(
    ("key", "split"),
    [
        ("train/data-00000-of-00001.arrow", "train"),
        ("en/c4-validation.00000-of-00008.json.gz", "validation"),
        ("val.jsonl", "validation"),
        ("a_test.parquet", "test"),
        ("latest/valued.jsonl", ""),
        ("trainer.jsonl", ""),
    ],
)
def test_the_split_is_read_from_the_name(key, split):
    assert _split(key) == split


@pytest.fixture
def mixed(tmp_path):
    folder = tmp_path / "set"
    for name, part in {"a.jsonl": 0, "b.parquet": 1, "c.arrow": 2}.items():
        write(folder / name, TEXTS[200 * part :][:200], field="content")
    return config_of(folder, tmp_path, text_field="content")


def test_a_restored_stream_goes_on_bit_for_bit(mixed):
    stream = load(mixed, 2).train_stream()
    take(stream, 37)
    state = json.loads(json.dumps(stream.get_state()))
    expected = take(stream, 200)  # Over more than an epoch.
    again = load(dataclasses.replace(mixed, loader_threads=3), 2).train_stream()
    again.set_state(state)
    np.testing.assert_array_equal(take(again, 200), expected)


def test_a_set_in_one_row_group_feeds_many_regions(tmp_path):
    write(tmp_path / "set" / "one.parquet", TEXTS, rows=600)
    data = load(config_of(tmp_path / "set", tmp_path), 4)
    assert next(data.train_stream()).shape == (4, 4, 16)


BAD = [
    (
        '{"body": "x"}',
        "a.jsonl, line 601: has no field 'text'; its fields are ['body']",
    ),
    ('{"text": 3}', "a.jsonl, line 601: field 'text' is of type int, not text"),
    ('{"text": "x"', "a.jsonl, line 601: is no JSON (Expecting"),
    ("[1]", "a.jsonl, line 601: is a JSON list; each line must be one object"),
    (
        '{"text": "x", "more": ' + "[" * 10**5 + "]" * 10**5 + "}",
        "a.jsonl, line 601: is no JSON (maximum recursion depth",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named_when_it_is_read(tmp_path, line, message):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS) + line.encode())
    stream = load(config_of(folder, tmp_path), 1).train_stream()
    with pytest.raises(RecordError, match=re.escape(message)):
        take(stream, 3000)


@pytest.fixture
def undecodable(tmp_path):
    """The configuration of a set with a line that is not UTF-8."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b\xff"}\n' * 2)
    return config_of(folder, tmp_path)


def test_a_line_that_is_not_utf8_is_named(undecodable):
    with pytest.raises(RecordError, match=r"line 2: is not UTF-8 text .* undecodable="):
        list(open_corpus(undecodable).train)


@pytest.mark.parametrize(
    ("choice", "texts"), [("replace", {"a", "b\ufffd"}), ("skip", {"a"})]
)
def test_a_line_that_is_not_utf8_is_replaced_or_skipped(undecodable, choice, texts):
    corpus = open_corpus(dataclasses.replace(undecodable, undecodable=choice))

    assert {*corpus.train, *corpus.validation} == texts


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_columns_that_are_not_utf8_are_named(tmp_path, suffix):
    ends, text = (pa.py_buffer(x) for x in (b"\0\0\0\0\1\0\0\0\2\0\0\0", b"a\xff"))
    path = tmp_path / "set" / f"a.{suffix}"
    write(path, pa.Array.from_buffers(pa.string(), 2, [None, ends, text]))
    corpus = open_corpus(config_of(path, tmp_path))
    with pytest.raises(RecordError, match=f"a.{suffix} cannot be read: 'utf-8' codec"):
        list(corpus.train)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x\\ud800"}')
    assert JsonLines(path, "text", 100, "refuse", path).texts(0) == ["x?"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no file of .jsonl, .ndjson, .json, .jsonl.gz"),
        ({"a.csv": b"x"}, ", only .csv"),
        ({"test.jsonl": b'{"text": "x"}'}, "no rows to train on, only the splits ['te"),
        (
            {"a.jsonl": b'\n{"body": 1}'},
            "a.jsonl, line 2: has no field 'text'; its fiel",
        ),
        ({"a.json.gz": b"x"}, "a.json.gz cannot be unpacked"),
        (
            {"a.json.gz": gzip.compress(b"")[:10] + b"\xff"},
            "a.json.gz cannot be unpacked",
        ),
        ({"a.parquet": b"x" * 99}, "a.parquet cannot be read"),
        ({"a.arrow": b"x" * 99}, "a.arrow cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(tmp_path, files, message):
    folder = tmp_path / "set"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(RecordError, match=re.escape(message)):
        open_corpus(config_of(folder, tmp_path))
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_missing_or_wrong_column_is_refused(tmp_path, suffix):
    path = tmp_path / "set" / f"a.{suffix}"
    write(path, TEXTS[:9], field="body")
    with pytest.raises(RecordError, match=r"no field 'text'; its .* \['body', 'id'\]"):
        open_corpus(config_of(path, tmp_path))
    with pytest.raises(RecordError, match="field 'id' is of type int64, not text"):
        open_corpus(config_of(path, tmp_path, text_field="id"))


def test_a_gz_is_unpacked_once_and_named_in_errors(tmp_path):
    path = tmp_path / "set" / "a.json.gz"
    write(path, TEXTS[:9])
    first = open_corpus(config_of(path, tmp_path))
    assert open_corpus(config_of(path, tmp_path)).fingerprint == first.fingerprint
    (unpacked,) = (tmp_path / "cache" / "unpacked").rglob("*.json")
    assert unpacked.stat().st_mode == path.stat().st_mode

    with pytest.raises(RecordError, match=r"a.json.gz, line 1: has no field 'body'"):
        open_corpus(config_of(path, tmp_path, text_field="body"))


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", TEXTS[:9])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cocodc_jax\[hf\]'"):
        open_corpus(config_of(tmp_path / "a.parquet", tmp_path))


def test_byte_order_marks_of_json_lines_are_passed_over(tmp_path):
    mark = b"\xef\xbb\xbf"
    lines = json_lines(TEXTS)
    (tmp_path / "a.jsonl").write_bytes(lines)
    plain = JsonLines(*_json_file(tmp_path / "a.jsonl"))

    # The second mark begins a file that was appended to the first.
    (tmp_path / "b.jsonl").write_bytes(mark + lines + mark + lines)
    marked = JsonLines(*_json_file(tmp_path / "b.jsonl"))

    texts = [t for i in range(plain.num_chunks) for t in plain.texts(i)]
    assert [t for i in range(marked.num_chunks) for t in marked.texts(i)] == 2 * texts


def _json_file(path):
    return path, "text", 1000, "refuse", path
