"""The text of `--help`: flags in sections, beginning with those that most runs set.

Needs no JAX: the network lab's programs print their help without it.
"""

import dataclasses
import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# A flag in none of these three tables is explained in its section.
# Flags that most runs set, which `--help` explains first.
MAIN = (
    "method",
    "regions",
    "steps",
    "sync_interval",
    "num_fragments",
    "delay_steps",
    "outer_lr",
    "compress",
    "inner_optimizer",
    "inner_lr",
    "dataset",
    "tokenizer",
    "sequence_length",
    "batch_per_region",
    "devices",
    "seed",
    "init_from",
    "eval_every",
    "checkpoint_every",
)
# Flags of a program that few runs need.
RARE = (
    "plan_frontier",
    "plan_step_s",
    "plan_links",
    "plan_gbps",
    "plan_latency_ms",
    "wandb_mode",
    "metrics_port",
    "on_event",
    "json",
)
# Flags for testing or measuring this package, listed last.
DEVELOPER = (
    "step_seconds",
    "outer_digests",
    "local_regions",
    "overlap",
    "all_reduce",
    "outer_channels",
    "backward",
    "loss_chunk_tokens",
    "curvature_units",
)

# Titles of the sections of `RARE` and of `DEVELOPER`.
_OF_PLANS = "Plans and tracking"
_OF_DEVELOPERS = "For developers of this package"

_WIDTH = 88
_COLUMN = 28  # Where the texts of flags begin.


@dataclasses.dataclass(frozen=True)
class Option:
    """A flag in the help.

    Attributes:
      name: of the flag.
      value: its default; None shows none.
      text: what it means.
      choices: its possible values, if there are few.
    """

    name: str
    value: Any
    text: str
    choices: Collection[str] = ()

    def __str__(self) -> str:
        text = self.text if self.text.endswith("...") else f"{self.text.rstrip('.')}."
        if self.choices:
            text += f" One of {', '.join(self.choices)}."
        text = _filled(text, " " * _COLUMN)

        head = f"  --{self.name}{_assigned(self.value)}"
        if len(head) < _COLUMN - 1:
            return head + text[len(head) :]
        return f"{head}\n{text}"


# Flags, and sentences, of each section by its title.
Sections = Mapping[str, Iterable[Option | str]]


def render(doc: str, sections: Sections) -> str:
    """Return the text of a program's help."""
    paragraphs = [doc.strip()]
    for title, entries in sections.items():
        lines = [title]
        for entry in entries:
            is_sentence = isinstance(entry, str)
            lines.append(_filled(entry, "  ") if is_sentence else str(entry))
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def options(flags: Any, names: Iterable[str]) -> list[Option]:
    """Return absl's flags as options of the help."""
    entries = []
    for name in names:
        if name in ("help", "helpfull"):
            continue
        flag = flags[name]
        choices = getattr(flag.parser, "enum_values", ())
        entries.append(Option(name, flag.value, flag.help, choices))
    return entries


def by_use(sections: Sections, in_full: tuple[str, ...]) -> Sections:
    """Return sections with main flags first and a developer's last.

    Args:
      sections: the program's own flags first, then those of runs.
      in_full: beginnings of the titles of the sections whose flags are explained. Flags
        of other sections are only named, in a line.
    """
    first, *others = sections
    titles: dict[str, str] = {
        **dict.fromkeys(MAIN, first),
        **dict.fromkeys(RARE, _OF_PLANS),
        **dict.fromkeys(DEVELOPER, _OF_DEVELOPERS),
    }
    by_title: dict[str, list[Option | str]] = {
        title: [] for title in (first, _OF_PLANS, *others, _OF_DEVELOPERS)
    }
    for title, entries in sections.items():
        for entry in entries:
            by_title[titles.get(_name(entry), title)].append(entry)

    ranks: dict[str, int] = {
        name: rank for rank, name in enumerate((*MAIN, *DEVELOPER))
    }
    for entries in by_title.values():
        entries.sort(key=lambda entry: ranks.get(_name(entry), -1))

    shown = {first: by_title.pop(first)}
    lines: list[Option | str] = []
    for title, entries in by_title.items():
        names = ", ".join(filter(None, map(_name, entries)))
        if entries and title.startswith(in_full):
            shown[title] = entries
        elif names:
            lines.append(f"{title.partition(':')[0]}: {names}.")
    if lines:
        shown["Further flags, which --help=all explains"] = lines
    return shown


def _name(entry: Option | str) -> str:
    """Return the name of a flag; a sentence has none."""
    return entry.name if isinstance(entry, Option) else ""


def _filled(text: str, indent: str) -> str:
    wrapper = textwrap.TextWrapper(_WIDTH, indent, indent, break_on_hyphens=False)
    return wrapper.fill(text)


def _assigned(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, list | tuple):
        return f"={','.join(map(str, value))}"
    return f"={value}"
