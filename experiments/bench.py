"""Times this framework and others on the same model.

    python -m experiments.bench
    python -m experiments.bench --cases= --growth=regions,fragments,layers

Each contender trains one model with the same batches and inner optimizer:

- this package's diloco, streaming_diloco and cocodc, with one device a region and with
  all regions on one;
- `drjax`: a DiLoCo round of DrJAX, if it is installed (the extra `bench`);
- `transform` and `transform cocodc`: diloco, and cocodc with an event at every step, as
  one Optax transform (`cocodc_jax.synchronized`) in a scan;
- `scan alone`: a `shard_map` of a scan that never syncs, the limit of the inner step;
- `plain loops`: a scan of Optax steps for each region, one after the other on one
  device;
- `torch`: a plain DiLoCo loop of PyTorch, if it is installed, for the case gpt.

All are timed in turn, round by round, within one process. Because the speed of a
machine changes with its other work, compare them by the ratios. A ratio says how many
times as fast the row is as the column. It is the median over rounds. `--contenders`
selects some of them. `--growth` uses other models and layouts, and prints them.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import jax
from rich.console import Console
from rich.table import Table

import cocodc_jax as cc
from cocodc_jax.run.config import flags

from . import program
from .benchmarks import contenders
from .benchmarks.cases import CASES, GPT, Case, make_case
from .benchmarks.contenders import Turn

METHODS = {
    "diloco": {},
    "streaming_diloco": {"num_fragments": 4, "delay_steps": 2},
    "cocodc": {"num_fragments": 4, "delay_steps": 2},
}
TRANSFORMS = {"transform": "diloco", "transform cocodc": "cocodc"}
# The references of the ratios, if they were timed.
AGAINST = ("drjax", "scan alone", "plain loops", "torch")
CONTENDERS = (*METHODS, *TRANSFORMS, "scan alone", "plain loops", "drjax", "torch")
# Regions and fragments are of the preset smoke, fragments with 32 layers; layers of the
# GPT.
GROWTHS = {
    "regions": (1, 4, 16, 64),
    "fragments": (1, 4, 8, 16, 32),
    "layers": (1, 2, 4, 8),
}
LEAST_INTERVAL = 40  # For fragments: each of 32 starts at another step.


def main() -> None:
    """Print a table for each case and layout, and one for each kind of growth."""
    regions = flags.value("regions")
    rounds = flags.value("repeats")
    interval = flags.value("interval")

    with flags.usage_errors():
        for name in ("regions", "repeats"):
            if flags.value(name) < 1:
                raise ValueError(f"{name}={flags.value(name)} must be at least 1")

        if interval < 8 or interval % 4:
            raise ValueError(
                f"interval={interval} must be a multiple of 4 and at least 8, for four "
                "fragments and their delays"
            )

        growths = program.words("growth", flags.value("growth").split(","), GROWTHS)
        names = program.words("cases", flags.value("cases").split(","), CASES)
        if not growths and not names:
            raise ValueError("cases= is empty; name some, or add --growth")
        for name in ("devices", "contenders", "regions"):
            if flags.given(name) and not names:
                raise ValueError(
                    f"{flags.FLAGS[name].serialize()[2:]} is for cases, but cases= is "
                    f"empty; --growth has its own {name}"
                )

        wanted = _wanted(names)
        cc.use_cpu_devices(regions + 1)
        layouts = _layouts(regions)
        cases = [make_case(name, regions, interval) for name in names]

    console = Console(highlight=False)
    for case in cases:
        for num_devices in layouts:
            compare(case, num_devices, rounds, console, wanted)

    for name in growths:
        show_growth(name, interval, rounds, console)


def _layouts(regions: int) -> list[int]:
    """Return the number of devices of each layout."""
    layouts = program.numbers("devices", flags.value("devices"))
    there = len(jax.devices())  # Of a CPU as many as are asked for, of GPUs those.
    for num_devices in layouts:
        if num_devices < 1 or regions % num_devices:
            raise ValueError(
                f"devices={num_devices} does not divide regions={regions} evenly"
            )
        if num_devices > there:
            raise ValueError(
                f"devices={num_devices} is more than there are; use at most {there}"
            )

    if not layouts:
        layouts = [1, regions if regions <= there else 1]
    return [*dict.fromkeys(layouts)]  # One region has one layout.


def _wanted(cases: Sequence[str]) -> list[str]:
    """Return the names of the requested contenders; empty means all."""
    names = program.words("contenders", flags.value("contenders"), CONTENDERS)
    for name in names:
        if name in ("drjax", "torch") and not importlib.util.find_spec(name):
            raise ValueError(f"contenders={name!r} is not installed")

    if names == ["torch"] and set(cases) - {GPT}:
        raise ValueError(
            f"contenders=torch trains the case {GPT} alone; use --cases={GPT}"
        )

    return names


class Timing(NamedTuple):
    """The seconds of a contender's turns."""

    # Seconds to build it and to take its first turn: tracing, compiling, training.
    start_s: float
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """Median seconds of a turn."""
        return statistics.median(self.seconds)

    @property
    def compile_s(self) -> float:
        """Seconds of the start, without the first turn's training."""
        return max(self.start_s - self.median_s, 0.0)

    def ratios(self, other: Self) -> list[float]:
        """Return how many times as fast as another it was in each round, sorted."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return sorted(other_s / self_s for self_s, other_s in pairs)


def take_turns(makers: Mapping[str, Callable[[], Turn]], rounds: int) -> dict:
    """Time contenders in turn."""
    turns = {}
    starts = {}
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


def speeds(title: str, tokens: int, timings: Mapping[str, Timing]) -> Table:
    """Return a table: ratios, tokens a second, and seconds of the start."""
    against = [name for name in AGAINST if name in timings]
    ends = ("k tokens/s", "lowest, highest", "start s")
    heads = ("contender", *(f"over {name}" for name in against), *ends)
    rows = []

    for name, timing in timings.items():
        ratios = [statistics.median(timing.ratios(timings[x])) for x in against]
        low = tokens / max(timing.seconds) / 1000
        high = tokens / min(timing.seconds) / 1000
        cells = [f"{ratio:.2f}" for ratio in ratios]
        cells += [f"{tokens / timing.median_s / 1000:.2f}", f"{low:.2f}, {high:.2f}"]
        rows.append((name, *cells, f"{timing.compile_s:.1f}"))

    return _table(heads, rows, title)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> Table:
    return program.table(heads, rows, is_ruled=True, title=title, title_justify="left")


def compare(
    case: Case,
    num_devices: int,
    rounds: int,
    console: Console,
    wanted: Sequence[str] = (),
) -> None:
    """Time the contenders in one layout, and print the ratios."""
    makers = {
        name: partial(contenders.region_program, case, name, num_devices, **arguments)
        for name, arguments in METHODS.items()
    }
    for name, method in TRANSFORMS.items():
        options = dict(METHODS.get(method, {}))
        if method == "cocodc":
            options["syncs_per_interval"] = case.interval
        makers[name] = partial(
            contenders.transform, case, method, num_devices, **options
        )

    makers["scan alone"] = partial(contenders.scan_alone, case, num_devices)
    makers["plain loops"] = partial(contenders.plain_loops, case)
    if importlib.util.find_spec("drjax"):
        makers["drjax"] = partial(contenders.drjax_diloco, case, num_devices)

    if case.gpt and importlib.util.find_spec("torch"):
        makers["torch"] = partial(contenders.torch_diloco, case)
    elif case.gpt and not wanted:
        console.print("PyTorch is not installed, so its row is missing.")

    if wanted:
        makers = {name: make for name, make in makers.items() if name in wanted}
    timings = take_turns(makers, rounds)
    where = "one device" if num_devices == 1 else f"{num_devices} devices"
    title = f"{case.name}: {case.regions} regions on {where}, H {case.interval}"
    console.print(speeds(title, case.tokens, timings))
    console.print(f"Rounds: {rounds}, medians of them. A ratio of 2 is twice as fast.")


def show_growth(name: str, interval: int, rounds: int, console: Console) -> None:
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

    console.print(_table(heads, rows, _what_grows(name, interval)))
    console.print(
        f"Rounds: {rounds}, medians of them. A ratio of 2 takes twice as long."
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


def _maker(name: str, size: int, interval: int) -> Callable[[], Turn]:
    make = contenders.region_program
    if name == "regions":  # All on one device: what is to grow is linear.
        case = make_case("smoke", size, interval)
        return partial(make, case, "cocodc", 1, num_fragments=4)
    if name == "fragments":
        case = make_case("smoke", 4, max(interval, LEAST_INTERVAL), num_layers=32)
        return partial(make, case, "cocodc", _devices(), num_fragments=size)
    case = make_case("gpt", 4, interval, num_layers=size)
    return partial(make, case, "diloco", _devices())


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("cases", "gpt,smoke,tiny", "gpt or presets; empty for --growth alone."),
        ("regions", 4, "Regions that train, M."),
        ("interval", 12, "H, steps of a turn: a multiple of 4, at least 8."),
        ("devices", [], "Devices of the regions. Default: 1, and M if they are there."),
        (
            "contenders",
            [],
            f"Which of {', '.join(CONTENDERS)} to time. Default: all that are "
            "installed.",
        ),
        ("repeats", 5, "Rounds: timed turns of each contender."),
        (
            "growth",
            "",
            f"Show how a turn grows with {', '.join(GROWTHS)}; comma-separated.",
        ),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
