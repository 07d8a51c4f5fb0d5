"""The tables of a report: a row a method, and what each column means.

The columns that most people look for come first, in a table that fits a window of 800
pixels; the others have a table of their own. In a narrower one a row becomes a block
with its columns' names in it.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cocodc_jax.report.units import format_bytes, format_count, format_duration

Row = Mapping[str, Any]


class Column(NamedTuple):
    """One column of a table.

    Attributes:
      head: its name.
      cell: HTML of a method's cell, from the row that `comparison.compare` made.
    """

    head: str
    cell: Callable[[Row], str]


def results(comparison: Mapping[str, Any]) -> str:
    """Return HTML of the table of results."""
    equal_bytes = comparison["equal_bytes"]
    columns = [
        _measure("loss", "eval_loss", lambda x: f"{x:.4f}"),
        _measure("perplexity", "eval_perplexity", lambda x: f"{x:.3f}"),
        Column("steps to target", _steps_to_target),
    ]
    if equal_bytes is not None:
        head = f"loss at {format_bytes(equal_bytes)}"
        columns.append(Column(head, lambda row: _loss_at_bytes(row, equal_bytes)))
    columns += [
        _measure("sent by a region", "bytes_sent_per_region", format_bytes),
        _measure("stall", "stall_seconds", lambda x: f"{x:.2f} s"),
    ]
    return _table(comparison, columns)


def further(comparison: Mapping[str, Any]) -> str:
    """Return HTML of the table of what else was measured, as `results` does."""
    columns = [
        _measure("loss, outer", "eval_loss_outer", lambda x: f"{x:.4f}"),
        _measure("exposed", "exposed_share", lambda x: f"{100 * x:.1f} %"),
        _measure("goodput", "goodput", lambda x: f"{100 * x:.1f} %"),
        _measure("kept", "outer_bytes", format_bytes),
        _measure("drift", "region_drift", lambda x: f"{x:.1e}"),
        _measure("tokens/s", "tokens_per_second", format_count),
        _measure("time", "seconds", format_duration),
        _measure("correction", "correction_ratio", lambda x: f"{x:.1e}"),
    ]
    return _table(comparison, columns)


def results_note(comparison: Mapping[str, Any]) -> str:
    """Return what the columns of `results` mean, as plain text."""
    whose = comparison["target_method"] or "the worst method"
    note = (
        "Loss (nats per token) and perplexity are of the mean of the regions' "
        "parameters on held-out text, the same for every method. Steps to target: "
        f"inner steps to a loss of {comparison['target_loss']:.4f}, the last of "
        f"{whose}, linear between evaluations. "
    )
    if comparison["equal_bytes"] is not None:
        note += (
            f"Loss at {format_bytes(comparison['equal_bytes'])}: when a region has "
            f"sent what {comparison['equal_bytes_method']} sends in its whole run, "
            "linear in the bytes between evaluations; none where a run sends less in "
            "all, or is evaluated only from more on. "
        )
    note += (
        "Stall: seconds in which regions waited for messages. Methods are not equal in "
        "bytes sent: read both columns."
    )
    if max(len(row["seeds"]) for row in comparison["methods"].values()) > 1:
        note += " ± is half the range over seeds."
    return note


FURTHER_NOTE = (
    "Loss, outer: of the outer parameters. Exposed: share of a step in which something "
    "is sent and nothing computed; unknown of methods that exchange inside their "
    "steps. Kept: outer state, messages in flight and their memory, all regions. "
    "Drift: RMS distance of the regions from their mean, over its length. Time: of "
    "training, with compilation. Correction (ratio): length of the delay "
    "compensation's correction over the length of what it corrects."
)


def _measure(head: str, key: str, write: Callable[[float], str]) -> Column:
    return Column(head, lambda row: _spread(row[key], write))


def _spread(measure: Mapping[str, float] | None, write: Callable[[float], str]) -> str:
    if measure is None:
        return "&ndash;"
    cell = html.escape(write(measure["mean"]))
    if measure["half_range"]:
        cell += f"<small>&plusmn; {html.escape(write(measure['half_range']))}</small>"
    return cell


def _steps_to_target(row: Row) -> str:
    steps, reached = row["steps_to_target"], row["seeds_at_target"]
    if steps is None:
        return "<small>never</small>"
    seeds = len(row["seeds"])
    missed = f"<small>{reached} of {seeds} seeds</small>" if reached < seeds else ""
    return f"{steps:.0f}{missed}"


def _loss_at_bytes(row: Row, equal_bytes: float) -> str:
    found = row["loss_at_equal_bytes"]
    if found is not None:
        return _spread(found, lambda x: f"{x:.4f}")
    first, last = row["evaluated_bytes"]
    why = "sends less" if last < equal_bytes else f"from {format_bytes(first)}"
    return f"<small>{html.escape(why)}</small>"


def _table(comparison: Mapping[str, Any], columns: Sequence[Column]) -> str:
    heads = [html.escape(column.head) for column in columns]
    lines = ["<table>", "<thead>", "<tr>"]
    lines += [f'<th scope="col">{head}</th>' for head in ("method", *heads)]
    lines += ["</tr>", "</thead>", "<tbody>"]
    for name, row in comparison["methods"].items():
        lines += ["<tr>", f'<th scope="row">{html.escape(name)}</th>']
        # A narrow window shows no heads: each cell brings its own.
        lines += [
            f'<td data-head="{head}"><div>{column.cell(row)}</div></td>'
            for head, column in zip(heads, columns, strict=True)
        ]
        lines.append("</tr>")
    for name, why in comparison["diverged"].items():
        told = f'<td class="diverged" colspan="{len(heads)}">diverged: '
        told += f"{html.escape(why)}</td>"
        lines += ["<tr>", f'<th scope="row">{html.escape(name)}</th>', told, "</tr>"]
    return "\n".join([*lines, "</tbody>", "</table>"])
