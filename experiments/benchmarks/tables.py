"""Tables of timings: ratios first, then tokens per second and seconds of the start."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich import box
from rich.table import Table

from .turns import Timing

# The references of the ratios, if they were timed.
AGAINST = ("drjax", "scan alone", "plain loops", "torch")


def speeds(title: str, tokens: int, timings: Mapping[str, Timing]) -> Table:
    """Make a row for each contender."""
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    against = [name for name in AGAINST if name in timings]
    heads = [f"over {name}" for name in against]
    for head in (*heads, "k tokens/s", "lowest, highest", "start s"):
        table.add_column(head, justify="right")
    for name, timing in timings.items():
        ratios = [
            f"{statistics.median(timing.ratios(timings[other])):.2f}"
            for other in against
        ]
        low, high = (tokens / end(timing.seconds) for end in (max, min))
        table.add_row(
            name,
            *ratios,
            f"{tokens / timing.median_s / 1000:.2f}",
            f"{low / 1000:.2f}, {high / 1000:.2f}",
            f"{timing.compile_s:.1f}",
        )
    return table
