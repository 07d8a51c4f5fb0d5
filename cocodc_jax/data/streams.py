"""Endless streams of training batches, one per region, that can stop and continue.

A region's documents are put in a new random order each epoch and cut into windows of
about `shuffle_window_bytes` of text. The documents of a window, one Grain element, are
read, tokenised, joined and cut into sequences. These are shuffled, so that the
sequences of a batch come from many documents. Unlike a shuffle buffer, a window is a
pure function of (seed, region, index), so Grain can make windows in worker threads, and
the state of a stream is two integers per region.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from cocodc_jax._extras import later
from cocodc_jax.data.config import DataConfig
from cocodc_jax.data.corpora.row_files import RecordError
from cocodc_jax.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    import grain

    from cocodc_jax.data.corpora.documents import Documents
else:
    grain = later("grain", "data")

_CACHED_TOKENS = 1 << 26
# Windows one after another without a sequence, at least; cheap where a region has few.
_LEAST_EMPTY = 1000


class TokenizedDocuments:
    """Documents, or chunks of them, as arrays of ids that end in end-of-text tokens.

    Up to 2**26 tokens are kept in memory (128 MB, or 256 MB if the vocabulary is above
    65,536). Other documents are tokenised again whenever they are read.
    """

    def __init__(self, documents: "Documents", tokenizer: Tokenizer):
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
            parts = [np.empty(0, self.dtype)]
            for text in self._documents.texts(index):
                ids = self._tokenizer.encode(text)
                parts.append(np.append(ids, self._tokenizer.eos_id).astype(self.dtype))

            tokens = np.concatenate(parts)
            with self._lock:  # two regions' worker threads may read the same document
                room = _CACHED_TOKENS - self._num_cached_tokens
                if index not in self._cache and len(tokens) <= room:
                    self._cache[index] = tokens
                    self._num_cached_tokens += len(tokens)

        return tokens

    def first(self, indices: Iterable[int], num_tokens: int) -> list[np.ndarray]:
        """Return documents until they have so many tokens, or all."""
        documents = []
        count = 0
        for index in indices:
            if count >= num_tokens:
                break
            documents.append(self[index])
            count += len(documents[-1])
        return documents


def pack_sequences(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Join documents end to end and cut the result into sequences, dropping the rest.

    >>> pack_sequences([np.array([1, 2, 9]), np.array([3, 4, 5, 9])], length=3)
    array([[1, 2, 9],
           [3, 4, 5]])
    """
    tokens = np.concatenate(documents)
    num_sequences = len(tokens) // length
    return tokens[: num_sequences * length].reshape(num_sequences, length)


class Stream(Protocol):
    """An endless iterator over batches that can stop and continue.

    `cc.train` and runs read from one. `TrainStream` is a stream of text; any other can
    take its place if the loss takes its batches.
    """

    def __iter__(self) -> Iterator[Any]:
        """Return the stream itself: iterating twice continues."""
        ...

    def __next__(self) -> Any:
        """Return the batch of one inner step.

        Returns:
          A tree of host arrays with leaves `[R_local, B, ...]`, R_local the regions
          that this process feeds, in their order. Shapes and dtypes never change.
        """
        ...

    def get_state(self) -> dict[str, Any]:
        """Return the position in the stream, for a checkpoint.

        Returns:
          Values that JSON can hold. The position is after the last batch that
          `__next__` returned, however many batches are prepared ahead.
        """
        ...

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a position; the next batch is the one that followed it.

        Args:
          state: what `get_state` returned, in this or an earlier process.

        Raises:
          ValueError: if the state is of other data, sizes or regions.
        """
        ...

    def close(self) -> None:
        """Stop preparing batches ahead; the stream is not read again."""
        ...


class TrainStream:
    """Iterator over the batches of some regions, int32 `[R_local, B, L + 1]`.

    It is a `Stream`. The batches of a region depend on the corpus, the tokenizer, the
    seed, the region and the number of regions, not on which process reads them or on
    thread timing.
    """

    def __init__(self, iterators: Mapping[int, Any], fingerprint: str):
        self._iterators = iterators
        self._fingerprint = fingerprint

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> np.ndarray:
        batches = [next(iterator) for iterator in self._iterators.values()]
        return np.stack(batches, dtype=np.int32)

    def get_state(self) -> dict[str, Any]:
        """Return the position in the stream, as a dictionary that JSON can hold."""
        regions = {str(r): it.get_state() for r, it in self._iterators.items()}
        return {"fingerprint": self._fingerprint, "regions": regions}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to the position of `state`; the next batch is then the same."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the state is of the data {state['fingerprint']!r}, but this stream "
                f"reads {self._fingerprint!r}; use the same data, tokenizer, seed, "
                "sizes and number of regions"
            )

        missing = [r for r in self._iterators if str(r) not in state["regions"]]
        if missing:
            raise ValueError(f"the state has no entry for regions {missing}")

        for region, iterator in self._iterators.items():
            iterator.set_state(state["regions"][str(region)])

    def close(self) -> None:
        """Stop the worker threads, without making further windows."""
        for iterator in self._iterators.values():
            iterator.close()


def cut_to_sizes(
    batches: Iterator[np.ndarray], sizes: Sequence[int], full: int
) -> Iterator[np.ndarray]:
    """Return batches of regions, each cut to its region's own size.

    Shapes stay the same: a smaller batch is repeated, which does not change the mean of
    its losses and gradients.
    """
    if set(sizes) == {full}:
        return batches

    rows = np.stack([np.tile(np.arange(n), full // n) for n in sizes])
    which = np.arange(len(sizes))[:, None]
    return (batch[which, rows] for batch in batches)


def region_batches(
    tokens: TokenizedDocuments,
    indices: Sequence[int],
    config: DataConfig,
    window_documents: float,
    seed_words: tuple[int, ...],
) -> "grain.DatasetIterator":
    """Start one region's endless pipeline."""
    # Grain adds the epoch to a seed; hashing keeps neighbours out of other epochs.
    order_seed, sequence_seed = np.random.SeedSequence(seed_words).generate_state(2)
    # Documents per window such that the windows of an epoch are about equal.
    size = -(-len(indices) // max(1, round(len(indices) / window_documents)))
    most_empty = max(-(-len(indices) // size), _LEAST_EMPTY)
    # The sizes of the windows since the last sequence, made by any thread.
    empty: list[int] = []

    def make_window(chosen: list[int], rng: np.random.Generator) -> np.ndarray | None:
        documents = [tokens[index] for index in chosen]
        sequences = pack_sequences(documents, config.sequence_length + 1)
        if len(sequences):
            empty.clear()
            return rng.permutation(sequences)

        empty.append(len(chosen))
        if len(empty) > most_empty:
            raise RecordError(
                f"shuffle_window_bytes={config.shuffle_window_bytes} makes windows of "
                f"{size} documents, and {len(empty)} of them, one after another, were "
                f"all shorter than a sequence of {config.sequence_length + 1} tokens; "
                "use more, or a smaller sequence_length"
            )

        # Grain passes over None; a window too small for one sequence is no element.
        return None

    windows = (
        grain.MapDataset.source(indices)
        .shuffle(seed=int(order_seed))
        .batch(size, batch_fn=list)
        .random_map(make_window, seed=int(sequence_seed))
        .repeat()
    )

    threads = grain.ReadOptions(
        num_threads=config.loader_threads, prefetch_buffer_size=config.loader_threads
    )
    sequences = windows.to_iter_dataset(threads)
    batch = config.batch_per_region

    return iter(grain.experimental.RebatchIterDataset(sequences, batch))
