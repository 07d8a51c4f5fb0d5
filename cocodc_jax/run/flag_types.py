"""Types of flags: what their values may be, and what an error says is right.

Needs no JAX, like `messages`: programs that train nothing define their flags by it too.
absl's own parsers say "invalid literal for int() with base 10" of `--steps=ten`.
"""

import pathlib
from collections.abc import Iterable
from typing import Any

from absl import flags

from cocodc_jax.fields import COUNT_OR_WORD
from cocodc_jax.paths import NoHomeError, without_tilde


class _WholeNumber(flags.IntegerParser):
    """Parses whole numbers within bounds."""

    def parse(self, argument: int | str) -> int:
        try:
            number = self.convert(argument)
        except (ValueError, TypeError):
            raise ValueError("must be a whole number") from None
        _check_bounds(self, number)
        return number


class _Number(flags.FloatParser):
    """Parses numbers within bounds."""

    def parse(self, argument: float | str) -> float:
        try:
            number = self.convert(argument)
        except (ValueError, TypeError):
            raise ValueError("must be a number") from None
        _check_bounds(self, number)
        return number


class _TrueOrFalse(flags.BooleanParser):
    """Parses true and false."""

    def parse(self, argument: bool | int | str) -> bool:
        try:
            return super().parse(argument)
        except (ValueError, TypeError):
            raise ValueError("must be true or false") from None


class _Word(flags.EnumParser):
    """Parses one of a few words."""

    def parse(self, argument: str) -> str:
        if argument not in self.enum_values:
            raise ValueError(f"must be one of {', '.join(self.enum_values)}")
        return argument


class _CountOrWord(flags.ArgumentParser):
    """Parses whole numbers; the configuration validates words."""

    syntactic_help = "a whole number or a word"

    def parse(self, argument: int | str) -> int | str:
        text = str(argument)
        return int(text) if text.lstrip("-").isdecimal() else text


class _Path(flags.ArgumentParser):
    """Parses a path, or several with commas between them, whose ~ is a home folder."""

    syntactic_help = "a path"

    def parse(self, argument: str | pathlib.Path) -> str:
        parts = str(argument).split(",")
        try:
            return ",".join(without_tilde(part) for part in parts)
        except NoHomeError:
            why = "its home folder is not known"
            raise ValueError(f"must be a path without ~, as {why}") from None


def _check_bounds(parser: Any, number: float) -> None:
    low, high = parser.lower_bound, parser.upper_bound
    if not parser.is_outside_bounds(number):
        return
    if low is None:
        raise ValueError(f"must be at most {high}")
    if high is None:
        raise ValueError(f"must be at least {low}")
    raise ValueError(f"must be from {low} to {high}")


def define(
    kind: Any,
    name: str,
    default: Any,
    text: str,
    flag_values: flags.FlagValues,
    bounds: tuple[float | None, float | None] = (None, None),
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
      settings: of the flag, such as allow_override.
    """
    if kind is list:
        flags.DEFINE_list(name, default, text, flag_values=flag_values, **settings)
        return
    if kind is bool:
        flag = flags.BooleanFlag(name, default, text, **settings)
        flag.parser = _TrueOrFalse()
        flags.DEFINE_flag(flag, flag_values=flag_values)
        return
    if kind is int:
        parser: flags.ArgumentParser = _WholeNumber(*bounds)  # pyright: ignore
    elif kind is float:
        parser = _Number(*bounds)
    elif kind is pathlib.Path:
        parser = _Path()
    elif kind == COUNT_OR_WORD:
        parser = _CountOrWord()
    else:
        parser = flags.ArgumentParser()
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


def define_words(
    words: Iterable[str],
    name: str,
    default: str | None,
    text: str,
    flag_values: flags.FlagValues,
) -> None:
    """Define a flag whose value is one of a few words."""
    flags.DEFINE(
        _Word(words),
        name,
        default,
        text,
        flag_values=flag_values,
        serializer=flags.ArgumentSerializer(),
    )
