"""How the seconds of a turn grow with regions, fragments and layers."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from . import contenders
from .cases import make_case
from .turns import take_turns

# Of the preset smoke, for fragments with 32 layers; layers of the GPT.
GROWTHS = {
    "regions": (1, 4, 16, 64),
    "fragments": (1, 4, 8, 16, 32),
    "layers": (1, 2, 4, 8),
}


def check(names: Iterable[str]) -> None:
    """Refuse a name that is none of `GROWTHS`.

    Raises:
      ValueError: naming it.
    """
    for name in names:
        if name not in GROWTHS:
            raise ValueError(f"growth={name!r} is unknown; use {list(GROWTHS)}")


def show(name: str, interval: int, rounds: int, console: Console) -> None:
    """Time a method at every size and print its seconds, per size and start.

    It is cocodc, but for layers: there diloco, with nothing but layers to grow.

    Args:
      name: one of `GROWTHS`.
      interval: steps of a turn, H.
      rounds: turns that are timed of each size.
      console: to print to.
    """
    sizes = GROWTHS[name]
    timings = take_turns({str(n): _maker(name, n, interval) for n in sizes}, rounds)
    table = Table(name, box=box.SIMPLE, pad_edge=False)
    for head in ("seconds of a turn", f"over {sizes[0]} {name}", "start s"):
        table.add_column(head, justify="right")
    first = timings[str(sizes[0])].median_s
    for size, timing in timings.items():
        table.add_row(
            size,
            f"{timing.median_s:.3f}",
            f"{timing.median_s / first:.2f}",
            f"{timing.compile_s:.1f}",
        )
    console.print(table)


def _maker(name: str, size: int, interval: int):
    if name == "regions":  # All on one device: what is to grow is linear.
        case = make_case("smoke", size, interval)
        return contenders.region_program(case, "cocodc", 1, num_fragments=4)
    if name == "fragments":
        case = make_case("smoke", 4, max(interval, 40), num_layers=32)
        devices = min(4, len(jax.devices()))
        return contenders.region_program(case, "cocodc", devices, num_fragments=size)
    case = make_case("gpt", 4, interval, num_layers=size)
    return contenders.region_program(case, "diloco", min(4, len(jax.devices())))
