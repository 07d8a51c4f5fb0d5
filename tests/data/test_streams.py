"""Streams: disjoint, deterministic, well mixed, endless, and exactly resumable."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest

from cocodc_jax.data import DataConfig, load
from cocodc_jax.data.corpora.corpus import open_corpus
from cocodc_jax.data.corpora.row_files import RecordError

LENGTH = 15
BATCH = 4


@pytest.fixture(scope="module")
def config(text_folder, data_dir):
    # A window of 1 KiB is a few documents, so streams cross many windows and epochs.
    return DataConfig(
        dataset=f"text:{text_folder}",
        data_dir=data_dir,
        sequence_length=LENGTH,
        batch_per_region=BATCH,
        shuffle_window_bytes=1024,
        validation_fraction=0.2,
    )


def _take(stream, count):
    return np.stack(list(itertools.islice(stream, count)))


def _owners(sequence, documents):
    """Documents that hold the longest piece of a sequence without end of text."""
    pieces = bytes(np.where(sequence < 256, sequence, 0).astype(np.uint8)).split(b"\0")
    piece = max(pieces, key=len)
    return [i for i, document in enumerate(documents) if piece in document]


def test_an_epoch_of_one_window_is_every_sequence_once(config):
    config = dataclasses.replace(config, shuffle_window_bytes=1 << 30)
    data = load(config, num_regions=1)
    train = open_corpus(config).train

    num_documents = len(train)
    num_tokens = sum(len(t.encode()) + 1 for t in train)
    num_sequences = num_tokens // (LENGTH + 1)

    batches = _take(data.train_stream(), -(-2 * num_sequences // BATCH))
    sequences = batches.reshape(-1, LENGTH + 1)
    epochs = sequences[:num_sequences], sequences[num_sequences : 2 * num_sequences]

    for epoch in epochs:
        # Every training document is there in full, but for tokens that packing drops.
        _, counts = np.unique(epoch, return_counts=True)
        assert counts.sum() == num_sequences * (LENGTH + 1)
        ends = (epoch == 256).sum()
        assert num_documents - 1 <= ends <= num_documents

    assert not np.array_equal(*epochs)


@pytest.mark.parametrize("partition", ["iid", "source"])
def test_regions_and_validation_are_disjoint(config, text_folder, partition):
    config = dataclasses.replace(config, partition=partition)
    num_regions = 3
    data = load(config, num_regions)
    texts = [path.read_bytes() for path in sorted(text_folder.rglob("*.txt"))]
    batches = _take(data.train_stream(), 120)

    seen = [set() for _ in range(num_regions + 1)]
    groups = [batches[:, region] for region in range(num_regions)]
    groups.append(data.eval_tokens(12))

    for group, sequences in enumerate(groups):
        for sequence in sequences.reshape(-1, LENGTH + 1):
            owners = _owners(sequence, texts)
            assert owners
            if len(owners) == 1:  # A short piece may be in several documents.
                seen[group].add(owners[0])

    for one, other in itertools.combinations(seen, 2):
        assert not one & other
    # Two epochs or more were read: nearly every document has been met.
    assert len(set.union(*seen)) >= 0.9 * len(texts)

    if partition == "source":
        folders = [{owner // 5 for owner in owners} for owners in seen[:num_regions]]
        for one, other in itertools.combinations(folders, 2):
            assert not one & other
        assert set.union(*folders) == set(range(12))


def test_a_region_reads_the_same_on_any_process(config):
    data = load(config, num_regions=3)
    every = _take(data.train_stream(), 40)
    assert every.shape == (40, 3, BATCH, LENGTH + 1)
    assert every.dtype == np.int32
    assert data.tokenizer.vocab_size == 272
    assert 0 <= every.min() < every.max() <= 256

    for region in range(3):
        alone = _take(load(config, 3, regions=[region]).train_stream(), 40)
        np.testing.assert_array_equal(alone[:, 0], every[:, region])

    swapped = _take(load(config, 3, regions=[2, 0]).train_stream(), 40)
    np.testing.assert_array_equal(swapped, every[:, [2, 0]])


def test_the_seed_changes_the_documents_that_share_a_window(config):
    texts = [text.encode() for text in open_corpus(config).train]
    first = set()
    for seed in range(6):
        stream = load(dataclasses.replace(config, seed=seed), 1).train_stream()
        for sequence in next(stream).reshape(-1, LENGTH + 1):
            first.update(_owners(sequence, texts)[:1])
    # A window is two or three documents, and all of a batch come from one window.
    assert len(first) >= 6


@pytest.mark.parametrize("num_read", [0, 1, 7, 60])
def test_restored_stream_goes_on_bit_for_bit(config, num_read):
    stream = load(config, 2).train_stream()
    for _ in range(num_read):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    expected = _take(stream, 70)

    fresh = load(config, 2).train_stream()
    fresh.set_state(state)
    assert fresh.get_state() == state
    np.testing.assert_array_equal(_take(fresh, 70), expected)

    stream.set_state(state)  # and back, on a stream that has gone further
    np.testing.assert_array_equal(_take(stream, 70), expected)


def test_every_state_of_an_epoch_can_be_restored(config):
    stream, fresh = (load(config, 1).train_stream() for _ in range(2))
    for _ in range(80):
        state = stream.get_state()
        fresh.set_state(state)
        np.testing.assert_array_equal(next(fresh), next(stream))


def test_a_process_restores_its_part_of_a_state(config):
    stream = load(config, 3).train_stream()
    _take(stream, 9)
    state = stream.get_state()
    expected = next(stream)
    part = load(config, 3, regions=[1]).train_stream()
    part.set_state(state)
    np.testing.assert_array_equal(next(part), expected[[1]])


@pytest.mark.parametrize(
    ("change", "num_regions"),
    [
        ({"seed": 5}, 2),
        ({"sequence_length": 14}, 2),
        ({"validation_fraction": 0.4}, 2),
        ({"tokenizer": "bpe:300"}, 2),
        ({}, 3),
    ],
)
def test_state_of_other_data_is_refused(config, change, num_regions):
    state = load(config, 2).train_stream().get_state()
    stream = load(dataclasses.replace(config, **change), num_regions).train_stream()

    with pytest.raises(ValueError, match="the state is of the data"):
        stream.set_state(state)


def test_state_without_a_region_is_refused(config):
    state = load(config, 3, regions=[0, 1]).train_stream().get_state()
    stream = load(config, 3).train_stream()
    with pytest.raises(ValueError, match=r"no entry for regions \[2\]"):
        stream.set_state(state)


def test_closed_stream_yields_no_more(config):
    stream = load(config, 1).train_stream()
    next(stream)
    stream.close()
    # The rest of the present window may still come, but no other window.
    with pytest.raises(ValueError, match="closed"):
        _take(stream, 100)


def test_a_window_too_small_for_a_sequence_is_passed_over(config, tmp_path):
    for index in range(40):
        # Windows are counted in documents: most hold a few bytes, some much.
        text = f"{index} " * (600 if index % 10 == 0 else 1)
        (tmp_path / f"{index}.txt").write_text(text)
    config = dataclasses.replace(config, dataset=f"text:{tmp_path}")
    assert _take(load(config, 1).train_stream(), 300).shape[0] == 300


def test_windows_that_are_all_too_small_are_refused(config, tmp_path):
    for source, text, count in (("books", "word " * 2000, 8), ("notes", "n", 80)):
        (tmp_path / source).mkdir()
        for index in range(count):
            (tmp_path / source / f"{index}.txt").write_text(f"{index} {text}")

    config = dataclasses.replace(config, dataset=f"text:{tmp_path}", partition="source")
    stream = load(config, 2, regions=[1]).train_stream()
    with pytest.raises(
        RecordError,
        match="shuffle_window_bytes=1024 makes windows of 2 documents, .* shorter than "
        "a sequence of 16 tokens; use more",
    ):
        next(stream)


@pytest.mark.parametrize(
    ("change", "num_regions", "regions", "num_batches"),
    [
        ({}, 4, [3], 3),
        ({"seed": 9, "partition": "source"}, 3, None, 3),
        ({"batch_per_region": BATCH // 2}, 1, None, 6),
    ],
)
def test_eval_tokens_are_always_the_same(
    config, change, num_regions, regions, num_batches
):
    tokens = load(config, 2).eval_tokens(3)
    other = load(dataclasses.replace(config, **change), num_regions, regions=regions)

    same = other.eval_tokens(num_batches).reshape(tokens.shape)

    np.testing.assert_array_equal(same, tokens)


def test_eval_tokens_are_of_validation(config):
    tokens = load(config, 2).eval_tokens(3)
    assert tokens.shape == (3, BATCH, LENGTH + 1)
    assert tokens.dtype == np.int32

    validation = [text.encode() for text in open_corpus(config).validation]
    for sequence in tokens.reshape(-1, LENGTH + 1):
        assert _owners(sequence, validation)


def test_too_small_a_corpus_states_both_counts(tmp_path):
    for index in range(6):
        (tmp_path / f"{index}.txt").write_text(f"document {index}\n")
    config = DataConfig(f"text:{tmp_path}", str(tmp_path / "data"), sequence_length=32)

    with pytest.raises(
        ValueError,
        match=r"is too small: region 0 of 2 has \d+ training tokens, and "
        r"batch_per_region=8 sequences of 33 tokens need 264",
    ):
        load(config, num_regions=2)


@pytest.mark.parametrize(
    ("changes", "num_regions", "regions", "message"),
    [
        ({}, 2, None, r"num_batches=10000 of 4 need 40000 .* the corpus has \d+;"),
        ({}, 2, [2], r"regions=\(2,\) are not all below num_reg"),
        ({"batch_per_region": 1}, 100, None, "region 4. of 100 has 0 training tokens"),
    ],
)
def test_more_batches_or_regions_than_the_corpus_has_are_refused(
    config, changes, num_regions, regions, message
):
    config = dataclasses.replace(config, **changes)
    with pytest.raises(ValueError, match=message):
        load(config, num_regions, regions).eval_tokens(10_000)


def test_a_stream_with_a_trained_tokenizer_decodes_to_the_corpus(config):
    config = dataclasses.replace(config, tokenizer="bpe:300")
    data = load(config, 2)
    text = data.tokenizer.decode(next(data.train_stream())[0, 0])
    assert any(text[:8] in document for document in open_corpus(config).train)
    kept = list(pathlib.Path(config.data_dir, "tokenizers").glob("bpe-300-*.json"))
    assert kept


def test_the_standard_library_is_a_corpus(tmp_path):
    config = DataConfig(data_dir=str(tmp_path))
    data = load(config, num_regions=4)
    sequences = data.eval_tokens(num_batches=4)
    assert b"self" in sequences[sequences < 256].astype(np.uint8).tobytes()

    corpus = open_corpus(config)
    texts = [text.encode() for text in corpus.train]
    assert len(texts) > 500
    assert corpus.train.num_bytes > 5_000_000

    sources = {corpus.train.source_and_bytes(i)[0] for i in range(len(texts))}
    assert {"asyncio", "json", "argparse"} <= sources

    assert not {"site-packages", "__pycache__"} & sources
    # Sequences of a batch are of different documents, as far as their text shows it.
    distinct = []
    for batch in next(data.train_stream()):
        owners = [_owners(sequence, texts) for sequence in batch]
        known = [owner[0] for owner in owners if len(owner) == 1]
        distinct.append(len(set(known)) / len(known))

    assert np.mean(distinct) >= 0.75
