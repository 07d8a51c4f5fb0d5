"""The documents of a corpus on disk, with random access.

An element is one document, or a chunk of those that are only read together.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from cocodc_jax._extras import later

if TYPE_CHECKING:
    import tensorflow_datasets as tfds
else:
    tfds = later("tensorflow_datasets", "data")


class Documents(Protocol):
    """The documents of one split; safe to read from several threads."""

    @property
    def num_bytes(self) -> int:
        """Size of the documents on disk, in bytes."""
        ...

    def __len__(self) -> int:
        """Count the elements."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Go through the documents, one by one."""
        ...

    def texts(self, index: int) -> list[str]:
        """Return the documents of element `index`."""
        ...

    def source_and_bytes(self, index: int) -> tuple[str, int]:
        """Return the source of element `index` and the size of its text in bytes."""
        ...


@dataclasses.dataclass(frozen=True)
class StoredDocuments:
    """The documents of one split of a TFDS set, read from disk one at a time.

    Attributes:
      records: random-access source of examples, safe to read from several threads.
      text_feature: name of the feature that holds the text.
      num_bytes: size of the examples on disk, in bytes.
    """

    records: Any
    text_feature: str
    num_bytes: int

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[str]:
        return (self.text(index) for index in range(len(self)))

    def text(self, index: int) -> str:
        """Return the text of document `index`."""
        return self.records[index][self.text_feature].decode("utf-8", "replace")

    def texts(self, index: int) -> list[str]:
        """Return the text of document `index`, alone."""
        return [self.text(index)]

    def source_and_bytes(self, index: int) -> tuple[str, int]:
        """Return the source of document `index` and the size of its text in bytes."""
        record = self.records[index]
        return record["source"].decode(), len(record[self.text_feature])


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus that is on disk.

    Attributes:
      train: documents to train on.
      validation: documents held out.
      has_sources: whether documents name their source.
      fingerprint: short text that changes with the documents or their split.
    """

    train: Documents
    validation: Documents
    has_sources: bool
    fingerprint: str


def read_split(
    builder: "tfds.core.DatasetBuilder", split: str, text_feature: str
) -> StoredDocuments:
    """Open one split of a prepared TFDS set."""
    # Any: TFDS declares these without the types that its decorators hide.
    untyped: Any = builder
    records = untyped.as_data_source(split=split)
    whole = untyped.info.splits[split.partition("[")[0]]
    num_bytes = whole.num_bytes * len(records) // max(1, whole.num_examples)
    return StoredDocuments(records, text_feature, num_bytes)
