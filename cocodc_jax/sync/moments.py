"""Average the inner optimizer's moments over regions, less often than parameters.

In most methods Adam's state stays regional. DES-LOC (arXiv 2505.22549) averages it too,
the first and second moments at different intervals of syncs, as the second moments
change slowly. The moments are found by their type, `optax.ScaleByAdamState`, anywhere
in the optimizer's state. If `mu` is several momenta (`transforms.mt_adam`), all of them
are first moments.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from cocodc_jax.transforms.numerics import check_at_least

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Moments:
    """How often the moments are averaged.

    Attributes:
      first: interval of the first moments, in syncs; 0 is never.
      second: interval of the second moments.
    """

    first: int
    second: int

    def __post_init__(self):
        check_at_least("first", self.first, 0)
        check_at_least("second", self.second, 0)

    @classmethod
    def parse(cls, text: str) -> Moments | None:
        """Parse "3,6"; "0,0" and the empty text are None."""
        if not text:
            return None

        numbers = str(text).split(",")
        if len(numbers) != 2 or not all(n.strip().isdecimal() for n in numbers):
            raise ValueError(
                f"sync_moments={text!r} must be two numbers of syncs, of first and "
                "second moments, such as 3,6"
            )
        moments = cls(*map(int, numbers))
        return moments if moments.first or moments.second else None

    def due(self, sync: int) -> tuple[str, ...]:
        """Return the moments that are sent with the sync of a number, from 1.

        >>> [Moments(1, 2).due(n) for n in (1, 2)]
        [('mu',), ('mu', 'nu')]
        """
        return tuple(name for name, n in self.every.items() if n and sync % n == 0)

    @property
    def every(self) -> dict[str, int]:
        """Interval of each kind of moments."""
        return {"mu": self.first, "nu": self.second}

    def check(self, schedule: Any) -> None:
        """Refuse all but syncs of the full model in all regions, without a delay."""
        is_whole = schedule.num_fragments == 1 and schedule.delay_steps == 0
        # They count intervals.
        has_one_slot = (
            getattr(schedule, "slot_steps", 0) == schedule.sync_interval
            and getattr(schedule, "phase_steps", 0) == 0
        )
        waits_for_all = not (schedule.is_by_region or schedule.is_measured)

        if not (is_whole and has_one_slot and waits_for_all):
            raise ValueError(
                f"sync_moments={self.first},{self.second} goes with syncs of the whole "
                "model that all wait for: num_fragments=1 and delay_steps=0"
            )


def take(opt_state: PyTree, names: tuple[str, ...]) -> list[dict[str, PyTree]]:
    """Return the moments, by name, of each Adam state in an optimizer state."""
    adams = filter(_is_adam, jax.tree.leaves(opt_state, is_leaf=_is_adam))
    return [{n: getattr(adam, n) for n in names} for adam in adams]


def put(opt_state: PyTree, moments: list[dict[str, PyTree]]) -> PyTree:
    """Return the state with the moments replaced, in the form of `take`."""
    new = iter(moments)
    return jax.tree.map(
        lambda x: x._replace(**next(new)) if _is_adam(x) else x,
        opt_state,
        is_leaf=_is_adam,
    )


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)
