"""Packing, dealing and counting against a few lines of NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocodc_jax.data.streams import TokenizedDocuments, pack_sequences
from cocodc_jax.data.text_data import deal_sources, region_documents
from cocodc_jax.data.tokenizers import ByteTokenizer


class _Texts:
    """Documents that count their reads."""

    def __init__(self, texts):
        self._texts = texts
        self.num_reads = 0

    def __len__(self):
        return len(self._texts)

    def texts(self, index):
        self.num_reads += 1
        text = self._texts[index]
        return text if isinstance(text, list) else [text]


@given(
    documents=st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1),
    length=st.integers(1, 20),
)
def test_packing_equals_the_oracle(documents, length):
    joined = [token for document in documents for token in document]
    expected = []
    while len(joined) >= length:
        expected.append(joined[:length])
        joined = joined[length:]

    packed = pack_sequences([np.array(d, np.uint16) for d in documents], length)
    assert packed.dtype == np.uint16
    assert packed.shape == (len(expected), length)
    assert packed.tolist() == expected


def test_documents_end_in_end_of_text_and_a_chunk_is_one_array():
    tokens = TokenizedDocuments(_Texts(["ab", ["ab", "", "c"], []]), ByteTokenizer())
    assert tokens[0].tolist() == [97, 98, 256]
    assert tokens[1].tolist() == [97, 98, 256, 256, 99, 256]
    assert [tokens[i].dtype for i in range(3)] == [np.uint16] * 3
    assert tokens[2].shape == (0,)


def test_large_vocabulary_is_not_cut_to_sixteen_bits():
    class Large(ByteTokenizer):
        vocab_size = 100_000
        eos_id = 99_999

    tokens = TokenizedDocuments(_Texts(["a"]), Large())
    assert tokens[0].tolist() == [97, 99_999]


def test_documents_are_tokenised_once_while_there_is_room(monkeypatch):
    monkeypatch.setattr("cocodc_jax.data.streams._CACHED_TOKENS", 7)
    texts = _Texts(["abc", "de", "fgh"])
    tokens = TokenizedDocuments(texts, ByteTokenizer())
    for _ in range(3):
        assert [len(tokens[i]) for i in range(3)] == [4, 3, 4]
    assert texts.num_reads == 1 + 1 + 3


def test_reading_stops_when_there_are_enough():
    texts = _Texts(["abc", "de", "fgh"])
    tokens = TokenizedDocuments(texts, ByteTokenizer())
    assert [len(x) for x in tokens.first([0, 1, 2], 5)] == [4, 3]
    assert texts.num_reads == 2
    assert [len(x) for x in tokens.first([0, 1, 2], 100)] == [4, 3, 4]


@given(
    sizes=st.dictionaries(st.text(min_size=1), st.integers(0, 1000), min_size=1),
    num_regions=st.integers(1, 6),
)
def test_sources_are_dealt_once_and_evenly(sizes, num_regions):
    if len(sizes) < num_regions:
        with pytest.raises(ValueError, match=f"num_regions={num_regions} regions"):
            deal_sources(sizes, num_regions)
        return

    dealt = deal_sources(sizes, num_regions)
    assert sorted(name for names in dealt for name in names) == sorted(sizes)
    assert all(dealt)

    # The greedy rule: no region exceeds another by more than a source.
    loads = [sum(sizes[name] for name in names) for names in dealt]
    assert max(loads) - min(loads) <= max(sizes.values())

    again = deal_sources(dict(reversed(sizes.items())), num_regions)
    assert dealt == again


def test_too_few_sources_are_listed():
    message = "needs a source for each of num_regions=3 regions, and the corpus has 2"
    with pytest.raises(ValueError, match=f"{message}: a, b"):
        deal_sources({"b": 1, "a": 2}, num_regions=3)


def test_partition_by_source_needs_sources():
    corpus = type("Corpus", (), {"train": _Texts(["a"]), "has_sources": False})
    with pytest.raises(ValueError, match="needs documents with a feature 'source'"):
        region_documents(corpus, "source", 1)
