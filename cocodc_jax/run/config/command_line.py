"""Flags of any program: rows of a table, their possible values, and their errors.

Needs no JAX, like `exits`, so that programs that train nothing can use it. absl's own
parsers report "invalid literal for int() with base 10" for `--steps=ten`.
"""

import contextlib
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any

from absl import flags

from cocodc_jax._extras import MissingExtraError
from cocodc_jax.fields import COUNT_OR_WORD
from cocodc_jax.paths import without_tilde
from cocodc_jax.run.exits import refuse

# Name, default and help of a flag. In place of a default, a type means none, and a
# tuple is the default with the possible words. A `pathlib.Path` is read as text, with a
# home folder in place of its ~.
Row = tuple[str, Any, str]


def _count_or_word(argument: int | str) -> int | str:
    """Read a whole number, or a word, which the configuration checks."""
    text = str(argument)
    return int(text) if text.lstrip("-").isdecimal() else text


def _paths(argument: str | pathlib.Path) -> str:
    """Read a path, or several with commas between them, whose ~ is a home folder."""
    return ",".join(without_tilde(part) for part in str(argument).split(","))


# How a value of each type is read, and what an error says that it must be.
_TYPES: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (flags.IntegerParser().convert, "a whole number"),
    float: (flags.FloatParser().convert, "a number"),
    bool: (flags.BooleanParser().parse, "true or false"),
    str: (str, "text"),
    COUNT_OR_WORD: (_count_or_word, "a whole number or a word"),
    pathlib.Path: (_paths, "a path without ~, as its home folder is not known"),
}


class Parser(flags.ArgumentParser):
    """Reads the values of a flag.

    Attributes:
      kind: a type of `_TYPES`.
      enum_values: all that a text may be; empty for any.
      least: the smallest number; None for any.
      most: the largest number; None for any.
    """

    def __init__(
        self,
        kind: Any,
        enum_values: Collection[str] = (),
        least: float | None = None,
        most: float | None = None,
    ):
        self.kind = kind
        self.enum_values = enum_values
        self.least = least
        self.most = most

    def parse(self, argument: Any) -> Any:
        """Return the value of a text; absl prefixes errors with the flag's name."""
        read, rule = _TYPES[self.kind]
        try:
            value = read(argument)
        except (ValueError, TypeError):
            raise ValueError(f"must be {rule}") from None

        if self.enum_values and value not in self.enum_values:
            raise ValueError(f"must be one of {', '.join(self.enum_values)}")
        if self.least is not None and self.most is not None:
            if not self.least <= value <= self.most:
                raise ValueError(f"must be from {self.least} to {self.most}")
        elif self.least is not None and value < self.least:
            raise ValueError(f"must be at least {self.least}")
        return value


def define(
    values: flags.FlagValues,
    rows: Iterable[Row],
    **bounds: float | tuple[float, float],
) -> None:
    """Define a program's flags.

    Args:
      values: absl's object that holds them.
      rows: of the flags.
      **bounds: the least value of a number by name, or the least and the most.
    """
    for name, default, text in rows:
        kind, value, words = _parts(default)
        if kind is list:
            flags.DEFINE_list(name, value, text, flag_values=values)
            continue

        bound = bounds.get(name)
        least, most = bound if isinstance(bound, tuple) else (bound, None)
        parser = Parser(kind, words, least, most)
        if kind is bool:
            flag = flags.BooleanFlag(name, value, text)  # Takes --noNAME.
            flag.parser = parser
        else:
            # Without a serializer absl cannot write the flag as it was given.
            serializer = flags.ArgumentSerializer()
            flag = flags.Flag(parser, serializer, name, value, text)
        flags.DEFINE_flag(flag, flag_values=values)


def _parts(default: Any) -> tuple[Any, Any, tuple[str, ...]]:
    """Return the type of a flag, its default and its possible words, from a row."""
    if isinstance(default, type | UnionType):
        return default, None, ()
    if isinstance(default, tuple):
        first, *words = default
        return str, first, tuple(words)
    if isinstance(default, pathlib.Path):
        return pathlib.Path, default, ()
    return type(default), default, ()


def check_numbers(values: Mapping[str, Any] | flags.FlagValues) -> None:
    """Refuse NaN and infinite numbers."""
    for name in values:
        number = values[name].value
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"--{name}={number} must be finite")


@contextlib.contextmanager
def usage_errors(*known: Iterable[str]) -> Iterator[None]:
    """Print an error of the set-up as one line with the flag, and exit with code 2.

    Args:
      *known: names of the program's flags.
    """
    try:
        yield
    except (ValueError, MissingExtraError, flags.Error) as error:
        refuse(error, set().union(*known))
