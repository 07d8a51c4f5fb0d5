"""Rows of the comparison, one per network and method: JSON, tables, a plot."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.table import Table

from cocodc_jax.report import palette
from cocodc_jax.report.plots import new_figure
from cocodc_jax.report.units import format_bytes

from .. import program
from .lab_run import Measured, Pace

HEADS = (
    "network",
    "method",
    "s/step",
    "slowdown",
    "simulated",
    "sim/lab",
    "stall",
    "simulated",
    "sim/lab",
    "sync",
    "sim/lab",
    "sent",
    "relayed",
    "sim/lab",
)
_LOWEST = 0.9  # Of the plot's axis; 1 is as fast as without a network.
_LEAST_STALL = 0.01  # of the time
_NOTE = (
    "Slowdown: seconds per step over those of the same steps without a network, "
    "measured and simulated. Stall: seconds of waiting in 100 steps, mean over regions "
    "(where every step exchanges, what it takes longer than without a network), "
    "measured and simulated, and their ratio where that is at least a hundredth of the "
    "time. "
    "Sync: seconds of one, mean. Sent: bytes of one region in the whole run, as the "
    "program counts; relayed: what the relay saw of the region that sent most, the "
    "bytes of regions left alone taken off; an all-reduce puts 2 (M - 1) / M of a "
    "message on the wire. sim/lab: simulated over measured, of what stands before it."
)


def row(
    network: str,
    method: str,
    run: Measured,
    simulated: Pace,
    wire_bytes: float,
    alone: Measured,
) -> dict[str, Any]:
    """Return one run's results as plain values."""
    apart_step_s = alone.pace.step_s
    measured = run.pace
    if measured.stall_s is None:  # Every step waits, so only the clock tells.
        stall_s = 100 * (measured.step_s - apart_step_s)
        measured = dataclasses.replace(measured, stall_s=stall_s)

    messages = run.relayed_bytes - alone.relayed_bytes
    return {
        "network": network,
        "method": method,
        "measured": _with_slowdown(measured, apart_step_s),
        "simulated": _with_slowdown(simulated, apart_step_s),
        "simulated_over_measured": {
            name: _ratio(getattr(simulated, name), getattr(measured, name))
            for name in ("step_s", "stall_s", "sync_s")
        },
        "fragment_bytes": list(run.fragment_bytes),
        "sent_bytes": run.sent_bytes,
        "relayed_bytes": messages,
        "wire_bytes": wire_bytes,
    }


def failure(network: str, method: str, error: Exception) -> dict[str, Any]:
    """Return the row of a failed run."""
    return {"network": network, "method": method, "error": str(error)}


def _with_slowdown(pace: Pace, apart_step_s: float) -> dict[str, Any]:
    return {**dataclasses.asdict(pace), "slowdown": pace.step_s / apart_step_s}


def _ratio(simulated: float | None, measured: float | None) -> float | None:
    return simulated / measured if simulated is not None and measured else None


def cells(entry: dict[str, Any]) -> list[str]:
    """Return one row of the table, in the order of `HEADS`."""
    names = [entry["network"], entry["method"]]
    if "error" in entry:
        return names + ["failed"] + [""] * (len(HEADS) - 3)
    lab = entry["measured"]
    simulated = entry["simulated"]
    ratios = entry["simulated_over_measured"]
    least_s = _LEAST_STALL * 100 * lab["step_s"]
    is_stalled = lab["stall_s"] is not None and lab["stall_s"] >= least_s

    return names + [
        f"{lab['step_s']:.3f}",
        f"{lab['slowdown']:.2f}",
        f"{simulated['slowdown']:.2f}",
        _number(ratios["step_s"]),
        _number(lab["stall_s"]),
        _number(simulated["stall_s"]),
        _number(ratios["stall_s"] if is_stalled else None),
        _number(lab["sync_s"]),
        _number(ratios["sync_s"]),
        format_bytes(entry["sent_bytes"]),
        format_bytes(entry["relayed_bytes"]),
        _number(_ratio(entry["wire_bytes"], entry["relayed_bytes"])),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for a terminal."""
    made = program.table(HEADS, map(cells, rows))
    for column in made.columns:
        column.no_wrap = True
    made.columns[1].justify = "left"
    return made


def note(alone: Measured) -> str:
    """Return an explanation of the columns, with the run without a network."""
    return (
        f"Without a network: {alone.pace.step_s:.3f} s per step, and "
        f"{format_bytes(alone.relayed_bytes)} relayed to begin and to evaluate. {_NOTE}"
    )


def markdown(rows: Sequence[dict[str, Any]], alone: Measured, command: str) -> str:
    """Return the table, the failures and the command as Markdown text."""
    failed = [
        f"Failed: {entry['network']}, {entry['method']}: {entry['error']}\n"
        for entry in rows
        if "error" in entry
    ]
    lines = [
        note(alone),
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * 2}{'---:|' * (len(HEADS) - 2)}",
        *(f"| {' | '.join(cells(entry))} |" for entry in rows),
        "",
        *failed,
        f"    {command}",
    ]

    return "\n".join(lines) + "\n"


def _is_rate(network: str) -> bool:
    """Return whether a network's name is its Mbit/s."""
    return network.replace(".", "", 1).isdigit()


def _order(network: str) -> tuple[float, str]:
    """Return the sort key of networks: rates, then names."""
    return (float(network) if _is_rate(network) else math.inf, network)


def slowdowns(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the ratio of seconds per step with and without a network, on a log axis."""
    rows = [entry for entry in rows if "error" not in entry]
    networks = sorted(dict.fromkeys(entry["network"] for entry in rows), key=_order)
    methods = list(dict.fromkeys(entry["method"] for entry in rows))
    color = palette.colors(methods)
    # Narrow, with letters that can be read on a phone.
    figure = new_figure(height_in=4.4, width_in=6.0)
    axes = figure.subplots()
    width = 0.4 / max(1, len(methods))
    hatched: dict[str, Any] = {"color": "white", "hatch": "////"}

    for entry in rows:
        name = entry["method"]
        left = networks.index(entry["network"]) - 0.4 + 2 * methods.index(name) * width
        looks = {"measured": {"color": color[name]}, "simulated": hatched}
        for place, (which, look) in enumerate(looks.items()):
            height = entry[which]["slowdown"]
            at = left + place * width
            look = {"edgecolor": color[name], "linewidth": 0.8} | look
            axes.bar(at, height - _LOWEST, width, _LOWEST, align="edge", **look)
        _write_slowdown(axes, left + width, entry)

    axes.set_yscale("log")
    axes.set_ylim(bottom=_LOWEST)
    axes.axhline(1, color="#999999", linewidth=0.6)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("seconds per step, 1: without network")
    ticks = [f"{x} Mbit/s" if _is_rate(x) else x for x in networks]
    axes.set_xticks(range(len(networks)), ticks)
    axes.spines[["top", "right"]].set_visible(False)

    for name in methods:
        axes.bar(0, 0, color=color[name], label=name)
    axes.bar(0, 0, edgecolor="#333333", label="simulated", **hatched)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)

    return figure


def _write_slowdown(axes: Axes, at: float, entry: dict[str, Any]) -> None:
    """Write the measured and the simulated slowdown above a pair of bars."""
    measured = entry["measured"]["slowdown"]
    axes.annotate(
        f"{measured:.2f}" if measured < 9.95 else f"{measured:.0f}",
        xy=(at, max(measured, entry["simulated"]["slowdown"])),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
        rotation=90,
    )
