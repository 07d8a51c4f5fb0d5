"""Claims that were checked, as tables for a terminal and for the documentation."""

import dataclasses
from collections.abc import Iterable, Sequence

from cocodc_jax.report.units import format_duration

from ..sweeps.cells import Interval
from .claim import SEEN, Claim, Part
from .measures import MEASURES, Results
from .verdicts import VERDICTS, overall


@dataclasses.dataclass(frozen=True)
class Checked:
    """A claim with what was measured of each part, and the verdicts."""

    claim: Claim
    measured: tuple[Interval, ...]  # Of the parts.
    verdicts: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The verdict on the claim."""
        return overall(self.verdicts)

    def lines(self) -> list[str]:
        """Return each part in words: what, the measured interval, the rule."""
        parts = zip(self.claim.parts, self.measured, self.verdicts, strict=True)
        return [
            f"{part.what}: {shown(part, interval)} ({part.rule}: {verdict})"
            for part, interval, verdict in parts
        ]


def check(claim: Claim, files: Results) -> Checked:
    """Measure a claim, and return the verdicts on its parts.

    Raises:
      ValueError: one line, with the claim's name and the file or flags that do not fit.
    """
    measured = []
    for part in claim.parts:
        try:
            interval = MEASURES[part.measure].of(files, **part.arguments)
        except ValueError as error:
            raise ValueError(f"claim {claim.name}, {part.what}: {error}") from None
        except KeyError as error:
            raise ValueError(
                f"claim {claim.name}, {part.what}: its results have no {error}"
            ) from None
        measured.append(interval)

    verdicts = [
        part.rule.verdict(interval)
        for part, interval in zip(claim.parts, measured, strict=True)
    ]
    return Checked(claim, tuple(measured), tuple(verdicts))


def shown(part: Part, interval: Interval) -> str:
    """Return a measured interval with its unit."""
    measure = MEASURES[part.measure]
    return f"{format(interval, measure.form)} {measure.unit}"


def terminal_heads() -> list[str]:
    """Return the heads of the table for a terminal."""
    return ["claim", "verdict", "measured", "cost"]


def terminal_lines(checked: Iterable[Checked]) -> list[list[str]]:
    """Return its lines."""
    return [
        [
            row.claim.name,
            row.verdict,
            "; ".join(
                shown(part, interval)
                for part, interval in zip(row.claim.parts, row.measured, strict=True)
            )
            or "-",
            cost(row.claim),
        ]
        for row in checked
    ]


def cost(claim: Claim) -> str:
    """Return the time of a claim's commands."""
    if not claim.is_tried:
        return "-"
    return format_duration(60 * claim.minutes)


def counts(checked: Sequence[Checked]) -> dict[str, int]:
    """Return how many claims have each verdict, in the order of `VERDICTS`."""
    verdicts = [row.verdict for row in checked]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def sections(checked: Sequence[Checked]) -> dict[str, str]:
    """Return the tables of the documentation in Markdown, by their headings."""
    papers = [row for row in checked if row.claim.seen != "ours"]
    ours = [row for row in checked if row.claim.seen == "ours"]
    tried = [row for row in papers if row.claim.is_tried]
    untried = [row for row in papers if not row.claim.is_tried]

    reasons = [[_said(row), row.claim.scale, row.claim.why] for row in untried]
    costs = [
        [f"`{row.claim.name}`", f"{row.claim.minutes:g}", _commands(row.claim)]
        for row in checked
        if row.claim.is_tried
    ]
    runs = "commands, after `python -m experiments.`"
    return {
        "Papers": _table(tried),
        "What cannot be tried here": _markdown(["claim", "said of", "why"], reasons),
        "Our own sentences": _table(ours),
        "Commands and costs": _markdown(["`--only=`", "minutes", runs], costs),
    }


def page(checked: Sequence[Checked]) -> str:
    """Return all tables with their headings."""
    texts = [f"## {head}\n\n{text}\n" for head, text in sections(checked).items()]
    return "\n".join(texts)


def _table(checked: Sequence[Checked]) -> str:
    rows = sorted(checked, key=lambda row: VERDICTS.index(row.verdict))
    heads = ["verdict", "claim", "said of", "tried with", "measured"]
    return _markdown(
        heads,
        [
            [
                f"**{row.verdict}**",
                _said(row),
                row.claim.scale,
                row.claim.setting,
                _measured(row),
            ]
            for row in rows
        ],
    )


def _said(row: Checked) -> str:
    claim = row.claim
    source = claim.source
    if source.startswith("arXiv "):
        number = source.removeprefix("arXiv ")
        source = f"[{source}](https://arxiv.org/abs/{number})"
    where = f"; {SEEN[claim.seen]}" if SEEN[claim.seen] else ""
    return f"{claim.claim} *{claim.title}*, {source}{where}."


def _measured(row: Checked) -> str:
    lines = row.lines()
    if row.claim.note:
        lines.append(row.claim.note)
    return "<br>".join(lines)


def _commands(claim: Claim) -> str:
    if not claim.commands:
        return "computed from what is there"
    return "<br>".join(f"`{' '.join(words)}`" for words in claim.commands)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    # A column of a table ends at a bar.
    cells = [[text.replace("|", "\\|") for text in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
