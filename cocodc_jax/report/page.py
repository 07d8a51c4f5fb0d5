"""One self-contained HTML page of a comparison: tables, plots, command, configuration.

Images are embedded and nothing is fetched, so the file can be mailed or archived. The
most important columns come first, in a table that fits a window of 800 pixels; the
others are in a second table.
"""

import base64
import html
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cocodc_jax.report.units import format_bytes, format_count, format_duration

Row = Mapping[str, Any]  # A method's values, from `comparison.compare`.
Column = tuple[str, Callable[[Row], str]]  # Its name, and HTML of a method's cell.

# Below 48rem (768 pixels) rows become blocks: each cell shows its own head instead of
# the columns' heads.
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --quiet: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2, summary { font-size: 1.15rem; font-weight: bold; }
h2, details { margin-top: 2rem; } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; vertical-align: top; padding: .35rem .5rem;
         border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { vertical-align: bottom; white-space: normal; }
th:first-child { text-align: left; }
th[scope=row] { font-weight: normal; white-space: normal; overflow-wrap: anywhere;
                min-width: 8rem; }
td small { display: block; opacity: .7; line-height: 1.2; white-space: normal; }
td small:first-child { display: inline; }
td.diverged { text-align: left; white-space: normal; }
p { overflow-wrap: anywhere; } .winner { font-weight: bold; }
.note { opacity: .8; font-size: .9rem; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; padding: .5rem;
         box-sizing: border-box; border-radius: 4px; }
figcaption { opacity: .8; }
pre { background: var(--quiet); padding: .8rem; border-radius: 4px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 64rem) { th, td { font-size: .85rem; padding: .35rem .3rem; } }
@media (max-width: 48rem) {
  thead { display: none; } table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr));
       gap: .3rem .8rem; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  th[scope=row], td.diverged { grid-column: 1 / -1; }
  th[scope=row] { font-weight: bold; }
  th, td { border: 0; padding: 0; text-align: left; white-space: normal;
           font-size: 1rem; }
  td::before { content: attr(data-head); font-size: .75rem; opacity: .7; }
}
"""


def render(
    comparison: Mapping[str, Any],
    pictures: Mapping[str, bytes],
    command: str,
    config: Mapping[str, Any],
    machine: str,
    winner: str,
    settings: Mapping[str, Mapping[str, str]],
    versions: str,
) -> str:
    """Render the page as HTML text.

    Args:
      comparison: from `comparison.compare`.
      pictures: PNG files by their captions, in the order they are shown.
      command: the command line that makes this page again.
      config: the configuration that all runs share, as plain values.
      machine: from `describe_machine`.
      winner: from `winner.won`, a sentence.
      settings: of each run, by its name and by the name of a setting.
      versions: of packages, and the date.
    """
    methods = comparison["methods"]
    some = next(iter(methods.values()))["runs"][0]
    seeds = max(len(row["seeds"]) for row in methods.values())
    heading = f"{len(methods)} methods, {some['regions']} regions"
    facts = (
        f"Preset {some['preset']}: {some['parameters']:,} parameters, "
        f"{some['steps']:,} inner steps, {some['tokens']:,} tokens, "
        f"{seeds} seed{'s' if seeds > 1 else ''}. {machine}"
    )
    figures = "\n".join(_figure(caption, png) for caption, png in pictures.items())

    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(heading)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(heading)}</h1>
<p>{html.escape(facts)}</p>
<p class="winner">{html.escape(winner)}</p>
{results(comparison)}
<p class="note">{html.escape(results_note(comparison))}</p>
{figures}
<h2>Further measures</h2>
{further(comparison)}
<p class="note">{html.escape(FURTHER_NOTE)}</p>
<h2>Settings of each run</h2>
{_settings(settings)}
<p class="note">{html.escape(SETTINGS_NOTE)}</p>
<h2>Command</h2>
<pre>{html.escape(command)}</pre>
<p>{html.escape(versions)}</p>
<details>
<summary>Configuration</summary>
<pre>{html.escape(json.dumps(config, indent=2))}</pre>
</details>
</body>
</html>
"""


def describe_machine(devices: Sequence[Any]) -> str:
    """Describe the machine: devices, cores, operating system."""
    kinds = sorted({str(device.device_kind) for device in devices})
    noun = "devices" if len(devices) > 1 else "device"
    return (
        f"{len(devices)} {' and '.join(kinds)} {noun} on "
        f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}, "
        f"Python {platform.python_version()}."
    )


