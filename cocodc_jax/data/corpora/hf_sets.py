"""Text that Hugging Face's `datasets` made: a folder of JSON lines, Parquet or Arrow.

No file is copied, except that `.gz` is unpacked once. Files are read a chunk at a time,
and a chunk has the role that a document has in other corpora. The chunks of all files
are in one random order, which is always the same.
"""

import bisect
import gzip
import hashlib
import itertools
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cocodc_jax.data.config import DataConfig, make_writable
from cocodc_jax.data.corpora import row_files
from cocodc_jax.data.corpora.documents import Corpus, Documents
from cocodc_jax.data.corpora.files import content_hash, walk
from cocodc_jax.data.corpora.row_files import RecordError, RowFile
from cocodc_jax.paths import cache_dir, expanded

_JSON = (".jsonl", ".ndjson", ".json")
_PACKED = tuple(f"{suffix}.gz" for suffix in _JSON)
_KNOWN = (*_JSON, *_PACKED, ".parquet", ".arrow")
# Files without rows that `datasets` writes.
_NO_ROWS = re.compile(
    r"(dataset_info|dataset_infos|dataset_dict|state)\.json|cache-.*\.arrow"
)
_SPLITS = {
    "train": "train",
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    "test": "test",
}
_SPLIT = re.compile(rf"(?:^|[-._ /])({'|'.join(_SPLITS)})(?=[-._ /\d]|$)", re.I)
# A small set has a thousand chunks, so that all regions get some. Chunks of a large set
# are small enough to be read quickly; of Parquet they are larger, because reading a
# part of a row group decodes all of it.
_NUM_CHUNKS = 1024
_LEAST_BYTES = 1 << 12
_MOST_BYTES = 1 << 18
_MOST_BYTES_OF_PARQUET = 1 << 22
_SAMPLE_BYTES = 1 << 12


class _ListedFile(NamedTuple):
    path: pathlib.Path
    key: str  # Its name in the set.
    split: str
    source: str


class RowDocuments(Documents):
    """The documents of one split, by chunks."""

    def __init__(
        self,
        files: Sequence[tuple[RowFile, str]],
        held_out: tuple[float, bool] | None = None,
    ):
        """Read chunks of files, each with its source, in one random order.

        `held_out` is the share of documents that is held out, and whether these are
        that share; None takes all.
        """
        self._files = files
        self._held_out = held_out
        self._ends = list(itertools.accumulate(f.num_chunks for f, _ in files))
        self._order = np.random.default_rng(0).permutation(self._ends[-1])
        self.num_bytes = sum(file.num_bytes for file, _ in files)

    def __len__(self) -> int:
        return len(self._order)

    def texts(self, index: int) -> list[str]:
        """Return the documents of chunk `index`."""
        file, chunk = self._place(index)
        texts = self._files[file][0].texts(chunk)
        if self._held_out is None:
            return texts
        share, is_validation = self._held_out
        return [t for t in texts if (content_hash(t) < share) == is_validation]

    def source_and_bytes(self, index: int) -> tuple[str, int]:
        """Return the source of chunk `index` and about the size of its text."""
        file, source = self._files[self._place(index)[0]]
        return source, file.num_bytes // file.num_chunks

    def _place(self, index: int) -> tuple[int, int]:
        chunk = int(self._order[index])
        file = bisect.bisect_right(self._ends, chunk)
        return file, chunk - (self._ends[file] - self._files[file][0].num_chunks)


def open_hf_set(folder: str, config: DataConfig) -> Corpus:
    """Open a folder of rows, or one file of them.

    Train on files with `train` in their name or folder; if there are none, on all.
    Validate on files with `validation`, `valid`, `val` or `dev`; if there are none, on
    those with `test`; if there are none either, on a share of the documents, chosen by
    a hash of their text.
    """
    listed = _find(expanded(folder, f"dataset='hf:{folder}'"))
    paths = [_unpacked(file.path, cache_dir(config.data_dir)) for file in listed]
    size = sum(path.stat().st_size for path in paths) // _NUM_CHUNKS
    size = max(size, _LEAST_BYTES)

    splits: dict[str, list[tuple[RowFile, str]]] = {}
    for file, path in zip(listed, paths, strict=True):
        opened = _open(path, file.path, config, size)
        if opened.num_chunks:
            splits.setdefault(file.split, []).append((opened, file.source))

    train = splits.get("train", [])
    if not train:
        raise RecordError(
            f"dataset='hf:{folder}' has no rows to train on, only the splits "
            f"{sorted(splits)}; name a file or a folder 'train'"
        )

    validation = splits.get("validation") or splits.get("test")
    share = config.validation_fraction
    settings = (config.text_field, size, config.undecodable, not validation and share)
    return Corpus(
        train=RowDocuments(train, None if validation else (share, False)),
        validation=RowDocuments(
            validation or train, None if validation else (share, True)
        ),
        has_sources=True,
        fingerprint=f"hf-{_fingerprint(listed, settings)}",
    )


