"""The text of `--help`: a program's description, and its flags by section.

Needs no JAX: the network lab's programs start without it.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_WIDTH, _COLUMN = 88, 28


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag in the help."""

    name: str
    value: Any  # Its default; None shows none.
    text: str
    choices: Collection[str] = ()  # Its possible values, if there are few.

    def __str__(self) -> str:
        text = self.text if self.text.endswith("...") else f"{self.text.rstrip('.')}."
        if self.choices:
            text += f" One of {', '.join(self.choices)}."
        lines = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False)
        head = f"  --{self.name}{_assigned(self.value)}"
        if len(head) >= _COLUMN - 1:
            lines = ["", *lines]
        first, *rest = lines
        below = [" " * _COLUMN + line for line in rest]
        return "\n".join([f"{head:{_COLUMN}}{first}".rstrip(), *below])


Sections = Mapping[str, Iterable[Option | str]]


def render(doc: str, sections: Sections) -> str:
    """Return the text of a program's help."""
    parts = [doc.strip()]
    for title, entries in sections.items():
        parts.append("\n".join([title, *map(_shown, entries)]))
    return "\n\n".join(parts)


def options(flags: Any, names: Iterable[str] | None = None) -> list[Option]:
    """Return flags as options of the help, all of them by default."""
    shown = (n for n in names or flags if n not in ("help", "helpfull"))
    found = []
    for flag in (flags[name] for name in shown):
        # absl puts choices before the text, as <a|b>.
        choices = getattr(flag.parser, "enum_values", ())
        text = flag.help.removeprefix(f"<{'|'.join(choices)}>: ")
        found.append(Option(flag.name, flag.value, text, choices))
    return found


def _shown(entry: Option | str) -> str:
    if isinstance(entry, Option):
        return str(entry)
    fill = textwrap.TextWrapper(_WIDTH, "  ", "  ", break_on_hyphens=False).fill
    return fill(entry)


def _assigned(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, list | tuple):
        return f"={','.join(map(str, value))}"
    return f"={value}"
