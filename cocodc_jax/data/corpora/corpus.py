"""Opens a corpus by the name that a configuration gives."""

import pathlib
import sys
from collections.abc import Sequence

from cocodc_jax.buckets import fetched, is_in_bucket
from cocodc_jax.data.config import DataConfig, cache_dir
from cocodc_jax.data.corpora.documents import Corpus, StoredDocuments, open_tfds_set
from cocodc_jax.data.corpora.files import list_stdlib_files, list_text_files, unreadable
from cocodc_jax.data.corpora.hf_sets import open_hf_set
from cocodc_jax.data.corpora.prepare import StdlibSource, TextFiles, prepare_corpus


def open_corpus(config: DataConfig) -> Corpus:
    """Open the corpus that a configuration names, preparing it if need be.

    Nothing is ever downloaded: a `tfds:` set must have been prepared before.

    Raises:
      ValueError: if there is no such corpus, no text in it, or a file is refused.
    """
    kind, _, rest = config.dataset.partition(":")
    if kind == "hf":
        return open_hf_set(rest, config)
    if kind == "tfds":
        return open_tfds_set(rest, config.data_dir, config.validation_fraction)
    if kind == "text":
        made, undecodable = TextFiles, config.undecodable
        found = list_text_files(_at_hand(rest.split(","), config), undecodable)
        if undecodable == "skip":
            _tell_of_skipped(unreadable(found), len(found))
    else:
        # Some of its own tests are in other encodings on purpose.
        made, undecodable = StdlibSource, "skip"
        found = list_stdlib_files()
    folder = cache_dir(config.data_dir)
    builder = prepare_corpus(
        made, found, config.validation_fraction, folder, undecodable
    )
    content = (builder.info.metadata or {})["content"]
    return Corpus(
        train=StoredDocuments(builder, "train", "text"),
        validation=StoredDocuments(builder, "validation", "text"),
        has_sources=True,
        fingerprint=f"{kind}-{content}",
    )


def _at_hand(names: Sequence[str], config: DataConfig) -> list[str]:
    """Return the paths, of what lies in a bucket those of its copy here."""
    cache = cache_dir(config.data_dir)
    try:
        return [str(fetched(x, cache)) if is_in_bucket(x) else x for x in names]
    except (ValueError, OSError) as error:
        raise ValueError(f"dataset={config.dataset!r}: {error}") from error


def _tell_of_skipped(skipped: Sequence[pathlib.Path], num_files: int) -> None:
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        print(
            f"warning: undecodable=skip leaves out {len(skipped)} of {num_files} files "
            f"of the text: {', '.join(map(str, skipped[:3]))}{more}",
            file=sys.stderr,
        )
