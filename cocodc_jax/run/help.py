"""The text of `--help`: a program's description, and its flags by section."""

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
    """Return flags as options of the help."""
    return [
        Option(f.name, f.value, *_text_and_choices(f))
        for f in (flags[name] for name in (flags if names is None else names))
        if f.name not in ("help", "helpfull")
    ]


def _text_and_choices(flag: Any) -> tuple[str, Collection[str]]:
    """Split a flag's help from its choices, which absl puts before it as <a|b>."""
    choices = getattr(flag.parser, "enum_values", ())
    return flag.help.removeprefix(f"<{'|'.join(choices)}>: "), choices


def _shown(entry: Option | str) -> str:
    if isinstance(entry, Option):
        return str(entry)
    indent = "  "
    return textwrap.fill(
        entry,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _assigned(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, list | tuple):
        return f"={','.join(map(str, value))}"
    return f"={value}"
