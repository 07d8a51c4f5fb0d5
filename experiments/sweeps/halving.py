"""Successive halving: short runs of everything, longer runs of what did best.

Rung i trains what is left for r_i steps over the tuning seeds, each a whole run whose
learning rate ends at r_i. Of the n that compete under one key the best
max(w, ceil(keep n)) go on, after the last rung the best w (Jamieson and Talwalkar,
arXiv 1502.07943, without its doubling of the budget). What wins is trained anew with
the final seeds, which no choice has seen.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_LAST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Halving:
    """How the best of the settings are found."""

    rungs: tuple[int, ...]  # Inner steps of the runs of each rung, increasing.
    tuning_seeds: tuple[int, ...]  # Of the rungs.
    final_seeds: tuple[int, ...]  # Of what wins, others than those.
    # Share of the settings under one key that goes on to the next rung.
    keep: float = 0.5
    # Flags that settings must have in common to compete; none is all that are not
    # tuned, so that each cell of the table has a winner.
    by: tuple[str, ...] = ()
    winners: int = 1  # Settings of each key that get the final seeds.

    def __post_init__(self):
        rungs = _listed(self.rungs)
        if not _are_whole(rungs) or rungs != sorted(set(rungs)) or rungs[0] < 1:
            raise ValueError(
                f"rungs={rungs!r} must be increasing whole numbers of steps, of at "
                "least 1, such as [100, 400]"
            )
        if type(self.keep) is not float or not 0 < self.keep < 1:
            raise ValueError(f"keep={self.keep!r} must be in (0, 1)")
        if type(self.winners) is not int or self.winners < 1:
            raise ValueError(
                f"winners={self.winners!r} must be a whole number of at least 1"
            )
        for name in ("tuning_seeds", "final_seeds"):
            check_seeds(name, getattr(self, name))
        if both := sorted({*self.tuning_seeds} & {*self.final_seeds}):
            raise ValueError(
                f"final_seeds={list(self.final_seeds)} must be others than "
                f"tuning_seeds, which have {both} too: a figure on a seed that chose "
                "it is too good"
            )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Halving:
        """Return what a table of a grid file says."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        needed = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
        if odd := sorted((table.keys() - fields.keys()) | (needed - table.keys())):
            raise ValueError(
                f"[halving] has missing or unknown keys {odd}; it has {list(fields)}"
            )
        lists = {n: tuple(v) for n, v in table.items() if isinstance(v, list)}
        return cls(**{**table, **lists})

    def survivors(self, num: int, rung: int) -> int:
        """Return how many of `num` settings under one key are left after a rung.

        >>> halving = Halving((10, 20, 40), (8,), (9,))
        >>> [halving.survivors(n, i) for i, n in enumerate((9, 5, 3))]
        [5, 3, 1]
        """
        if rung == len(self.rungs) - 1:
            return min(num, self.winners)
        return min(num, max(self.winners, math.ceil(self.keep * num)))

    def counts(self, num: int) -> list[int]:
        """Return how many settings under one key each rung trains.

        Nothing is trained where there is nothing left to choose.

        >>> Halving((10, 20, 40), (8,), (9,)).counts(9)
        [9, 5, 3]
        >>> Halving((10, 20, 40), (8,), (9,)).counts(1)
        [0, 0, 0]
        """
        counts = []
        for rung in range(len(self.rungs)):
            counts.append(num if num > self.winners else 0)
            num = self.survivors(num, rung)
        return counts


def check_seeds(name: str, seeds: Any) -> tuple[int, ...]:
    """Return seeds that are whole numbers, each once."""
    seeds = _listed(seeds)
    ok = _are_whole(seeds) and len(set(seeds)) == len(seeds)
    if not ok or not 0 <= min(seeds) <= max(seeds) <= _LAST_SEED:
        raise ValueError(
            f"{name}={seeds!r} must be a list of whole numbers from 0 to {_LAST_SEED}, "
            "each once, such as [0, 1]"
        )
    return tuple(seeds)


def _listed(values: Any) -> Any:
    """Return a tuple as the list that a file has it as."""
    return list(values) if isinstance(values, tuple) else values


def _are_whole(values: Any) -> bool:
    is_list = isinstance(values, list) and len(values) > 0
    return is_list and all(type(value) is int for value in values)


def best(
    halving: Halving,
    rung: int,
    settings: Sequence[T],
    keys: Sequence[Hashable],
    losses: Sequence[Sequence[float | None]],
) -> list[T]:
    """Return the settings that go on, in the order they have."""
    finite = ([math.inf if x is None else x for x in each] for each in losses)
    means = [*map(statistics.fmean, finite)]
    kept: set[int] = set()
    for key in dict.fromkeys(keys):
        rivals = [i for i, k in enumerate(keys) if k == key]
        rivals.sort(key=lambda i: (means[i], i))
        kept.update(rivals[: halving.survivors(len(rivals), rung)])
    return [setting for i, setting in enumerate(settings) if i in kept]
