"""From an interval over seeds and a claimed figure to a verdict.

A part has one rule:

- `at_least = c`: a gain. It held if the interval lies above 0 and reaches c; in part if
  it lies above 0 and below c; it did not hold if the interval ends below c and does not
  lie above 0. With c = 0 ("better") it did not hold where the interval lies below 0.
- `at_most = c`: a loss or an error. It held if the interval ends at or below c; it did
  not hold if it lies above c.
- `near = [c, m]`: a prediction. It held if the interval lies within c - m and c + m; it
  did not hold if it lies outside.

What none of this decides is open: the seeds are too few. A value that no seed changes,
such as bytes, is an interval without a width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ..sweeps.cells import Interval

HELD = "held"
IN_PART = "held in part"
NOT = "did not hold"
OPEN = "open"
NOT_TRIED = "cannot be tried here"
VERDICTS = (HELD, IN_PART, NOT, OPEN, NOT_TRIED)
RULES = ("at_least", "at_most", "near")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a measured interval has to be.

    Attributes:
      kind: one of `RULES`.
      figure: what was claimed, in the unit of the measure.
      margin: with `near`, how far off it may be.
    """

    kind: str
    figure: float
    margin: float = 0.0

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the one rule of a part."""
        kinds = [kind for kind in RULES if kind in table]
        if len(kinds) != 1:
            raise ValueError(f"rules are {kinds}; a part has one of {[*RULES]}")

        kind = kinds[0]
        value = table[kind]
        numbers = value if kind == "near" and isinstance(value, list) else [value]
        if len(numbers) != (2 if kind == "near" else 1) or not all(
            isinstance(number, int | float) for number in numbers
        ):
            wanted = "[figure, margin]" if kind == "near" else "a number"
            raise ValueError(f"{kind}={value!r} must be {wanted}")
        return cls(kind, *map(float, numbers))

    def verdict(self, measured: Interval) -> str:
        """Return the verdict on one part.

        >>> rule = Rule("at_least", 21.0)
        >>> rule.verdict(Interval(20.0, 4.0)), rule.verdict(Interval(9.0, 4.0))
        ('held', 'held in part')
        >>> rule.verdict(Interval(1.0, 4.0)), rule.verdict(Interval(9.0, 20.0))
        ('did not hold', 'open')
        """
        half = measured.half or 0.0
        least = measured.mean - half
        most = measured.mean + half

        if self.kind == "at_least":
            return _gain(least, most, self.figure)
        if self.kind == "at_most":
            low = float("-inf")
            high = self.figure
        else:
            low = self.figure - self.margin
            high = self.figure + self.margin

        if low <= least and most <= high:
            return HELD
        if most < low or least > high:
            return NOT
        return OPEN

    def __str__(self) -> str:
        """Return the rule in words."""
        if self.kind == "near":
            return f"{self.figure:g} ± {self.margin:g}"
        return f"{self.kind.replace('_', ' ')} {self.figure:g}"


def _gain(least: float, most: float, figure: float) -> str:
    if least > 0:
        return HELD if most >= figure else IN_PART
    if most < max(figure, 0.0) or most <= 0:
        return NOT
    return OPEN


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim from those on its parts.

    >>> overall(["held", "did not hold"]), overall(["open", "did not hold"])
    ('held in part', 'open')
    >>> overall([])
    'cannot be tried here'
    """
    kinds = set(verdicts)
    if not kinds:
        return NOT_TRIED
    if len(kinds) == 1:
        return verdicts[0]
    if kinds & {HELD, IN_PART}:
        return IN_PART
    return OPEN
