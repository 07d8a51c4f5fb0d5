"""Open a corpus by name; text files are first written to disk by a TFDS builder.

A hash of its text decides whether a document is for training or for validation. So
equal documents are in the same split, and none changes its split if others are added or
removed.

Prepared data are ArrayRecord files in `data_dir/BUILDER/FINGERPRINT/VERSION`. If a
source file changes, they are prepared anew. A process renames a temporary folder into
place, which is atomic: other processes find no data or complete data.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.buckets import fetched, is_in_bucket
from cocodc_jax.data.config import DataConfig, make_writable
from cocodc_jax.data.corpora.documents import Corpus, StoredDocuments, open_tfds_set
from cocodc_jax.data.corpora.files import (
    TEXT_DOCUMENT_CHARS,
    CorpusFile,
    Document,
    content_hash,
    files_fingerprint,
    list_stdlib_files,
    list_text_files,
    read_documents,
    unreadable,
)
from cocodc_jax.data.corpora.hf_sets import open_hf_set
from cocodc_jax.paths import cache_dir

with extra("data"):
    import tensorflow_datasets as tfds
    from absl import logging as absl_logging

_logger = logging.getLogger(__name__)


def open_corpus(config: DataConfig) -> Corpus:
    """Open the corpus that a configuration names, and prepare it if necessary.

    Nothing is downloaded: a `tfds:` set must have been prepared before.
    """
    kind, _, rest = config.dataset.partition(":")
    if kind == "hf":
        return open_hf_set(rest, config)
    if kind == "tfds":
        return open_tfds_set(rest, config.data_dir, config.validation_fraction)

    if kind == "text":
        builder_class = TextFiles
        undecodable = config.undecodable
        files = list_text_files(_local_paths(rest.split(","), config), undecodable)
        if undecodable == "skip":
            _warn_of_unreadable(files)
    else:
        # Some of its own tests are in other encodings on purpose.
        builder_class = StdlibSource
        undecodable = "skip"
        files = list_stdlib_files()

    builder = _prepare(builder_class, files, config, undecodable)
    content = (builder.info.metadata or {})["content"]
    return Corpus(
        train=StoredDocuments(builder, "train", "text"),
        validation=StoredDocuments(builder, "validation", "text"),
        has_sources=True,
        fingerprint=f"{kind}-{content}",
    )


def _warn_of_unreadable(files: Sequence[CorpusFile]) -> None:
    """Name the files that `undecodable=skip` leaves out, if there are any."""
    skipped = unreadable(files)
    if not skipped:
        return

    names = ", ".join(map(str, skipped[:3]))
    if len(skipped) > 3:
        names += f" and {len(skipped) - 3} more"
    print(
        f"warning: undecodable=skip leaves out {len(skipped)} of {len(files)} files of "
        f"the text: {names}",
        file=sys.stderr,
    )


def _local_paths(names: Sequence[str], config: DataConfig) -> list[str]:
    """Return the paths, with those of local copies for files in a bucket."""
    cache = cache_dir(config.data_dir)
    try:
        return [str(fetched(x, cache)) if is_in_bucket(x) else x for x in names]
    except (ValueError, OSError) as error:
        raise ValueError(f"dataset={config.dataset!r}: {error}") from error


@dataclasses.dataclass(kw_only=True)
class CorpusConfig(tfds.core.BuilderConfig):
    """The files of a corpus, and settings as in `DataConfig`."""

    files: tuple[CorpusFile, ...]
    validation_fraction: float
    undecodable: str


class TextCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Documents with their text and source, in splits `train` and `validation`."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS 4.9.10 finds this path with `importlib_resources`, a backport that it does
    # not install on Python 3.9 and up; giving the path here avoids the import.
    code_path = pathlib.Path(__file__)  # pyright: ignore
    max_document_chars: int | None = None
    keeps_marks = False

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": text(), "source": text()}),
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # everything is on disk already
        named = [(d.key, d.source, content_hash(d.text)) for d in self._documents()]
        threshold = _split_threshold([content for *_, content in named], self._config)
        metadata = self.info.metadata
        assert metadata is not None  # set in _info

        # A key decides where its document is stored.
        digest = hashlib.sha256(repr(threshold).encode())
        for entry in sorted(named):
            digest.update(repr(entry).encode())

        metadata["content"] = digest.hexdigest()[:16]
        return {
            "train": self._generate_examples(threshold, is_validation=False),
            "validation": self._generate_examples(threshold, is_validation=True),
        }

    def _generate_examples(self, threshold: float, is_validation: bool):
        for d in self._documents():
            if (content_hash(d.text) <= threshold) == is_validation:
                yield d.key, {"text": d.text, "source": d.source}

    def _documents(self) -> Iterator[Document]:
        config = self._config
        return read_documents(
            config.files,
            self.max_document_chars,
            config.undecodable,
            keeps_marks=self.keeps_marks,
        )

    @property
    def _config(self) -> CorpusConfig:
        assert isinstance(self.builder_config, CorpusConfig)
        return self.builder_config


class StdlibSource(TextCorpus):
    """The Python standard library's own source, one document per file."""

    # One of its own tests has a byte order mark, and measured losses are of that text.
    keeps_marks = True


