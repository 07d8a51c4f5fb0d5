"""The text of `--help`: flags in sections, those that most runs set first.

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
# A program's own that few runs need.
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
# Set to test or measure this package, and listed last.
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


def options(flags: Any, names: Iterable[str] | None = None) -> list[Option]:
    """Return absl's flags as options of the help, all of them by default."""
    entries = []
    for name in names or flags:
        if name in ("help", "helpfull"):
            continue
        flag = flags[name]
        choices = getattr(flag.parser, "enum_values", ())
        # absl puts choices before the text, as <a|b>.
        text = flag.help.removeprefix(f"<{'|'.join(choices)}>: ")
        entries.append(Option(flag.name, flag.value, text, choices))
    return entries


def by_use(sections: Sections, in_full: tuple[str, ...]) -> Sections:
    """Return sections with main flags first and a developer's last.

    Args:
      sections: the program's own flags first, then those of runs.
      in_full: how the titles of sections begin whose flags are explained; of all others
        a line names them.
    """
    (own_title, own), *others = ((title, list(x)) for title, x in sections.items())
    by_name = {
        entry.name: entry
        for _, entries in others
        for entry in entries
        if isinstance(entry, Option)
    }

    main = [by_name[name] for name in MAIN if name in by_name]
    developer = [by_name[name] for name in DEVELOPER if name in by_name]
    rare = [entry for entry in own if _is_any(entry, RARE)]
    shown: dict[str, list[Option | str]] = {
        own_title: [*(entry for entry in own if not _is_any(entry, RARE)), *main]
    }
    rest: list[tuple[str, list[Any]]] = [
        ("Plans and tracking", rare),
        *(
            (title, [x for x in entries if not _is_any(x, MAIN + DEVELOPER)])
            for title, entries in others
        ),
        ("For developers of this package", developer),
    ]

    named: list[Option | str] = []
    for title, entries in rest:
        names = [entry.name for entry in entries if isinstance(entry, Option)]
        if entries and title.startswith(in_full):
            shown[title] = entries
        elif names:
            named.append(f"{title.partition(':')[0]}: {', '.join(names)}.")
    if named:
        shown["Further flags, which --help=all explains"] = named
    return shown


def _is_any(entry: Option | str, names: Collection[str]) -> bool:
    return isinstance(entry, Option) and entry.name in names


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
