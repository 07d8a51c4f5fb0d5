"""On which sizes the recommended recipe was measured, in one place.

The recipe is one or two bits with error feedback and a fragment at every step or two.
A range holds over the sweeps in `experiments/results`, which a test reads; not every
combination was run. Plans say what of a request is outside: there the order of methods
is a guess, and a loss is another model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# The least and the most of each, on i.i.d. text.
MEASURED: Mapping[str, tuple[float, float]] = {
    "parameters": (49_952, 6_496_512),
    "regions": (4, 4),
    "tokens a parameter": (0.315, 19.67),
}
# Rounding of a division, not another size.
_SLACK = 1e-2


def outside(request: Mapping[str, float]) -> list[str]:
    """Return what of a request was not measured, each in a few words.

    >>> outside({"parameters": 1e9, "regions": 4})
    ['parameters 1,000,000,000 (measured: 49,952 to 6,496,512)']
    """
    found = []
    for name, value in request.items():
        least, most = MEASURED[name]
        if not least * (1 - _SLACK) <= value <= most * (1 + _SLACK):
            measured = _text(least) + (f" to {_text(most)}" if most > least else "")
            found.append(f"{name} {_text(value)} (measured: {measured})")
    return found


def warning(request: Mapping[str, float]) -> str | None:
    """Return a sentence on what is outside; None if nothing is."""
    found = outside(request)
    if not found:
        return None
    return f"extrapolated, not measured: {', '.join(found)}; see docs/results/recipe.md"


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or math.isinf(value) else f"{value:.3g}"
