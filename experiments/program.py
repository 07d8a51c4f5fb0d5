"""Common code of the programs: their own flags, their help, and their exit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from absl import flags as absl_flags

from cocodc_jax.network.links import Link, Topology, uniform
from cocodc_jax.run.config import command_line
from cocodc_jax.run.config.command_line import Row
from cocodc_jax.run.config.command_line import usage_errors as usage_errors
from cocodc_jax.run.config.help import options, render
from cocodc_jax.run.exits import as_a_command

from .commands import shown

if TYPE_CHECKING:
    from rich.table import Table

Value = TypeVar("Value")


def own_flags(
    *rows: Row, **bounds: float | tuple[float, float]
) -> absl_flags.FlagValues:
    """Return flags of a program apart from those of runs, see `command_line`."""
    values = absl_flags.FlagValues()
    command_line.define(values, [("help", False, "print this and exit")])
    command_line.define(values, rows, **bounds)
    return values


def define(*rows: Row) -> None:
    """Define flags of a program next to those of runs."""
    from cocodc_jax.run.config import flags  # JAX, which `wan` starts without.

    command_line.define(flags.FLAGS, rows)


def parse(
    values: absl_flags.FlagValues,
    argv: Sequence[str],
    doc: str | None,
    sections: Mapping[str, Sequence[Row]] | None = None,
    has_words: bool = True,
) -> list[str]:
    """Return the words after a program's own flags; exit once help is printed.

    Args:
      values: the flags.
      argv: the command line.
      doc: the program's docstring.
      sections: rows of the flags by the title of their section; None is one section.
      has_words: whether there may be words after the flags.
    """
    words = values(argv)[1:]
    if words and not has_words:
        raise ValueError(f"unexpected argument {words[0]!r}; flags begin with --")
    if not values.help:
        return words

    if sections is None:
        explained = {"Flags": options(values, values)}
    else:
        explained = {
            title: options(values, [name for name, _, _ in rows])
            for title, rows in sections.items()
        }
    print(render(shown(doc), explained), flush=True)
    sys.exit(0)


@contextlib.contextmanager
def about(subject: str) -> Iterator[None]:
    """Context that puts its subject before the text of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error


def named(flag: str, path: str, read: Callable[[str], Value]) -> Value:
    """Return read(path); file system errors name the flag."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"--{flag}={path}: {error.strerror}") from error


def numbers(flag: str, texts: Sequence[str]) -> list[int]:
    """Read the whole numbers of a flag."""
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise ValueError(
            f"{flag}={','.join(texts)} must be whole numbers separated by commas"
        ) from None


def words(flag: str, texts: Sequence[str], known: Collection[str]) -> list[str]:
    """Read the words of a flag."""
    chosen = [text.strip() for text in texts if text.strip()]
    for word in chosen:
        if word not in known:
            raise ValueError(
                f"{flag}={word!r} is unknown; use some of {', '.join(known)}"
            )
    return chosen


def topology(values: Any, gbps: float) -> Topology:
    """Return the network of --links or --world, or equal links between --regions."""
    from cocodc_jax.network import world  # YAML, which not every program needs.

    if values.links:
        return named("links", values.links, world.load_topology)
    if values.world:
        with about(f"--world={values.world}"):
            return world.world(tuple(values.world.split(",")), gbps)

    link = Link(
        gbps,
        latency_s=values.latency_ms / 1000,
        jitter_s=values.jitter_ms / 1000,
        loss=values.loss,
    )
    return uniform(values.regions, link)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    is_ruled: bool = False,
    **looks: Any,
) -> Table:
    """Return a table, whose first column has names and the others numbers.

    It has a rule below its heads or none; `looks` are those of a `rich` table.
    """
    from rich import box
    from rich.table import Table

    usual = {
        "box": box.SIMPLE if is_ruled else None,
        "padding": (0, 1) if is_ruled else (0, 2, 0, 0),
        "pad_edge": False,
    }
    result = Table(**usual | looks)

    names, *numbers = heads
    result.add_column(names, justify="left", no_wrap=True)
    for head in numbers:
        result.add_column(head, justify="right", no_wrap=False)
    for row in rows:
        result.add_row(*row)
    return result


def with_run_flags(
    main: Callable[[], int | None], doc: str | None, define: Callable[[], None]
) -> Callable[[], None]:
    """Return the command of a program whose flags are in `flags.FLAGS`."""

    def cli() -> None:
        from cocodc_jax.run.config import flags

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
