"""What programs share: flags of their own, their help, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags

from cocodc_jax.run import flags
from cocodc_jax.run.help import Sections, options, render
from cocodc_jax.run.messages import as_a_command, one_line

from .commands import shown

REFUSED = (ValueError, absl_flags.Error)
_DEFINE = {
    int: absl_flags.DEFINE_integer,
    float: absl_flags.DEFINE_float,
    bool: absl_flags.DEFINE_bool,
    str: absl_flags.DEFINE_string,
    list: absl_flags.DEFINE_list,
}


def own_flags(
    *table: tuple[str, Any, str], **least: float | None
) -> absl_flags.FlagValues:
    """Return a program's own flags, apart from those of runs.

    A row is name, default and help. In place of a default, a type means none, and a
    tuple is the default with the possible words. The least value of a number is given
    by name.
    """
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_bool("help", False, "print this and exit", flag_values=values)
    for name, default, text in table:
        given = {"lower_bound": least[name]} if name in least else {}
        if isinstance(default, tuple):
            first, *words = default
            absl_flags.DEFINE_enum(name, first, words, text, flag_values=values)
        elif isinstance(default, type):
            _DEFINE[default](name, None, text, flag_values=values, **given)
        else:
            _DEFINE[type(default)](name, default, text, flag_values=values, **given)
    return values


def parse(
    values: absl_flags.FlagValues,
    argv: Sequence[str],
    doc: str | None,
    sections: Sections | None = None,
    has_words: bool = True,
) -> list[str] | None:
    """Return the words after a program's own flags; None once help is printed."""
    words = values(argv)[1:]
    if words and not has_words:
        raise ValueError(f"unexpected argument {words[0]!r}; flags begin with --")
    if not values.help:
        return words
    if sections is None:
        sections = {"Flags": options(values)}
    print(render(shown(doc), sections))
    return None


def refuse(error: Exception, known: Collection[str]) -> int:
    """Print an error as one line, and return the exit code of wrong flags."""
    print(f"error: {one_line(error, known)}", file=sys.stderr)
    return flags.USAGE_ERROR


def with_run_flags(
    main: Callable[[], None],
    doc: str | None,
    define: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Return the command of a program whose flags are in `flags.FLAGS`."""

    def cli() -> None:
        define()
        flags.run_main(main, shown(doc))

    return cli


def with_own_flags(main: Callable[[Sequence[str]], int]) -> Callable[[], NoReturn]:
    """Return the command of a program that parses its words and returns a code."""

    def cli() -> NoReturn:
        end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
        full = ("--help=all", "--helpfull")  # These programs have few flags.
        words = ["--help" if word in full else word for word in sys.argv[:end]]
        with as_a_command():
            code = main(words + sys.argv[end:])
        sys.exit(code)

    return cli