def _find(root: pathlib.Path) -> list[_ListedFile]:
    is_file = os.path.isfile(root)
    is_folder = os.path.isdir(root)
    base = root.parent if is_file else root
    files = [root] if is_file else list(walk(root, _refuse))
    keys = {path: path.relative_to(base).as_posix() for path in files}
    rows = {
        path: key
        for path, key in keys.items()
        if path.name.endswith(_KNOWN) and not _NO_ROWS.fullmatch(path.name)
    }

    if not rows:
        kinds = sorted({"".join(path.suffixes[-2:]) or path.name for path in files})
        content = f"only {', '.join(kinds[:8])}" if files else "nothing at all"
        if not (is_file or is_folder):
            content = "as it is not there"
        raise RecordError(
            f"dataset='hf:{root}' has no file of {', '.join(_KNOWN)}, {content}"
        )

    # A file that is named by itself is trained on, whatever its name.
    splits = {path: _split(key) if is_folder else "" for path, key in rows.items()}
    if "train" not in splits.values():
        splits = {path: split or "train" for path, split in splits.items()}
    return [
        _ListedFile(path, key, splits[path], _source(key))
        for path, key in rows.items()
        if splits[path]
    ]


def _refuse(error: OSError) -> None:
    raise RecordError(
        f"the folder {error.filename} cannot be read ({error.strerror}); change its "
        "permissions"
    ) from error


def _split(key: str) -> str:
    """Return the split in the name of a file or its folders; empty if there is none."""
    names = _SPLIT.findall(key)
    return _SPLITS[names[-1].lower()] if names else ""


def _source(key: str) -> str:
    """Return the first folder that is not a split, else the file's name."""
    *folders, name = key.split("/")
    named = [f for f in folders if f.lower() not in _SPLITS and f != "data"]
    return named[0] if named else name.partition(".")[0]


def _open(
    path: pathlib.Path, shown: pathlib.Path, config: DataConfig, size: int
) -> RowFile:
    if path.suffix == ".parquet":
        most = min(size, _MOST_BYTES_OF_PARQUET)
        return row_files.open_parquet(path, config.text_field, most)
    size = min(size, _MOST_BYTES)
    if path.suffix == ".arrow":
        return row_files.open_arrow(path, config.text_field, size)
    return row_files.JsonLines(path, config.text_field, size, config.undecodable, shown)


def _unpacked(path: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    """Return the file; a `.gz` is unpacked to the folder of prepared corpora."""
    if path.suffix != ".gz":
        return path

    stat = path.stat()
    known = repr((str(path), stat.st_size, stat.st_mtime_ns)).encode()
    folder = cache / "unpacked" / hashlib.sha256(known).hexdigest()[:16]

    target = folder / path.stem
    if not os.path.exists(target):
        make_writable(cache)
        make_writable(folder)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                with gzip.open(path) as packed:
                    shutil.copyfileobj(packed, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
            except (OSError, EOFError, zlib.error) as error:
                os.unlink(file.name)
                raise RecordError(f"{path} cannot be unpacked: {error}") from error

        # With the same permissions, as several users may share the cache.
        shutil.copymode(path, file.name)
        os.replace(file.name, target)  # Whole, for any other process that looks.

    return target


def _fingerprint(files: Sequence[_ListedFile], settings: tuple) -> str:
    """Digest names, sizes, starts and ends, as reading all bytes takes too long."""
    digest = hashlib.sha256(repr(settings).encode())
    for listed in files:
        size = listed.path.stat().st_size
        digest.update(repr((listed.key, size)).encode())
        with listed.path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
