"""Times contenders in turn, so that their times can be compared, and shows them.

Machines are noisy: their speed changes with the other work on them. So the contenders
run one after the other, round by round, in one process, and each turn is compared with
the others of its round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.table import Table

from .. import program

# The references of the ratios, if they were timed.
AGAINST = ("drjax", "scan alone", "plain loops", "torch")
# Trains for a turn, waits for it, and returns all trained parameters.
Turn = Callable[[], Any]


class Timing(NamedTuple):
    """The seconds of a contender's turns."""

    # Seconds to build it and for its first turn: tracing, compiling, a turn.
    start_s: float
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """Median seconds of a turn."""
        return statistics.median(self.seconds)

    @property
    def compile_s(self) -> float:
        """Seconds of the start, without the first turn's training."""
        return max(self.start_s - self.median_s, 0.0)

    def ratios(self, other: Timing) -> list[float]:
        """Return how many times as fast it was as another in each round, sorted."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return sorted(theirs / own for own, theirs in pairs)


def take_turns(makers: Mapping[str, Callable[[], Turn]], rounds: int) -> dict:
    """Time contenders in turn."""
    turns, starts = {}, {}
    for name, make in makers.items():
        began = time.perf_counter()
        turns[name] = make()
        turns[name]()
        starts[name] = time.perf_counter() - began
    for turn in turns.values():  # Some compile what only a second cycle needs.
        turn()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            began = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - began)
    return {name: Timing(starts[name], taken) for name, taken in seconds.items()}


def speeds(title: str, tokens: int, timings: Mapping[str, Timing]) -> Table:
    """Make a row for each contender: ratios, tokens a second, seconds of the start."""
    against = [name for name in AGAINST if name in timings]
    ends = ("k tokens/s", "lowest, highest", "start s")
    heads = ("contender", *(f"over {name}" for name in against), *ends)
    rows = []
    for name, timing in timings.items():
        ratios = [statistics.median(timing.ratios(timings[x])) for x in against]
        low, high = (tokens / end(timing.seconds) / 1000 for end in (max, min))
        rows.append(
            (
                name,
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{tokens / timing.median_s / 1000:.2f}",
                f"{low:.2f}, {high:.2f}",
                f"{timing.compile_s:.1f}",
            )
        )
    looks: dict[str, Any] = {"is_ruled": True, "title_justify": "left"}
    return program.table(heads, rows, title=title, **looks)
