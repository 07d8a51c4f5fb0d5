"""Documents to token arrays, and token arrays to sequences of one length."""

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from cocodc_jax.data.corpora.documents import Documents
from cocodc_jax.data.tokenizers import Tokenizer

_CACHED_TOKENS = 1 << 26


class TokenizedDocuments:
    """Documents as arrays of ids, each ending in the end-of-text token.

    Documents that are only read together, as a chunk, come as one array.

    Up to 2**26 tokens are kept in memory (128 MB, or 256 MB if the vocabulary is above
    65,536), so a corpus like the default one is tokenised once per process, not once
    per epoch, region and method. Of a corpus larger than that, the rest is tokenised
    whenever it is read.

    Attributes:
      dtype: uint16 where every id fits, else int32.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer):
        self._documents = documents
        self._tokenizer = tokenizer
        self.dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        self._cache: dict[int, np.ndarray] = {}
        self._num_cached_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> np.ndarray:
        index = int(index)
        tokens = self._cache.get(index)
        if tokens is None:
            tokens = self._tokenize(self._documents.texts(index))
            self._keep(index, tokens)
        return tokens

    def _tokenize(self, texts: Sequence[str]) -> np.ndarray:
        parts = []
        for text in texts:
            ids = self._tokenizer.encode(text)
            tokens = np.empty(len(ids) + 1, self.dtype)
            tokens[:-1] = ids
            tokens[-1] = self._tokenizer.eos_id
            parts.append(tokens)
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def _keep(self, index: int, tokens: np.ndarray) -> None:
        with self._lock:  # two regions' worker threads may read the same document
            room = _CACHED_TOKENS - self._num_cached_tokens
            if index not in self._cache and len(tokens) <= room:
                self._cache[index] = tokens
                self._num_cached_tokens += len(tokens)


def pack_sequences(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Join documents end to end and cut the result into sequences.

    A sequence may hold the end of one document and the start of the next. What is left
    at the end, fewer than `length` tokens, is dropped.

    >>> pack_sequences([np.array([1, 2, 9]), np.array([3, 4, 5, 9])], length=3)
    array([[1, 2, 9],
           [3, 4, 5]])
    """
    tokens = np.concatenate(documents)
    num_sequences = len(tokens) // length
    return tokens[: num_sequences * length].reshape(num_sequences, length)


def count_tokens(
    documents: TokenizedDocuments, indices: Iterable[int], at_least: int
) -> int:
    """Count the tokens of some documents, stopping once there are enough."""
    count = 0
    for index in indices:
        if count >= at_least:
            break
        count += len(documents[index])
    return count
