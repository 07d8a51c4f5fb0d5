"""One self-contained HTML page of a comparison: tables, plots, command, configuration.

Images are embedded and nothing is fetched, so the file can be mailed or archived.
"""

import base64
import dataclasses
import html
import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from cocodc_jax.report import tables

# Below 48rem (768 pixels) rows become blocks: the heads of the columns are not shown,
# each cell has its own.
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
p { overflow-wrap: anywhere; } .note { opacity: .8; font-size: .9rem; }
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


@dataclasses.dataclass(frozen=True)
class Picture:
    """One plot of the page.

    Attributes:
      caption: what it shows.
      png: the file's bytes.
    """

    caption: str
    png: bytes


def render(
    comparison: Mapping[str, Any],
    pictures: Sequence[Picture],
    command: str,
    config: Mapping[str, Any],
    machine: str,
) -> str:
    """Render the page as HTML text.

    Args:
      comparison: from `comparison.compare`.
      pictures: in the order they are shown.
      command: what makes this page again.
      config: the configuration all runs share, plain values.
      machine: what it ran on, see `describe_machine`.
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
    figures = "\n".join(_figure(picture) for picture in pictures)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(heading)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(heading)}</h1>
<p>{_text(facts)}</p>
{tables.results(comparison)}
<p class="note">{_text(tables.results_note(comparison))}</p>
{figures}
<h2>Further measures</h2>
{tables.further(comparison)}
<p class="note">{_text(tables.FURTHER_NOTE)}</p>
<h2>Command</h2>
<pre>{_text(command)}</pre>
<details>
<summary>Configuration</summary>
<pre>{_text(json.dumps(config, indent=2))}</pre>
</details>
</body>
</html>
"""


def describe_machine(devices: Sequence[Any]) -> str:
    """Name the machine's kind: devices, cores, operating system."""
    kinds = sorted({str(device.device_kind) for device in devices})
    return (
        f"{len(devices)} {' and '.join(kinds)} device{'s'[: len(devices) > 1]} on "
        f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}, "
        f"Python {platform.python_version()}."
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    caption = _text(picture.caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _text(value: str) -> str:
    return html.escape(value, quote=True)
