"""The winners of a comparison in a sentence, and the versions behind it."""

import datetime
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from cocodc_jax._version import __version__
from cocodc_jax.report.comparison import Point, pareto
from cocodc_jax.report.units import format_bytes

PACKAGES = ("jax", "optax", "flax")


def won(comparison: Mapping[str, Any]) -> str:
    """Return the methods that no other beats at their bytes, in a sentence or two.

    A method is beaten if another one ends with less loss and sends at most as much.
    """
    rows = comparison["methods"]
    points = [
        Point(
            label=name,
            family=name,
            bytes_per_step=row["bytes_sent_per_region"]["mean"],
            loss=row["eval_loss"]["mean"],
        )
        for name, row in rows.items()
    ]
    best = [points[index] for index in pareto(points)]
    listed = [
        f"{point.label} (loss {point.loss:.3f}, {format_bytes(point.bytes_per_step)} "
        "from each region)"
        for point in best
    ]
    verb = "wins" if len(listed) == 1 else "win"
    sentence = (
        f"{_joined(listed)} {verb} at the bytes sent: every other method sends more "
        "for a loss that is no lower."
    )
    if len(listed) == len(rows):
        sentence = f"None of {_joined(listed)} beats another: more bytes, less loss."

    seeds = max(len(row["seeds"]) for row in rows.values())
    if seeds == 1:
        sentence += " One seed gives no order between close losses."
    return sentence


def _joined(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def versions() -> str:
    """Return the versions that a run depends on, and today's date."""
    numbers = [f"cocodc_jax {__version__}"]
    numbers += [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{', '.join(numbers)}; {today}."
