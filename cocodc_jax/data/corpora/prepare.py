"""Writes a corpus to disk once, whatever number of processes ask for it.

What is prepared is in `data_dir/BUILDER/FINGERPRINT/VERSION` as ArrayRecord files.
Each process writes to a temporary folder beside it and renames that into place; a
rename of a folder is atomic, so a process finds no data or whole data, and when
two prepare at once the later one drops its copy. A change of any source file changes
the fingerprint and so prepares anew.
"""

import contextlib
import io
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.data.corpora.builders import CorpusConfig, TextCorpus
from cocodc_jax.data.corpora.files import CorpusFile, files_fingerprint
from cocodc_jax.data.writable import make_writable

with extra("data"):
    import tensorflow_datasets as tfds
    from absl import logging as absl_logging

_logger = logging.getLogger(__name__)


def prepare_corpus(
    builder_class: type[TextCorpus],
    files: tuple[CorpusFile, ...],
    validation_fraction: float,
    data_dir: pathlib.Path,
    undecodable: str,
) -> tfds.core.DatasetBuilder:
    """Return a builder whose data are on disk, preparing them if they are not.

    Raises:
      ValueError: if the files do not hold two different documents, one of them is
        refused, the folder cannot be written to, or some of what was prepared in it
        has gone.
    """
    # Without those files nothing depends on the choice.
    choice = () if undecodable == "skip" else (undecodable,)
    fingerprint = files_fingerprint(
        files, validation_fraction, builder_class.max_document_chars, *choice
    )
    config = CorpusConfig(
        name=fingerprint,
        files=files,
        validation_fraction=validation_fraction,
        undecodable=undecodable,
    )
    target = data_dir / builder_class.name / fingerprint
    with _quiet():
        # Where Path.exists raises, as of folders that are closed, there is none.
        if not os.path.exists(target):
            _logger.info("preparing %s (%d files)", target, len(files))
            _prepare_beside(builder_class, config, target, data_dir)
        builder = _make_builder(builder_class, config, data_dir)
    _check_whole(builder, target)
    return builder


def _prepare_beside(
    builder_class: type[TextCorpus],
    config: CorpusConfig,
    target: pathlib.Path,
    data_dir: pathlib.Path,
) -> None:
    make_writable(data_dir)
    make_writable(target.parent)
    with tempfile.TemporaryDirectory(dir=data_dir, prefix=".preparing-") as folder:
        _make_builder(builder_class, config, folder).download_and_prepare()
        try:
            os.rename(pathlib.Path(folder, builder_class.name, config.name), target)
        except OSError:
            # Renaming onto a folder that is not empty fails: another process was
            # quicker, and its data are the same as ours.
            if not target.exists():
                raise


def _check_whole(builder: tfds.core.DatasetBuilder, target: pathlib.Path) -> None:
    """Refuse prepared data of which some is gone, as where old files are swept away."""
    # Any: TFDS declares these without the types that its decorators hide.
    splits: Any = builder.info.splits
    files = [file for split in splits.values() for file in split.filepaths]
    lost = [os.fspath(file) for file in files if not os.path.exists(file)]
    if lost or not files or "content" not in (builder.info.metadata or {}):
        raise ValueError(
            f"the prepared data in {target} lack {lost[0] if lost else 'their notes'}; "
            "remove that folder, and they are prepared again"
        )


def _make_builder(
    builder_class: type[TextCorpus], config: CorpusConfig, data_dir
) -> tfds.core.DatasetBuilder:
    return builder_class(data_dir=data_dir, config=config, file_format="array_record")


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
