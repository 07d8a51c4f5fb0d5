"""Power laws of a sweep's losses: over parameters, regions and the sync interval.

The form is that of arXiv 2503.09799 (section on scaling laws: L = A N^alpha M^beta,
fitted in logarithms), with one more factor H^gamma. A factor that does not vary is left
out. The fit is ordinary least squares of log L. Intervals are Student's at 95 % for
that linear model. They include the scatter of the points about the law, but not an
error in its form, which `held_out` tests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..sweeps.cells import CONFIDENCE, Interval

PARAMETERS, REGIONS, INTERVAL = "N", "M", "H"
FACTORS = (PARAMETERS, REGIONS, INTERVAL)


@dataclasses.dataclass(frozen=True)
class Observation:
    """The result of one setting.

    Attributes:
      factors: values by name, see `FACTORS`.
      loss: nats per token.
    """

    factors: Mapping[str, float]
    loss: float


@dataclasses.dataclass(frozen=True)
class Law:
    """L = A N^alpha M^beta H^gamma, with the factors that vary.

    Attributes:
      names: names of the factors.
      coefficients: log A, then the exponents in the order of `names`.
      covariance: covariance of the coefficients.
      residual: standard deviation of log L about the law.
      quantile: Student's, for the remaining degrees of freedom.
      sizes: least and most parameters of the fit.
    """

    names: tuple[str, ...]
    coefficients: np.ndarray
    covariance: np.ndarray
    residual: float
    quantile: float
    sizes: tuple[float, float]

    def exponent(self, name: str) -> Interval | None:
        """Return the exponent of a factor; None if the law does not have it."""
        if name not in self.names:
            return None
        index = 1 + self.names.index(name)
        half = self.quantile * math.sqrt(self.covariance[index, index])
        return Interval(float(self.coefficients[index]), half)

    @property
    def scale(self) -> float:
        """A, the loss where all factors are 1."""
        return math.exp(self.coefficients[0])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the loss of a new setting with these factors, and its interval."""
        row = _row(factors, self.names)
        middle = float(row @ self.coefficients)
        variance = self.residual**2 + float(row @ self.covariance @ row)
        half = self.quantile * math.sqrt(variance)
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def fit(observations: Sequence[Observation]) -> Law:
    """Fit the law."""
    names = tuple(
        name for name in FACTORS if len({o.factors[name] for o in observations}) > 1
    )
    if PARAMETERS not in names:
        raise ValueError(
            "a scaling law needs models of several sizes; all have the same"
        )
    least = len(names) + 3
    if len(observations) < least:
        raise ValueError(
            f"{len(observations)} settings are too few for a law over "
            f"{', '.join(names)}: it takes {least}"
        )
    design = np.stack([_row(o.factors, names) for o in observations])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError(
            f"{', '.join(names)} vary together in these settings, so their exponents "
            "are not determined"
        )
    logs = np.log([o.loss for o in observations])
    coefficients, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(logs) - design.shape[1]
    residual = float(np.sqrt(np.sum((logs - design @ coefficients) ** 2) / freedom))
    from scipy import stats  # Takes a second to import.

    sizes = [o.factors[PARAMETERS] for o in observations]
    return Law(
        names,
        coefficients,
        residual**2 * np.linalg.inv(design.T @ design),
        residual,
        float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)),
        (min(sizes), max(sizes)),
    )


def held_out(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return (predicted, observed) at the largest size, by the law of smaller ones."""
    largest = max(o.factors[PARAMETERS] for o in observations)
    law = fit([o for o in observations if o.factors[PARAMETERS] < largest])
    return [
        (law.predict(o.factors)[0], o.loss)
        for o in observations
        if o.factors[PARAMETERS] == largest
    ]


def _row(factors: Mapping[str, float], names: Sequence[str]) -> np.ndarray:
    return np.array([1.0, *(math.log(factors[name]) for name in names)])
