"""Flags from the configuration's leaves, and errors that a person can act on.

The only file that knows absl. A run's configuration is its preset with the flags
that were given; it is rebuilt from them, so its own checks always run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from experiments.config import COUNT_OR_WORD, LEAVES, TrainConfig
from experiments.configs import PRESETS
from experiments.messages import one_line
from experiments.processes import Processes

USAGE_ERROR = 2
PROCESSES = tuple(field.name for field in dataclasses.fields(Processes))


class _CountOrWord(flags.ArgumentParser):
    """A whole number becomes one; what else there may be, the configuration says."""

    syntactic_help = "a whole number or a word"

    def parse(self, argument: int | str) -> int | str:
        text = str(argument)
        return int(text) if text.lstrip("-").isdecimal() else text


def _define_count_or_word(name: str, default: int | str | None, text: str) -> None:
    flags.DEFINE(_CountOrWord(), name, default, text)


_DEFINE = {
    COUNT_OR_WORD: _define_count_or_word,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    str: flags.DEFINE_string,
}


def define(without: Sequence[str] = ()) -> None:
    """Defines `--preset`, `--workdir` and a flag for every leaf.

    Args:
      without: leaves that the program gives another flag for.
    """
    presets = ", ".join(PRESETS)
    flags.DEFINE_string("preset", "tiny", f"Named configuration: {presets}.")
    flags.DEFINE_string(
        "workdir", None, "Folder of the run; an interrupted run goes on there."
    )
    flags.DEFINE_string(
        "coordinator_address", None, "host:port of process 0, for several processes."
    )
    flags.DEFINE_integer(
        "num_processes",
        None,
        "Processes that share the regions, or several to a region; 0 asks the cluster "
        "(SLURM, GKE, TPU, MPI). Default: a launcher's, or 1.",
    )
    flags.DEFINE_integer("process_id", None, "Which of the processes this one is.")
    flags.DEFINE_integer(
        "start_timeout_s", None, "Seconds to wait until all processes have started."
    )
    flags.DEFINE_integer(
        "heartbeat_timeout_s",
        None,
        "Seconds of silence after which a process is taken for dead and all others "
        "end; more than the longest outage of the network. Default: 30.",
    )
    for name, leaf in LEAVES.items():
        if name not in without:
            text = leaf.help[:1].upper() + leaf.help[1:]
            _DEFINE[leaf.type](name, None, f"{text} Default: the preset's.")
    for name in ("preset", "workdir", *PROCESSES, *LEAVES):
        if name not in without:  # `--help` shows the key flags of the program.
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def given(name: str) -> bool:
    """Whether the flag stands on the command line."""
    return bool(flags.FLAGS[name].present)


def value(name: str) -> Any:
    """The flag's value."""
    return flags.FLAGS[name].value


def processes() -> Processes:
    """Who takes part: the flags, over what a launcher has set.

    Raises:
      ValueError: naming the flag, its value and what would be right.
    """
    return Processes.from_environment(
        **{name: value(name) for name in PROCESSES if given(name)}
    )


def config(without: Sequence[str] = ()) -> TrainConfig:
    """The preset with the flags given.

    Args:
      without: leaves that were not defined, see `define`.

    Raises:
      ValueError: for an unknown preset or a value that the configuration refuses.
    """
    if value("preset") not in PRESETS:
        raise ValueError(
            f"preset={value('preset')!r} is unknown; use one of {sorted(PRESETS)}"
        )
    names = [name for name in LEAVES if name not in without and given(name)]
    leaves = {name: value(name) for name in names}
    return PRESETS[value("preset")].replace(**leaves)


def run_main(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; a flag that is wrong exits with code 2."""

    def call(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file.
        if len(argv) > 1:
            _exit(f"unexpected argument {argv[1]!r}; flags begin with --")
        main()

    app.run(call, flags_parser=_parse)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a `ValueError` of the set-up into one line and exit code 2.

    Only what is raised before training starts belongs inside: a `ValueError` of the
    training itself must keep its traceback.
    """
    try:
        yield
    except (ValueError, flags.Error) as error:
        _exit(str(error))


def parse(argv: Sequence[str]) -> None:
    """Reads the flags of a command line that may have nothing else.

    Args:
      argv: the program's name, and flags.
    """
    rest = _parse(argv)
    if len(rest) > 1:
        _exit(f"unexpected argument {rest[1]!r}; flags begin with --")


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(str(error))


def _exit(message: str) -> NoReturn:
    print(f"error: {one_line(message, flags.FLAGS)}", file=sys.stderr)
    sys.exit(USAGE_ERROR)