def _figure(caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    caption = html.escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def results(comparison: Mapping[str, Any]) -> str:
    """Return HTML of the table of results."""
    equal_bytes = comparison["equal_bytes"]
    columns: list[Column] = [
        _measure("loss", "eval_loss", lambda x: f"{x:.4f}"),
        _measure("perplexity", "eval_perplexity", lambda x: f"{x:.3f}"),
        ("steps to target", _steps_to_target),
    ]

    if equal_bytes is not None:
        head = f"loss at {format_bytes(equal_bytes)}"
        columns.append((head, lambda row: _loss_at_bytes(row, equal_bytes)))

    columns += [
        _measure("sent by a region", "bytes_sent_per_region", format_bytes),
        _measure("stall", "stall_seconds", lambda x: f"{x:.2f} s"),
    ]

    return _table(comparison, columns)


def further(comparison: Mapping[str, Any]) -> str:
    """Return HTML of the table of the other measures."""
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


def _settings(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return HTML of a table with a row for each run and a column for each setting."""
    heads = [html.escape(head) for head in next(iter(settings.values()))]
    lines = ["<table>", "<thead>", "<tr>", '<th scope="col">run</th>']
    lines += [f'<th scope="col">{head}</th>' for head in heads]
    lines += ["</tr>", "</thead>", "<tbody>"]

    for name, values in settings.items():
        lines += ["<tr>", f'<th scope="row">{html.escape(name)}</th>']
        lines += [
            f'<td data-head="{head}"><div>{html.escape(value)}</div></td>'
            for head, value in zip(heads, values.values(), strict=True)
        ]
        lines.append("</tr>")

    return "\n".join([*lines, "</tbody>", "</table>"])


def results_note(comparison: Mapping[str, Any]) -> str:
    """Explain the columns of `results`, as plain text."""
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


SETTINGS_NOTE = (
    "H: steps in which every fragment is sent once. K: fragments. tau: steps from a "
    "fragment's start to its merge. alpha: the share of its own parameters that a "
    "region keeps at a merge. Outer rate and momentum: of the optimizer that steps on "
    "the regions' mean progress. A dash: the method has no such setting."
)


def _measure(head: str, key: str, write: Callable[[float], str]) -> Column:
    return head, lambda row: _spread(row[key], write)


def _spread(measure: Mapping[str, float] | None, write: Callable[[float], str]) -> str:
    if measure is None:
        return "&ndash;"
    cell = html.escape(write(measure["mean"]))
    if measure["half_range"]:
        cell += f"<small>&plusmn; {html.escape(write(measure['half_range']))}</small>"
    return cell


def _steps_to_target(row: Row) -> str:
    steps = row["steps_to_target"]
    reached = row["seeds_at_target"]
    if steps is None:
        return "<small>never</small>"
    seeds = len(row["seeds"])
    missed = f"<small>{reached} of {seeds} seeds</small>" if reached < seeds else ""
    return f"{steps:.0f}{missed}"


def _loss_at_bytes(row: Row, equal_bytes: float) -> str:
    spread = row["loss_at_equal_bytes"]
    if spread is not None:
        return _spread(spread, lambda x: f"{x:.4f}")
    first, last = row["evaluated_bytes"]
    why = "sends less" if last < equal_bytes else f"from {format_bytes(first)}"
    return f"<small>{html.escape(why)}</small>"


def _table(comparison: Mapping[str, Any], columns: Sequence[Column]) -> str:
    columns = [(html.escape(head), cell) for head, cell in columns]
    lines = ["<table>", "<thead>", "<tr>", '<th scope="col">method</th>']
    lines += [f'<th scope="col">{head}</th>' for head, _ in columns]
    lines += ["</tr>", "</thead>", "<tbody>"]

    for name, row in comparison["methods"].items():
        lines += ["<tr>", f'<th scope="row">{html.escape(name)}</th>']
        # A narrow window shows no heads: each cell brings its own.
        lines += [
            f'<td data-head="{head}"><div>{cell(row)}</div></td>'
            for head, cell in columns
        ]
        lines.append("</tr>")

    for name, why in comparison["diverged"].items():
        lines += ["<tr>", f'<th scope="row">{html.escape(name)}</th>']
        lines.append(
            f'<td class="diverged" colspan="{len(columns)}">diverged: '
            f"{html.escape(why)}</td>"
        )
        lines.append("</tr>")

    return "\n".join([*lines, "</tbody>", "</table>"])
