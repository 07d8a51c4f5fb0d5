"""Rows of the comparison, one per network and method: JSON, a table, Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cocodc_jax.report.units import format_bytes

from .lab_run import Measured
from .measure import Pace

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
    apart_step_s, measured = alone.pace.step_s, run.pace
    if measured.stall_s is None:  # Every step waits; nobody but the clock tells.
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
    lab, simulated = entry["measured"], entry["simulated"]
    ratios = entry["simulated_over_measured"]
    return names + [
        f"{lab['step_s']:.3f}",
        f"{lab['slowdown']:.2f}",
        f"{simulated['slowdown']:.2f}",
        _number(ratios["step_s"]),
        _number(lab["stall_s"]),
        _number(simulated["stall_s"]),
        _number(ratios["stall_s"] if _is_stalled(lab) else None),
        _number(lab["sync_s"]),
        _number(ratios["sync_s"]),
        format_bytes(entry["sent_bytes"]),
        format_bytes(entry["relayed_bytes"]),
        _number(_ratio(entry["wire_bytes"], entry["relayed_bytes"])),
    ]


def _is_stalled(lab: dict[str, Any]) -> bool:
    """Return whether the stall is long enough for a ratio to be meaningful."""
    stall_s = lab["stall_s"]
    return stall_s is not None and stall_s >= _LEAST_STALL * 100 * lab["step_s"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for a terminal."""
    out = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, head in enumerate(HEADS):
        out.add_column(head, justify="left" if i < 2 else "right", no_wrap=True)
    for entry in rows:
        out.add_row(*cells(entry))
    return out


def note(alone: Measured) -> str:
    """Return an explanation of the columns, with the run without a network."""
    return (
        f"Without a network: {alone.pace.step_s:.3f} s per step, and "
        f"{format_bytes(alone.relayed_bytes)} relayed to begin and to evaluate. {_NOTE}"
    )


def markdown(rows: Sequence[dict[str, Any]], alone: Measured, command: str) -> str:
    """Return the table, the failures and the command as Markdown text."""
    lines = [
        note(alone),
        "",
        f"| {' | '.join(HEADS)} |",
        f"|{'---|' * 2}{'---:|' * (len(HEADS) - 2)}",
        *(f"| {' | '.join(cells(entry))} |" for entry in rows),
        "",
        *(_told(entry) + "\n" for entry in rows if "error" in entry),
        f"    {command}",
    ]
    return "\n".join(lines) + "\n"


def _told(entry: dict[str, Any]) -> str:
    return f"Failed: {entry['network']}, {entry['method']}: {entry['error']}"
