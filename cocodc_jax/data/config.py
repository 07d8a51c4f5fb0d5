"""Settings of a run's data: its text, its tokenizer, and how regions share it."""

import dataclasses
import pathlib

from cocodc_jax.fields import Kind, check_choices, check_least, free, of_kind, one_of
from cocodc_jax.files import UnwritableError, ensure_folder

MAX_LOADER_THREADS = 64
# Of `bpe:`. The library allocates memory for any size, or ends the process.
_LEAST_TOKENS = 257
_MOST_TOKENS = 1 << 24

PARTITIONS = ("iid", "source")
UNDECODABLE = ("refuse", "replace", "skip")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Settings of the data of one run.

    Attributes:
      dataset: `stdlib` (the Python standard library's source), `text:PATH` or
        `text:PATH,PATH` (files, or folders that are walked), `hf:PATH` (a folder of
        JSON lines, Parquet, or Arrow files of `datasets`), or `tfds:NAME` (a prepared
        TFDS text set such as `tfds:c4/en`).
      data_dir: folder of prepared data. Empty means `$XDG_CACHE_HOME/cocodc_jax` or
        `~/.cache/cocodc_jax`; for `tfds:` sets, the default folder of TFDS.
      text_field: field that holds the text, of `hf:` sets.
      tokenizer: `bytes`, `bpe:VOCAB` (trained on the corpus, then cached),
        `hf:/folder` (with `tokenizer.json`, and `tokenizer_config.json` for the special
        tokens), `hf:/path/tokenizer.json` or `sentencepiece:/path.model`.
      sequence_length: tokens the model reads per sequence, L; streams yield L + 1.
      batch_per_region: sequences per region per step, B.
      partition: `iid` deals documents to regions one by one; `source` deals whole
        sources (modules, sub-folders), so regions see different text.
      undecodable: what becomes of a file of `text:`, or a line of JSON, that is not
        UTF-8: refuse names it in an error, replace reads it with a mark for each wrong
        byte, skip leaves it out, as it does a file that cannot be read (and says how
        many files).
      validation_fraction: share of the documents held out, in (0, 0.5].
      shuffle_window_bytes: text that each region tokenises and shuffles together,
        in bytes; a window and its successor are held in memory.
      loader_threads: worker threads per region that prepare windows ahead, at most 64.
      seed: seed of the order of documents and sequences.
    """

    dataset: str = of_kind(Kind.DATA, "stdlib")
    data_dir: str = free("", is_path=True)
    text_field: str = "text"
    tokenizer: str = of_kind(Kind.DATA, "bytes")
    sequence_length: int = 128
    batch_per_region: int = 8
    partition: str = one_of(PARTITIONS, "iid")
    undecodable: str = one_of(UNDECODABLE, "refuse")
    validation_fraction: float = 0.05
    shuffle_window_bytes: int = 4 << 20
    loader_threads: int = free(1)
    seed: int = 0

    def __post_init__(self):
        _check_dataset(self.dataset)
        if self.text_field != "text" and not self.dataset.startswith("hf:"):
            raise ValueError(
                f"text_field={self.text_field!r} is of sets with fields, dataset="
                f"'hf:/folder', and dataset={self.dataset!r}; leave it out"
            )

        _check_tokenizer(self.tokenizer)
        check_least(self, 1, "sequence_length", "batch_per_region", "loader_threads")
        if self.loader_threads > MAX_LOADER_THREADS:
            raise ValueError(
                f"loader_threads={self.loader_threads} is too many, as each holds a "
                "window of shuffle_window_bytes of text in memory; use at most "
                f"{MAX_LOADER_THREADS}"
            )

        check_choices(self)
        has_choice = self.dataset.startswith(("text:", "hf:"))
        if self.undecodable != "refuse" and not has_choice:
            raise ValueError(
                f"undecodable={self.undecodable!r} is of files, dataset='text:/path' "
                f"or 'hf:/folder', and dataset={self.dataset!r}; leave it out"
            )
        if not 0.0 < self.validation_fraction <= 0.5:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} is outside (0, 0.5]; "
                "0.05 holds out one document in twenty"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside 0 ... 2**32 - 1")

        # A token of a large vocabulary is about 4 bytes of text, so this keeps at least
        # some 16 sequences per window: fewer lose much text at window ends.
        smallest = 64 * (self.sequence_length + 1)
        if self.shuffle_window_bytes < smallest:
            raise ValueError(
                f"shuffle_window_bytes={self.shuffle_window_bytes} is too small for "
                f"sequence_length={self.sequence_length}; use at least {smallest}"
            )


def _check_dataset(dataset: str) -> None:
    kind, _, rest = dataset.partition(":")
    if kind == "text" and rest and not all(rest.split(",")):
        raise ValueError(
            f"dataset={dataset!r} has an empty path '' among those between its commas; "
            "leave out a comma, or write . for this folder"
        )
    if dataset == "stdlib" or (kind in ("text", "hf", "tfds") and rest):
        return

    raise ValueError(
        f"dataset={dataset!r} is unknown; use 'stdlib', 'text:/path[,/path2]', "
        "'hf:/folder' or 'tfds:name[/config]'"
    )


def _check_tokenizer(name: str) -> None:
    kind, _, rest = name.partition(":")
    if kind == "bpe":
        if not rest.isdecimal() or not _LEAST_TOKENS <= int(rest) <= _MOST_TOKENS:
            raise ValueError(
                f"tokenizer={name!r} needs a vocabulary of at least {_LEAST_TOKENS} "
                f"tokens (the bytes and end of text) and at most {_MOST_TOKENS}, such "
                "as 'bpe:4096'"
            )
    elif name != "bytes" and not (kind in ("hf", "sentencepiece") and rest):
        raise ValueError(
            f"tokenizer={name!r} is unknown; use 'bytes', 'bpe:VOCAB', "
            "'hf:/folder', 'hf:/path/tokenizer.json' or 'sentencepiece:/path.model'"
        )


def make_writable(folder: pathlib.Path) -> None:
    """Make a folder of prepared data if missing; refuse one that is read-only."""
    try:
        ensure_folder(folder)
    except UnwritableError as error:
        raise ValueError(
            f"data_dir={str(folder)!r} cannot be written to ({error.strerror}); name "
            "another folder by data_dir, or by XDG_CACHE_HOME where data_dir is empty"
        ) from error
