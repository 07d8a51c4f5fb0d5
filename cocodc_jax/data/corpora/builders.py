"""TFDS builders over text files: the standard library's source, and any folder.

Documents are split into train and validation by a hash of their text: a document never
changes sides as others come and go, and equal documents are on the same side. TFDS
stores the examples of a split in the order of a hash of their keys, so neighbours in
storage come from unrelated files.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.data.corpora import files as corpus_files

with extra("data"):
    import tensorflow_datasets as tfds


@dataclasses.dataclass(kw_only=True)
class CorpusConfig(tfds.core.BuilderConfig):
    """What a corpus is built from.

    Attributes:
      files: the files to read.
      validation_fraction: share of documents held out, in (0, 0.5].
      undecodable: what becomes of files that are not UTF-8, see `DataConfig`.
    """

    files: tuple[corpus_files.CorpusFile, ...]
    validation_fraction: float
    undecodable: str


class TextCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Documents with their text and source, in splits `train` and `validation`."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS 4.9.10 finds this path with `importlib_resources`, a backport that it does
    # not install on Python 3.9 and up; giving the path here avoids the import.
    code_path = pathlib.Path(__file__)  # pyright: ignore
    max_document_chars: int | None = None

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": text(), "source": text()}),
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # everything is on disk already
        named = [
            (d.key, d.source, corpus_files.content_hash(d.text))
            for d in self._documents()
        ]
        threshold = split_threshold((content for *_, content in named), self._config)
        metadata = self.info.metadata
        assert metadata is not None  # set in _info
        metadata["content"] = _corpus_digest(named, threshold)
        return {
            "train": self._generate_examples(threshold, is_validation=False),
            "validation": self._generate_examples(threshold, is_validation=True),
        }

    def _generate_examples(self, threshold: float, is_validation: bool):
        for document in self._documents():
            if (corpus_files.content_hash(document.text) <= threshold) == is_validation:
                example = {"text": document.text, "source": document.source}
                yield document.key, example

    def _documents(self) -> Iterator[corpus_files.Document]:
        return corpus_files.read_documents(
            self._config.files, self.max_document_chars, self._config.undecodable
        )

    @property
    def _config(self) -> CorpusConfig:
        if not isinstance(self.builder_config, CorpusConfig):
            raise ValueError(
                f"{self.name} is built from a CorpusConfig; pass one as config="
            )
        return self.builder_config


class StdlibSource(TextCorpus):
    """The Python standard library's own source, one document per file."""


class TextFiles(TextCorpus):
    """Any text files; long ones become several documents."""

    max_document_chars = corpus_files.TEXT_DOCUMENT_CHARS


def split_threshold(hashes: Iterable[float], config: CorpusConfig) -> float:
    """Return the largest hash that makes a document a validation document.

    Raises:
      ValueError: if there are not two different documents.
    """
    distinct = np.unique(np.fromiter(hashes, np.float64))
    if len(distinct) < 2:
        held = "one document" if len(distinct) else "no readable UTF-8 text"
        raise ValueError(
            f"{_common_folder(config.files)} holds {held}; at least two different "
            "documents are needed, one to train on and one to validate on"
        )
    return float(np.clip(config.validation_fraction, distinct[0], distinct[-2]))


def _corpus_digest(named: list[tuple[str, str, float]], threshold: float) -> str:
    """Digest keys, sources and texts: a key decides where its document is stored."""
    digest = hashlib.sha256(repr(threshold).encode())
    for entry in sorted(named):
        digest.update(repr(entry).encode())
    return digest.hexdigest()[:16]


def _common_folder(files: Sequence[corpus_files.CorpusFile]) -> pathlib.Path:
    if len(files) == 1:
        return files[0].path
    shared = set.intersection(*(set(file.path.parents) for file in files))
    return max(shared, key=lambda path: len(path.parts))
