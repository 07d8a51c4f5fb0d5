"""Types of flags: what their values may be, and what an error says is right.

Needs no JAX, like `messages`: programs that train nothing define their flags by it too.
absl's own parsers say "invalid literal for int() with base 10" of `--steps=ten`.
"""

import pathlib
from collections.abc import Callable, Collection
from typing import Any

from absl import flags

from cocodc_jax.fields import COUNT_OR_WORD
from cocodc_jax.paths import without_tilde

Bounds = tuple[float | None, float | None]


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
      kind: the type of the values, see `define`.
      enum_values: all that they may be; empty for any.
    """

    def __init__(self, kind: Any, bounds: Bounds, words: tuple[str, ...]):
        self.kind = kind
        self.enum_values = words
        self._bounds = bounds

    def parse(self, argument: Any) -> Any:
        """Return a value; absl puts the name of the flag before an error's text."""
        read, rule = _TYPES[self.kind]
        try:
            value = read(argument)
        except (ValueError, TypeError):
            raise ValueError(f"must be {rule}") from None

        if self.enum_values and value not in self.enum_values:
            raise ValueError(f"must be one of {', '.join(self.enum_values)}")
        least, most = self._bounds
        if (least is not None and value < least) or (most is not None and value > most):
            raise ValueError(f"must be {_range(least, most)}")
        return value


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return f"at most {most}"
    if most is None:
        return f"at least {least}"
    return f"from {least} to {most}"


def define(
    kind: Any,
    name: str,
    default: Any,
    text: str,
    flag_values: flags.FlagValues,
    bounds: Bounds = (None, None),
    words: Collection[str] = (),
    **settings: Any,
) -> None:
    """Define a flag.

    Args:
      kind: int, float, bool, str, list (of words with commas between them),
        `pathlib.Path` (read as str) or `COUNT_OR_WORD`.
      name: of the flag.
      default: its value if it is not given; None is allowed.
      text: its help.
      flag_values: to define it in.
      bounds: least and greatest value of a number; None is unbounded.
      words: all that a str may be; empty for any.
      **settings: of the flag, such as allow_override.
    """
    if kind is list:
        flags.DEFINE_list(name, default, text, flag_values=flag_values, **settings)
        return

    parser = Parser(kind, bounds, tuple(words))
    if kind is bool:
        flag = flags.BooleanFlag(name, default, text, **settings)  # Takes --noNAME.
        flag.parser = parser
        flags.DEFINE_flag(flag, flag_values=flag_values)
        return
    flags.DEFINE(
        parser,
        name,
        default,
        text,
        flag_values=flag_values,
        # Without one absl cannot write the flag as it was given.
        serializer=flags.ArgumentSerializer(),
        **settings,
    )
