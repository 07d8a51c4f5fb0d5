"""The documents of a corpus on disk, with random access; and TFDS sets of them.

An element is one document, or a chunk of documents that are read together.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cocodc_jax._extras import extra

with extra("data"):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import naming, read_only_builder

_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")


class Documents(abc.ABC):
    """The documents of one split; safe to read from several threads."""

    num_bytes: int  # Size of the documents on disk.

    @abc.abstractmethod
    def __len__(self) -> int:
        """Count the elements."""

    @abc.abstractmethod
    def texts(self, index: int) -> list[str]:
        """Return the documents of element `index`."""

    @abc.abstractmethod
    def source_and_bytes(self, index: int) -> tuple[str, int]:
        """Return the source of element `index` and the size of its text in bytes."""

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(map(self.texts, range(len(self))))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus that is on disk."""

    train: Documents
    validation: Documents
    has_sources: bool  # Whether documents name their source.
    fingerprint: str  # Changes with the documents or their split.


class StoredDocuments(Documents):
    """The documents of one split of a TFDS set, read from disk one at a time."""

    # Any: TFDS declares its builders without the types that its decorators hide.
    def __init__(self, builder: Any, split: str, text_feature: str):
        self._records = builder.as_data_source(split=split)
        self._text_feature = text_feature
        whole = builder.info.splits[split.partition("[")[0]]
        share = whole.num_bytes * len(self._records)
        self.num_bytes = share // max(1, whole.num_examples)

    def __len__(self) -> int:
        return len(self._records)

    def texts(self, index: int) -> list[str]:
        """Return the text of document `index`, alone."""
        return [self._records[index][self._text_feature].decode("utf-8", "replace")]

    def source_and_bytes(self, index: int) -> tuple[str, int]:
        """Return the source of document `index` and the size of its text in bytes."""
        record = self._records[index]
        return record["source"].decode(), len(record[self._text_feature])


def open_tfds_set(name: str, data_dir: str, validation_fraction: float) -> Corpus:
    """Open a prepared TFDS set from its files, without its builder's code."""
    builder = _find_prepared(name, data_dir)
    splits = _split_names(name, builder.info.splits, validation_fraction)
    features = dict(builder.info.features)
    text_feature = _text_feature(name, features)
    train, validation = (StoredDocuments(builder, s, text_feature) for s in splits)

    return Corpus(
        train=train,
        validation=validation,
        has_sources="source" in features,
        fingerprint=f"tfds-{builder.info.full_name}-{splits}-{train.num_bytes}",
    )


def _find_prepared(name: str, data_dir: str) -> Any:
    where = f"data_dir={data_dir!r}" if data_dir else "the default data_dir of TFDS"
    how = f"`tfds build {name} --file_format=array_record`"
    try:
        naming.parse_builder_name_kwargs(name)
    except ValueError as error:  # It shows a grammar, over many lines.
        raise ValueError(
            f"dataset='tfds:{name}' is no name of a TFDS set; use "
            "'tfds:name[/config][:version]', with a version such as 1.0.0"
        ) from error

    try:
        builder = read_only_builder.builder_from_files(name, data_dir=data_dir or None)
    except tfds.core.DatasetNotFoundError as error:
        raise ValueError(
            f"dataset='tfds:{name}' is not prepared in {where}; nothing is downloaded "
            f"here: run {how} on a machine with a network, TensorFlow and this folder"
        ) from error

    formats = {format.value for format in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise ValueError(
            f"dataset='tfds:{name}' in {where} is stored as {sorted(formats)}, which "
            f"cannot be read at random; prepare it with {how}"
        )

    return builder


def _split_names(
    name: str, splits: Mapping[str, Any], validation_fraction: float
) -> tuple[str, str]:
    """Return the splits to train and validate on.

    If there is only `train`, its first examples are for validation.
    """
    if "train" not in splits:
        raise ValueError(
            f"dataset='tfds:{name}' has no split 'train', only {sorted(splits)}"
        )
    if held_out := [split for split in _VALIDATION_SPLITS if split in splits]:
        return "train", held_out[0]
    # TFDS stores examples in the order of a hash of their keys, so the first ones are
    # a random sample that stays the same.
    num_held = max(1, round(splits["train"].num_examples * validation_fraction))
    return f"train[{num_held}:]", f"train[:{num_held}]"


def _text_feature(name: str, features: Mapping[str, Any]) -> str:
    texts = [k for k, v in features.items() if isinstance(v, tfds.features.Text)]
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise ValueError(
            f"dataset='tfds:{name}' has no text feature 'text' and not just one other; "
            f"its features are {sorted(features)}"
        )
    return texts[0]
