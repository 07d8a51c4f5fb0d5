"""How the seconds of a turn grow with regions, fragments and layers."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from rich.console import Console

from .. import program
from . import contenders
from .cases import make_case
from .turns import take_turns

# Regions and fragments are of the preset smoke, fragments with 32 layers; layers of the
# GPT.
GROWTHS = {
    "regions": (1, 4, 16, 64),
    "fragments": (1, 4, 8, 16, 32),
    "layers": (1, 2, 4, 8),
}
LEAST_INTERVAL = 40  # Of fragments: each of 32 has a step of its own to leave at.


def check(names: Iterable[str]) -> None:
    """Refuse a name that is not in `GROWTHS`."""
    for name in names:
        if name not in GROWTHS:
            raise ValueError(f"growth={name!r} is unknown; use {list(GROWTHS)}")


def show(name: str, interval: int, rounds: int, console: Console) -> None:
    """Time a method at every size, and print the seconds of a turn and of the start.

    The method is cocodc; for layers it is diloco, so that only the layers grow.
    """
    sizes = GROWTHS[name]
    timings = take_turns({str(n): _maker(name, n, interval) for n in sizes}, rounds)
    heads = (name, "seconds of a turn", f"over {sizes[0]} {name}", "start s")
    first = timings[str(sizes[0])].median_s
    rows = [
        (size, f"{t.median_s:.3f}", f"{t.median_s / first:.2f}", f"{t.compile_s:.1f}")
        for size, t in timings.items()
    ]
    looks = program.SIMPLE | {"title_justify": "left"}
    title = _what_grows(name, interval)
    console.print(program.table(heads, rows, title=title, **looks))
    console.print(
        f"Rounds: {rounds}, medians of them. A ratio of 2 takes twice as long.",
        highlight=False,
    )


def _what_grows(name: str, interval: int) -> str:
    over = f"4 regions on {_devices()} devices" if _devices() > 1 else "4 regions"
    longer = f"H {max(interval, LEAST_INTERVAL)}"
    return {
        "regions": f"cocodc of smoke: all regions on one device, H {interval}",
        "fragments": f"cocodc of smoke with 32 layers: {over}, {longer}",
        "layers": f"diloco of gpt: {over}, H {interval}",
    }[name]


def _devices() -> int:
    """Return the number of devices that four regions share."""
    there = len(jax.devices())
    return max(n for n in (1, 2, 4) if n <= there)


def _maker(name: str, size: int, interval: int):
    if name == "regions":  # All on one device: what is to grow is linear.
        case = make_case("smoke", size, interval)
        return contenders.region_program(case, "cocodc", 1, num_fragments=4)
    if name == "fragments":
        case = make_case("smoke", 4, max(interval, LEAST_INTERVAL), num_layers=32)
        return contenders.region_program(case, "cocodc", _devices(), num_fragments=size)
    case = make_case("gpt", 4, interval, num_layers=size)
    return contenders.region_program(case, "diloco", _devices())
