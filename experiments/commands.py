"""How the programs here are started, shown, and called where they are installed.

In a checkout `python -m experiments.train` is a program; from a wheel the same file is
`cocodc_jax.experiments.train`, and the command `cocodc-train`, which is this module's
`train`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cocodc_jax._extras import MissingExtraError, extra
from cocodc_jax.run.messages import as_a_command

IS_INSTALLED = __package__ != "experiments"


def python_m(program: str) -> list[str]:
    """Return the words that start a program as another process.

    Args:
      program: its module here, such as "train".
    """
    return [sys.executable, "-m", f"{__package__}.{program}"]


def shown(text: str | None) -> str:
    """Return a text with programs called as they can be called here.

    Args:
      text: in which they are called as in a checkout.
    """
    return as_installed(text or "") if IS_INSTALLED else text or ""


def as_installed(text: str) -> str:
    """Return a text with programs called by the names of their commands.

    >>> as_installed("python -m experiments.probe_network, as `experiments.wan`")
    'cocodc-probe-network, as `cocodc-wan`'
    """
    return re.sub(
        r"(?:python -m )?\bexperiments\.(\w+)",
        lambda found: "cocodc-" + found[1].replace("_", "-"),
        text,
    )


def command_line(program: str, words: Sequence[str]) -> str:
    """Return the command line of a program, to be written beside its results.

    Args:
      program: its module here.
      words: its flags.
    """
    return " ".join([shown(f"python -m experiments.{program}"), *words])


def end_with(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a program that returns its exit code, and end with it."""
    with as_a_command():
        code = main(sys.argv)
    sys.exit(code)


def _call(program: str) -> int | str | None:
    """Import a program and run it; what is not installed is said in one line."""
    try:
        with extra("all"):
            module = importlib.import_module(f"{__package__}.{program}")
    except MissingExtraError as error:
        return f"error: {error}"
    return module.cli()


def __getattr__(name: str) -> Callable[[], int | str | None]:
    """Return the command of the program of that name."""
    if name[0] == "_" or not importlib.util.find_spec(f"{__package__}.{name}"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(_call, name)
