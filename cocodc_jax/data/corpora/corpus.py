"""Opens a corpus by the name that a configuration gives."""

from cocodc_jax.data.config import DataConfig, cache_dir
from cocodc_jax.data.corpora import builders
from cocodc_jax.data.corpora.documents import Corpus, read_split
from cocodc_jax.data.corpora.files import list_stdlib_files, list_text_files
from cocodc_jax.data.corpora.prepare import prepare_corpus
from cocodc_jax.data.corpora.tfds_sets import open_tfds_set


def open_corpus(config: DataConfig) -> Corpus:
    """Open the corpus that a configuration names, preparing it if need be.

    Nothing is ever downloaded: a `tfds:` set must have been prepared before.

    Args:
      config: `dataset`, `data_dir` and `validation_fraction` are used.

    Returns:
      The corpus.

    Raises:
      ValueError: if there is no such corpus, or no text in it.
    """
    kind, _, rest = config.dataset.partition(":")
    if kind == "tfds":
        return open_tfds_set(rest, config.data_dir, config.validation_fraction)
    if kind == "text":
        builder_class, found = builders.TextFiles, list_text_files(rest.split(","))
    else:
        builder_class, found = builders.StdlibSource, list_stdlib_files()
    builder = prepare_corpus(
        builder_class, found, config.validation_fraction, cache_dir(config.data_dir)
    )
    content = (builder.info.metadata or {})["content"]
    return Corpus(
        train=read_split(builder, "train", "text"),
        validation=read_split(builder, "validation", "text"),
        has_sources=True,
        fingerprint=f"{kind}-{content}",
    )