class TextFiles(TextCorpus):
    """Any text files; long ones become several documents."""

    max_document_chars = TEXT_DOCUMENT_CHARS


def _split_threshold(hashes: Sequence[float], config: CorpusConfig) -> float:
    """Return the largest hash that makes a document a validation document."""
    distinct = np.unique(np.array(hashes, np.float64))
    if len(distinct) < 2:
        contents = "one document" if len(distinct) else "no readable UTF-8 text"
        where = os.path.commonpath([file.path for file in config.files])
        raise ValueError(
            f"{where} holds {contents}; at least two different documents are needed, "
            "one to train on and one to validate on"
        )
    return float(np.clip(config.validation_fraction, distinct[0], distinct[-2]))


def _prepare(
    builder_class: type[TextCorpus],
    files: tuple[CorpusFile, ...],
    data: DataConfig,
    undecodable: str,
) -> tfds.core.DatasetBuilder:
    """Return a builder whose data are on disk; prepare them if they are not."""
    data_dir = cache_dir(data.data_dir)
    share = data.validation_fraction

    # Without those files nothing depends on the choice.
    choice = () if undecodable == "skip" else (undecodable,)
    # Data that an earlier version prepared still have the marks.
    marks = () if builder_class.keeps_marks else ("without byte order marks",)
    fingerprint = files_fingerprint(
        files, share, builder_class.max_document_chars, *choice, *marks
    )
    config = CorpusConfig(
        name=fingerprint,
        files=files,
        validation_fraction=share,
        undecodable=undecodable,
    )
    make = functools.partial(builder_class, config=config, file_format="array_record")

    target = data_dir / builder_class.name / fingerprint
    with _quiet():
        # Where Path.exists raises, as of folders that are closed, there is none.
        if not os.path.exists(target):
            _logger.info("preparing %s (%d files)", target, len(files))
            _prepare_beside(make, target)
        builder = make(data_dir=data_dir)

    _check_whole(builder, target)
    return builder


def _prepare_beside(make: Callable[..., TextCorpus], target: pathlib.Path) -> None:
    data_dir = target.parent.parent
    make_writable(data_dir)
    make_writable(target.parent)

    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".preparing-") as folder:
        make(data_dir=folder).download_and_prepare()
        try:
            os.rename(pathlib.Path(folder, *target.parts[-2:]), target)
        except OSError:
            # Renaming onto a folder that is not empty fails: another process was
            # quicker, and its data are the same as ours.
            if not target.exists():
                raise


def _check_whole(builder: tfds.core.DatasetBuilder, target: pathlib.Path) -> None:
    """Refuse prepared data with missing files, as after a clean-up of old files."""
    # Any: TFDS declares these without the types that its decorators hide.
    splits: Any = builder.info.splits
    files = [file for split in splits.values() for file in split.filepaths]
    lost = [os.fspath(file) for file in files if not os.path.exists(file)]
    if lost or not files or "content" not in (builder.info.metadata or {}):
        raise ValueError(
            f"the prepared data in {target} lack {lost[0] if lost else 'their notes'}; "
            "remove that folder, and they are prepared again"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep TFDS from printing, logging and drawing bars while it prepares."""
    tfds.disable_progress_bar()
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
