"""Contenders that take turns: what is timed together can be compared.

These machines are noisy, and slow down and speed up together with what else runs on
them. So contenders go one after the other, again and again, in one process, and each
turn is held against the others of the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Trains for a turn, waits for it, and returns all parameters that it trained.
Turn = Callable[[], Any]


class Timing(NamedTuple):
    """What a contender's turns took.

    Attributes:
      start_s: seconds of making it and of its first turn: tracing, compiling, a turn.
      seconds: of the turns that were timed.
    """

    start_s: float
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """Median seconds of a turn."""
        return statistics.median(self.seconds)

    @property
    def compile_s(self) -> float:
        """Seconds until it could train, the first turn's own training left out."""
        return max(self.start_s - self.median_s, 0.0)

    def ratios(self, other: Timing) -> list[float]:
        """Return how many times as fast it was as another, round by round, sorted."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return sorted(theirs / own for own, theirs in pairs)


def take_turns(makers: Mapping[str, Callable[[], Turn]], rounds: int) -> dict:
    """Time contenders in turn.

    Args:
      makers: of each, by name; what they make trains for one turn and waits for it.
      rounds: turns that are timed of each.

    Returns:
      The `Timing` of each, by name.
    """
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
