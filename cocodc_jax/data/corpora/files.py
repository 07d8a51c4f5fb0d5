"""The files of a corpus, and the documents in them.

A file is one document. A text file longer than `max_document_chars` is cut at line ends
into several documents, so that one large file can be split into training and validation
documents and distributed to regions.
"""

import dataclasses
import hashlib
import os
import pathlib
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cocodc_jax.paths import expanded

TEXT_DOCUMENT_CHARS = 1 << 16
BYTE_ORDER_MARK = "\ufeff"
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus."""

    path: pathlib.Path
    key: str  # Its name in the corpus, the same wherever the corpus is.
    source: str  # The group it belongs to, for a partition by source.


class Document(NamedTuple):
    """One document: a unique key, its text, and the group it belongs to."""

    key: str
    text: str
    source: str


def list_stdlib_files() -> tuple[CorpusFile, ...]:
    """List the Python standard library's own `.py` files, in order of name."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [
        CorpusFile(path, path.relative_to(root).as_posix(), _top_level(path, root))
        for path in walk(root)
        if path.suffix == ".py"
    ]
    if not files:
        raise ValueError(f"dataset='stdlib': no .py file under {root}")
    return tuple(files)


def list_text_files(
    paths: Iterable[str], undecodable: str = "refuse"
) -> tuple[CorpusFile, ...]:
    """List text files, walking folders; hidden files and folders are left out."""
    files = []
    refuse = None if undecodable == "skip" else _refuse_folder
    for index, name in enumerate(paths):
        root = expanded(name, "dataset='text:...'")
        is_file = os.path.isfile(root)

        paths_in_root = [root] if is_file else list(walk(root, refuse))
        if not paths_in_root:
            fault = (
                "holds no readable file" if os.path.isdir(root) else "does not exist"
            )
            raise ValueError(f"dataset='text:...': {root} {fault}")

        base = root.parent if is_file else root
        for path in paths_in_root:
            key = f"{index}/{path.relative_to(base).as_posix()}"
            source = _top_level(path, base)
            files.append(CorpusFile(path, _sayable(key), _sayable(source)))

    return tuple(files)


def read_documents(
    files: Iterable[CorpusFile],
    max_document_chars: int | None = None,
    undecodable: str = "refuse",
    keeps_marks: bool = False,
) -> Iterator[Document]:
    """Read documents; skip empty files, and bad ones if `undecodable=skip`.

    A byte order mark at the start of a file is left out, unless `keeps_marks`.
    """
    for file in files:
        try:
            text = _read(file.path, undecodable)
        except ValueError:
            if undecodable != "skip":
                raise
            continue

        if not keeps_marks:
            text = text.removeprefix(BYTE_ORDER_MARK)
        for index, piece in enumerate(_pieces(text, max_document_chars)):
            if not piece.isspace():
                yield Document(f"{file.key}#{index}", piece, file.source)


def files_fingerprint(files: Iterable[CorpusFile], *settings: object) -> str:
    """Return a digest of files and settings, without reading any content."""
    digest = hashlib.sha256(repr((platform.python_version(), settings)).encode())
    for file in files:
        stat = file.path.stat()
        entry = (str(file.path), file.key, stat.st_size, stat.st_mtime_ns)
        digest.update(repr(entry).encode())
    return digest.hexdigest()[:16]


def unreadable(files: Iterable[CorpusFile]) -> list[pathlib.Path]:
    """List the files that cannot be read, or are not UTF-8 text."""
    paths = []
    for file in files:
        try:
            _read(file.path, "refuse")
        except ValueError:
            paths.append(file.path)
    return paths


def _read(path: pathlib.Path, undecodable: str) -> str:
    errors = "replace" if undecodable == "replace" else "strict"
    try:
        return path.read_bytes().decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"dataset='text:...': {path} is not UTF-8 text (byte {error.start}: "
            f"{error.reason}); mend it, or choose undecodable=replace or skip"
        ) from error
    except OSError as error:
        raise ValueError(
            f"dataset='text:...': {path} cannot be read ({error.strerror or error}); "
            "change its permissions, or choose undecodable=skip"
        ) from error


def content_hash(text: str) -> float:
    """Return a hash of a text as a number that is uniform in [0, 1)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def walk(
    root: pathlib.Path, refuse: Callable[[OSError], None] | None = None
) -> Iterator[pathlib.Path]:
    """List the files under a folder in order of name, without hidden ones.

    Links to files are followed. Links to folders could form a loop, so they are left
    out, with a warning.
    """
    onerror = refuse if os.path.isdir(root) else None
    for folder, subfolders, names in os.walk(root, onerror=onerror):
        # os.walk follows the order of this list, so sorting it fixes ours.
        shown = (n for n in subfolders if not n.startswith("."))
        subfolders[:] = sorted({*shown} - _SKIPPED_FOLDERS)
        for path in (os.path.join(folder, name) for name in subfolders):
            if os.path.islink(path):
                warnings.warn(
                    f"dataset: {path} is a link to a folder and is left out; name what "
                    "it leads to as well, or put the files there",
                    stacklevel=2,
                )

        for name in sorted(names):
            path = pathlib.Path(folder, name)
            # Dangling links and pipes are no files; os.path answers where Path raises.
            if not name.startswith(".") and os.path.isfile(path):
                yield path


def _refuse_folder(error: OSError) -> None:
    raise ValueError(
        f"dataset='text:...': the folder {error.filename} cannot be read "
        f"({error.strerror}); change its permissions, or choose undecodable=skip"
    ) from error


def _top_level(path: pathlib.Path, root: pathlib.Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else path.stem


def _sayable(name: str) -> str:
    """Return a file's name as UTF-8; it may be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _pieces(text: str, max_chars: int | None) -> Iterator[str]:
    start = 0
    max_chars = max_chars or len(text)
    while start < len(text):
        # A line longer than a whole document is cut where it must be.
        newline = text.rfind("\n", start, start + max_chars)
        is_last = start + max_chars >= len(text)
        end = start + max_chars if is_last or newline < 0 else newline + 1
        yield text[start:end]
        start = end
