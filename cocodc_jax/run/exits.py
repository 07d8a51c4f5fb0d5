"""How programs end: one line for an error, and the exit code.

Needs no JAX: the network lab's programs start without it.
"""

import contextlib
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Container, Iterator
from typing import NoReturn

from cocodc_jax.files import TransientError, UnwritableError

USAGE_ERROR = 2
STOPPED = 75  # EX_TEMPFAIL: the same command goes on, so that schedulers try again.


def one_line(error: Exception | str, flags: Container[str]) -> str:
    """Return an error as one line, with the flag as the user types it.

    >>> one_line(ValueError("steps=0 must be at least 1"), ["steps"])
    '--steps=0 must be at least 1'
    >>> one_line("flag --steps=ten: must be a whole number", ["steps"])
    '--steps=ten must be a whole number'
    """
    line = " ".join(str(error).split())
    # absl's form of a flag parser's error, see `command_line`.
    line = re.sub(r"^flag (--\w+=.*?): (?=must be )", r"\1 ", line)
    name = re.match(r"[a-z_0-9]+(?==)", line)
    return f"--{line}" if name and name[0] in flags else line


def refuse(error: Exception | str, flags: Container[str]) -> NoReturn:
    """Print an error of a command line as one line, and exit."""
    print(f"error: {one_line(error, flags)}", file=sys.stderr)
    sys.exit(1 if isinstance(error, TransientError) else USAGE_ERROR)


@contextlib.contextmanager
def as_a_command() -> Iterator[None]:
    """Exit as commands do: on Ctrl-C, a full disk, or a closed pipe of its output."""
    try:
        with while_writable():
            yield
            if sys.stdout:  # As `>&-` closes it.
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise  # It was another pipe.
        # Python flushes again at exit, and would report that too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def say_once(handler: logging.Handler) -> None:
    """Leave out tracebacks of errors in threads that are reported elsewhere.

    Orbax logs the errors of its threads, and asyncio those of its tasks, but
    `Checkpoints` raises them. TensorBoard's thread ends with the errors of its files.
    """
    handler.addFilter(_is_said_here_only)
    others = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        of = type(args.thread).__module__
        if not (of.startswith("tensorboardX") and isinstance(args.exc_value, OSError)):
            others(args)

    threading.excepthook = hook


def _is_said_here_only(record: logging.LogRecord) -> bool:
    is_of_orbax = "orbax" in record.pathname
    if is_of_orbax and record.levelno < logging.ERROR:
        return False  # About itself: nothing that a user can change.
    is_of_saving = is_of_orbax or record.name == "asyncio"
    return not (record.exc_info and is_of_saving)


@contextlib.contextmanager
def while_writable() -> Iterator[None]:
    """Exit with one line if a result cannot be written, as on a full disk."""
    try:
        yield
    except UnwritableError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _is_unread(descriptor: int) -> bool:
    """Return whether the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
