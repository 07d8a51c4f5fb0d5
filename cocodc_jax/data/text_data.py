"""Text for every region of a run: one call from a configuration to token streams."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from cocodc_jax.data.config import DataConfig, cache_dir
from cocodc_jax.data.corpora.documents import Corpus, Documents
from cocodc_jax.data.packing import TokenizedDocuments, count_tokens, pack_sequences
from cocodc_jax.data.partition import region_documents
from cocodc_jax.data.streams import TrainStream, region_batches
from cocodc_jax.data.tokenizers import Tokenizer, load_tokenizer

_EVAL_POOL_TOKENS = 1 << 20
_EVAL_SEED = 0
_BPE_TRAINING_CHARS = 64 << 20


class TextData:
    """A corpus, a tokenizer, and which region reads what.

    Attributes:
      config: the configuration it was made with.
      num_regions: number of regions of the run.
      regions: the regions that this process feeds.
      tokenizer: text to ids and back.
      fingerprint: text that two processes share only if a region's batches are the
        same on both: worth comparing before a run on several hosts.
      num_train_documents: documents to train on, of all regions; of `hf:` sets,
        chunks of them.
      num_train_bytes: their size as stored, in bytes.
    """

    def __init__(
        self,
        config: DataConfig,
        corpus: Corpus,
        tokenizer: Tokenizer,
        num_regions: int,
        regions: Sequence[int],
    ):
        """Deal the documents of an open corpus to regions; `load` opens one.

        Raises:
          ValueError: if `regions` names one that is not there, documents cannot be
            dealt, or a region's documents do not fill one batch.
        """
        if not set(regions) <= set(range(num_regions)):
            raise ValueError(
                f"regions={tuple(regions)} are not all below num_regions={num_regions}"
            )
        self.config = config
        self.num_regions = num_regions
        self.regions = tuple(regions)
        self.tokenizer = tokenizer
        self.fingerprint = _fingerprint(config, corpus, tokenizer, num_regions)
        self.num_train_documents = len(corpus.train)
        self.num_train_bytes = corpus.train.num_bytes
        self._train = TokenizedDocuments(corpus.train, tokenizer)
        self._validation = TokenizedDocuments(corpus.validation, tokenizer)
        self._documents = region_documents(corpus, config.partition, num_regions)
        self._check_size()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding that this data needs."""
        return self.tokenizer.vocab_size

    def train_stream(self) -> TrainStream:
        """Start an endless stream of int32 `[len(regions), B, L + 1]` batches."""
        return TrainStream(
            {region: iter(self._region_batches(region)) for region in self.regions},
            self.fingerprint,
        )

    def eval_tokens(self, num_batches: int) -> np.ndarray:
        """Return validation sequences, the same for every seed, region and method.

        They are a fixed random choice among the sequences of many documents.

        Raises:
          ValueError: if the validation documents do not hold as many.
        """
        batch, length = self.config.batch_per_region, self.config.sequence_length + 1
        needed = num_batches * batch
        sequences = self._validation_sequences(needed, length)
        if len(sequences) < needed:
            raise ValueError(
                f"num_batches={num_batches} of {batch} need {needed} validation "
                f"sequences of {length} tokens, and the corpus has {len(sequences)}; "
                "use fewer or smaller batches, or a larger validation_fraction"
            )
        chosen = np.random.default_rng(_EVAL_SEED).permutation(sequences)[:needed]
        return chosen.reshape(num_batches, batch, length).astype(np.int32)

    def _validation_sequences(self, needed: int, length: int) -> np.ndarray:
        # Many more sequences than needed where there are, so that those chosen come
        # from many documents.
        num_tokens = max(_EVAL_POOL_TOKENS, needed * length)
        documents, count = [], 0
        for index in range(len(self._validation)):
            if count >= num_tokens:
                break
            documents.append(self._validation[index])
            count += len(documents[-1])
        return pack_sequences(documents, length)

    def _region_batches(self, region: int):
        mean_bytes = self.num_train_bytes / self.num_train_documents
        return region_batches(
            self._train,
            self._documents[region],
            self.config,
            window_documents=self.config.shuffle_window_bytes / mean_bytes,
            seed_words=(self.config.seed, region, self.num_regions),
        )

    def _check_size(self) -> None:
        batch, length = self.config.batch_per_region, self.config.sequence_length + 1
        needed = batch * length
        for region, indices in enumerate(self._documents):
            available = count_tokens(self._train, indices, at_least=needed)
            if available < needed:
                raise ValueError(
                    f"dataset={self.config.dataset!r} is too small: region {region} of "
                    f"{self.num_regions} has {available} training tokens, and "
                    f"batch_per_region={batch} sequences of {length} tokens need "
                    f"{needed}"
                )


def load(
    config: DataConfig, num_regions: int, regions: Sequence[int] | None = None
) -> TextData:
    """Open a corpus for a run, preparing it on disk the first time.

    Raises:
      ValueError: if corpus or tokenizer cannot be read, `regions` names one that is
        not there, or a region's documents do not fill one batch.
    """
    # Here, so that a command which is refused does not import TFDS.
    from cocodc_jax.data.corpora.corpus import open_corpus

    corpus = open_corpus(config)
    tokenizer = load_tokenizer(
        config.tokenizer,
        _first_texts(corpus.train, _BPE_TRAINING_CHARS),
        corpus.fingerprint,
        cache_dir(config.data_dir) / "tokenizers",
    )
    local = range(num_regions) if regions is None else regions
    return TextData(config, corpus, tokenizer, num_regions, local)


def _first_texts(documents: Documents, num_chars: int) -> Iterator[str]:
    sizes = itertools.accumulate(map(len, documents), initial=0)
    for text, size_before in zip(documents, sizes, strict=False):
        if size_before >= num_chars:
            return
        yield text


def _fingerprint(
    config: DataConfig, corpus: Corpus, tokenizer: Tokenizer, num_regions: int
) -> str:
    settings = (
        f"length {config.sequence_length}",
        f"batch {config.batch_per_region}",
        f"window {config.shuffle_window_bytes}",
        f"seed {config.seed}",
        f"{config.partition} {num_regions}",
    )
    return ", ".join((corpus.fingerprint, tokenizer.fingerprint, *settings))
