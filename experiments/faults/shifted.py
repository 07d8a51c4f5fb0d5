"""Runs a program whose wall clock is shifted by the seconds in a file.

    python -m experiments.faults.shifted FILE MODULE ARGUMENTS

`time.time` and `time.time_ns` are shifted; monotonic clocks are unchanged. The file has
the seconds as a number, and may change while the program runs.
"""

import pathlib
import runpy
import sys
import time
from collections.abc import Callable

from cocodc_jax.files import read_regular

_LOOK_S = 0.1


def shift(path: pathlib.Path) -> None:
    """Shift this process's wall clock by the seconds in a file, if there is one."""
    time.time_ns = _shifted(time.time_ns, path, 1_000_000_000)  # pyright: ignore
    time.time = _shifted(time.time, path, 1.0)  # pyright: ignore


def _shifted(clock: Callable, path: pathlib.Path, unit: float) -> Callable:
    seconds = 0.0
    looked_s = -_LOOK_S

    def shifted() -> int | float:
        nonlocal seconds, looked_s
        now = time.monotonic()
        if now - looked_s >= _LOOK_S:
            looked_s = now
            try:
                seconds = float(read_regular(path))
            except (OSError, ValueError):
                seconds = 0.0
        return clock() + type(unit)(seconds * unit)

    return shifted


if __name__ == "__main__":
    _, file, module, *arguments = sys.argv
    shift(pathlib.Path(file))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
