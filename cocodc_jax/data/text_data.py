"""Text for every region of a run: one call from a configuration to token streams.

Each region reads its own training documents. `partition=iid` assigns documents to
regions in turn; they are stored in the order of a hash, so every region gets a random
sample. `source` assigns all documents of a source to one region, the largest source
first, each to the region that has the fewest bytes so far (the longest-processing-time
rule; Graham, 1969).
"""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cocodc_jax.data.config import DataConfig
from cocodc_jax.data.streams import (
    TokenizedDocuments,
    TrainStream,
    pack_sequences,
    region_batches,
)
from cocodc_jax.data.tokenizers import Tokenizer, load_tokenizer
from cocodc_jax.paths import cache_dir

if TYPE_CHECKING:  # A command that is refused does not import TFDS.
    from cocodc_jax.data.corpora.documents import Corpus, Documents

_EVAL_POOL_TOKENS = 1 << 20
_EVAL_SEED = 0
_BPE_TRAINING_CHARS = 64 << 20


class TextData:
    """A corpus, a tokenizer, and which region reads what.

    Attributes:
      config: the configuration it was made with.
      tokenizer: text to ids and back.
      num_regions: number of regions of the run.
      regions: the regions that this process feeds.
      fingerprint: two processes share it only if a region's batches are equal on both.
    """

    def __init__(
        self,
        config: DataConfig,
        corpus: "Corpus",
        tokenizer: Tokenizer,
        num_regions: int,
        regions: Sequence[int],
    ):
        """Assign the documents of an open corpus to regions; `load` opens one."""
        if not set(regions) <= set(range(num_regions)):
            raise ValueError(
                f"regions={tuple(regions)} are not all below num_regions={num_regions}"
            )

        self.config = config
        self.tokenizer = tokenizer
        self.num_regions = num_regions
        self.regions = tuple(regions)
        self.fingerprint = (
            f"{corpus.fingerprint}, {tokenizer.fingerprint}, length "
            f"{config.sequence_length}, batch {config.batch_per_region}, window "
            f"{config.shuffle_window_bytes}, seed {config.seed}, {config.partition} "
            f"{num_regions}"
        )

        self._mean_bytes = corpus.train.num_bytes / len(corpus.train)
        self._train = TokenizedDocuments(corpus.train, tokenizer)
        self._validation = TokenizedDocuments(corpus.validation, tokenizer)
        self._documents = region_documents(corpus, config.partition, num_regions)

        batch = config.batch_per_region
        length = config.sequence_length + 1
        needed = batch * length
        for region, indices in enumerate(self._documents):
            available = sum(map(len, self._train.first(indices, needed)))
            if available < needed:
                raise ValueError(
                    f"dataset={config.dataset!r} is too small: region {region} of "
                    f"{num_regions} has {available} training tokens, and "
                    f"batch_per_region={batch} sequences of {length} tokens need "
                    f"{needed}"
                )

    def train_stream(self) -> TrainStream:
        """Start an endless stream of int32 `[len(regions), B, L + 1]` batches."""
        window_documents = self.config.shuffle_window_bytes / self._mean_bytes
        iterators = {
            region: region_batches(
                tokens=self._train,
                indices=self._documents[region],
                config=self.config,
                window_documents=window_documents,
                seed_words=(self.config.seed, region, self.num_regions),
            )
            for region in self.regions
        }

        return TrainStream(iterators, self.fingerprint)

    def eval_tokens(self, num_batches: int) -> np.ndarray:
        """Return validation sequences, the same for every seed, region and method."""
        batch = self.config.batch_per_region
        length = self.config.sequence_length + 1
        needed = num_batches * batch
        # More sequences than needed, if possible, so that the chosen ones come from
        # many documents.
        num_tokens = max(_EVAL_POOL_TOKENS, needed * length)
        pool = self._validation.first(range(len(self._validation)), num_tokens)
        sequences = pack_sequences(pool, length)
        if len(sequences) < needed:
            raise ValueError(
                f"num_batches={num_batches} of {batch} need {needed} validation "
                f"sequences of {length} tokens, and the corpus has {len(sequences)}; "
                "use fewer or smaller batches, or a larger validation_fraction"
            )

        chosen = np.random.default_rng(_EVAL_SEED).permutation(sequences)[:needed]
        return chosen.reshape(num_batches, batch, length).astype(np.int32)


def load(
    config: DataConfig, num_regions: int, regions: Sequence[int] | None = None
) -> TextData:
    """Open a corpus for a run, preparing it on disk the first time.

    Raises:
      ValueError: if corpus or tokenizer cannot be read, `regions` names one that is
        not there, or a region's documents do not fill one batch.
    """
    from cocodc_jax.data.corpora.corpus import open_corpus

    corpus = open_corpus(config)
    tokenizer = load_tokenizer(
        config.tokenizer,
        _first_texts(corpus.train),
        corpus.fingerprint,
        cache_dir(config.data_dir) / "tokenizers",
    )

    regions = range(num_regions) if regions is None else regions
    return TextData(
        config=config,
        corpus=corpus,
        tokenizer=tokenizer,
        num_regions=num_regions,
        regions=regions,
    )


def region_documents(
    corpus: "Corpus", partition: str, num_regions: int
) -> list[Sequence[int]]:
    """Assign the training documents to regions."""
    if partition == "iid":
        return [range(r, len(corpus.train), num_regions) for r in range(num_regions)]
    if not corpus.has_sources:
        raise ValueError(
            "partition='source' needs documents with a feature 'source', which this "
            "TFDS set lacks; use partition='iid'"
        )

    members = collections.defaultdict(list)
    sizes = collections.Counter()
    for index in range(len(corpus.train)):
        source, num_bytes = corpus.train.source_and_bytes(index)
        members[source].append(index)
        sizes[source] += num_bytes

    return [
        sorted(index for source in sources for index in members[source])
        for sources in deal_sources(sizes, num_regions)
    ]


def deal_sources(sizes: Mapping[str, int], num_regions: int) -> list[list[str]]:
    """Assign sources to regions, balanced by size.

    >>> deal_sources({"a": 5, "b": 3, "c": 3, "d": 1}, num_regions=2)
    [['a', 'd'], ['b', 'c']]
    """
    if len(sizes) < num_regions:
        raise ValueError(
            f"partition='source' needs a source for each of num_regions={num_regions} "
            f"regions, and the corpus has {len(sizes)}: {', '.join(sorted(sizes))}"
        )

    dealt: list[list[str]] = [[] for _ in range(num_regions)]
    loads = [0] * num_regions
    for source in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # A region without a source comes first even where sizes are zero.
        region = min(range(num_regions), key=lambda r: (loads[r], len(dealt[r]), r))
        dealt[region].append(source)
        loads[region] += sizes[source]

    return dealt


def _first_texts(documents: "Documents") -> Iterator[str]:
    sizes = itertools.accumulate(map(len, documents), initial=0)
    for text, size_before in zip(documents, sizes, strict=False):
        if size_before >= _BPE_TRAINING_CHARS:
            return
        yield text
