"""Files with a document in each row, read a chunk of rows at a time.

JSON lines, Parquet, and the Arrow files of `datasets`' `save_to_disk`. Any chunk can be
read without those before it. In JSON lines a chunk is the lines that begin in a range
of bytes. In Parquet it is a part of a row group, which is decoded in full. In Arrow it
is a part of a record batch, which is mapped into memory. Memory holds the last few row
groups.
"""

import contextlib
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.files import without_mark

_CACHED_ROW_GROUPS = 4


class RecordError(ValueError):
    """A row without the expected text, or a file of rows that cannot be read."""


class JsonLines:
    """One JSON object a line."""

    def __init__(
        self,
        path: pathlib.Path,
        field: str,
        chunk_bytes: int,
        undecodable: str,
        shown: pathlib.Path,
    ):
        """Read the first line, which must be an object with the field."""
        self._path = path
        self._field = field
        self._shown = shown
        self._chunk_bytes = chunk_bytes
        self._undecodable = undecodable
        self.num_bytes = path.stat().st_size
        self.num_chunks = -(-self.num_bytes // chunk_bytes)
        if self.num_chunks:
            next(self._texts(0, self.num_bytes), None)

    def texts(self, chunk: int) -> list[str]:
        """Return the texts of the lines that begin in a chunk's bytes."""
        start = chunk * self._chunk_bytes
        return list(self._texts(start, start + self._chunk_bytes))

    def _texts(self, start: int, end: int) -> Iterator[str]:
        with _reading(self._shown), self._path.open("rb") as file:
            if start:
                # The line that the byte before is in, or ends, is another chunk's.
                file.seek(start - 1)
                start += len(file.readline()) - 1

            while start < end and (line := file.readline()):
                try:
                    # A mark begins a file, or one that was appended to another.
                    text = self._text(without_mark(line))
                except ValueError as error:
                    raise RecordError(f"{self._where(start)}: {error}") from error

                if text is not None:
                    yield text
                start += len(line)

    def _text(self, line: bytes) -> str | None:
        if line.isspace():
            return None

        errors = "replace" if self._undecodable == "replace" else "strict"
        try:
            row = json.loads(line.decode("utf-8", errors))
        except UnicodeDecodeError as error:
            if self._undecodable == "skip":
                return None

            raise ValueError(
                f"is not UTF-8 text ({error.reason}); mend it, or choose "
                "undecodable=replace or skip"
            ) from error
        # Python's parser calls itself for each bracket that is open.
        except (ValueError, RecursionError) as error:
            why = f"is no JSON ({error}); each line must be one object"
            raise ValueError(why) from error

        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ValueError(f"is a JSON {kind}; each line must be one object")
        if self._field not in row:
            raise ValueError(_no_field(self._field, row))

        text = row[self._field]
        if text is not None and not isinstance(text, str):
            kind = type(text).__name__
            raise ValueError(f"field {self._field!r} is of type {kind}, not text")
        return _clean(text)

    def _where(self, at: int) -> str:
        """Return a file's name and the number of the line that begins at a byte."""
        with self._path.open("rb") as file:
            pieces = iter(lambda: file.read(min(1 << 20, at - file.tell())), b"")
            number = 1 + sum(piece.count(b"\n") for piece in pieces)
        return f"{self._shown}, line {number}"


class Columns:
    """Groups of rows, each a column of text, cut into chunks of about equal size."""

    def __init__(
        self,
        path: pathlib.Path,
        rows: Sequence[int],
        sizes: Sequence[int],
        chunk_bytes: int,
        column: Callable[[int], Any],
    ):
        """Cut groups into chunks.

        Args:
          path: of the file.
          rows: number of rows of each group.
          sizes: bytes of each group.
          chunk_bytes: about the size of a chunk.
          column: returns the text of a group.
        """
        self._path = path
        self._column = column
        self._chunks: list[tuple[int, slice]] = []  # Groups, and rows in them.
        for group, (n, size) in enumerate(zip(rows, sizes, strict=True)):
            parts = max(1, min(n, -(-size // chunk_bytes)))
            bounds = [part * n // parts for part in range(parts + 1)]
            self._chunks += [(group, slice(*x)) for x in itertools.pairwise(bounds)]
        self.num_bytes = sum(sizes)
        self.num_chunks = len(self._chunks)

    def texts(self, chunk: int) -> list[str]:
        """Return the texts of a chunk's rows."""
        group, rows = self._chunks[chunk]
        with _reading(self._path):
            values = self._column(group)[rows].to_pylist()
        return [text for text in map(_clean, values) if text is not None]


RowFile = JsonLines | Columns  # It has `num_bytes`, about the size of its text.


def open_parquet(path: pathlib.Path, field: str, chunk_bytes: int) -> Columns:
    """Open a Parquet file."""
    with extra("hf"):
        import pyarrow.parquet as parquet

    with _reading(path), parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, field)
        about = file.metadata
        groups = [about.row_group(g) for g in range(about.num_row_groups)]

    sizes = [
        group.column(i).total_uncompressed_size
        for group in groups
        for i in range(group.num_columns)
        if group.column(i).path_in_schema == field
    ]

    rows = [group.num_rows for group in groups]
    column = functools.partial(_row_group, path, field)
    return Columns(path, rows, sizes, chunk_bytes, column)


def open_arrow(path: pathlib.Path, field: str, chunk_bytes: int) -> Columns:
    """Open an Arrow stream, as `datasets` saves it, or an Arrow file."""
    with extra("hf"):
        import pyarrow.ipc as ipc
        from pyarrow import memory_map

    with _reading(path):
        mapped = memory_map(str(path))
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        table = (ipc.open_file if is_file else ipc.open_stream)(mapped).read_all()

    _check_column(path, table.schema, field)
    batches = table.column(field).chunks
    rows = [len(batch) for batch in batches]
    sizes = [batch.nbytes for batch in batches]
    return Columns(path, rows, sizes, chunk_bytes, batches.__getitem__)


def _clean(text: str | None) -> str | None:
    """Return text as valid UTF-8; None if it is missing or only white space."""
    if text is None or not text.strip():
        return None
    # JSON can contain half of a surrogate pair, which is not a character.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@functools.lru_cache(_CACHED_ROW_GROUPS)
def _row_group(path: pathlib.Path, field: str, group: int) -> Any:
    """Return a column of a row group, as text in Arrow's own layout."""
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        return file.read_row_group(group, columns=[field]).column(0)


def _no_field(field: str, names: Iterable[str]) -> str:
    known = f"its fields are {sorted(names)}; name one with text_field"
    return f"has no field {field!r}; {known}"


def _check_column(path: pathlib.Path, schema: Any, field: str) -> None:
    if field not in schema.names:
        raise RecordError(f"{path}: {_no_field(field, schema.names)}")
    kind = str(schema.field(field).type)
    if "string" not in kind or "<" in kind and not kind.startswith("dictionary"):
        raise RecordError(f"{path}: field {field!r} is of type {kind}, not text")


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Say which file could not be read."""
    try:
        yield
    except RecordError:
        raise
    except (ValueError, OSError) as error:  # Arrow's own are of these kinds.
        raise RecordError(f"{path} cannot be read: {error}") from error
