"""A claim: one file of `experiments/claims`, checked when it is read.

    claim = "A needs 20 % fewer steps than B."
    source = "arXiv 2501.00001"   # Or README.
    title = "The paper's title"
    seen = "abstract"             # Where the sentence was read, see `SEEN`.
    scale = "150M parameters"     # What it was said of.
    setting = "0.13M parameters, four regions"         # What was run here.
    commands = ["sweep --grid=GRID --workdir=DIR"]     # After `python -m experiments.`
    minutes = 40.0                # Of one core, that these commands cost.
    note = "One sentence more."   # May be left out.

    [[parts]]                     # One or more; the claim holds if all do.
    what = "both tuned"
    measure = "fewer_steps"       # A name of `measures.MEASURES`, and its arguments.
    results = "grid.json"         # In experiments/results.
    method = "method=a"           # Flags of one cell, as --reference of a sweep.
    baseline = "method=b"
    at_least = 20.0               # One rule of `verdicts.RULES`.

Without parts a claim cannot be tried here, and `why` says why. The last of `commands`
writes the file `results` of the first part, under the name that `WRITTEN` has for its
program; other files stay those of the repository.
"""

import dataclasses
import difflib
import inspect
import pathlib
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, Self

from cocodc_jax.files import read_text

from .measures import MEASURES
from .verdicts import RULES, Rule

FOLDER = pathlib.Path(__file__).parents[1] / "claims"
# Where the claimed sentence was read.
SEEN = {
    "abstract": "",
    "paper": "from a table of the paper",
    "code": "from the authors' code",
    "digest": "from a digest",
    "records": "from the authors' records",
    "memory": "from memory",
    "ours": "",
}
# The file of results that a program writes, by the program of a command.
WRITTEN = {
    "sweep": "cells.json",
    "chaos": "chaos.json",
    "compare_networks": "networks.json",
}
_NEEDED = {"claim": str, "source": str, "title": str, "seen": str, "scale": str}
_OPTIONAL = {
    "setting": str,
    "commands": list,
    "minutes": float,
    "note": str,
    "why": str,
    "parts": list,
}
_KINDS = {str: "a text", list: "a list", float: "a number"}
_OF_TRIED = ("setting", "commands", "minutes")
_NO_ARGUMENTS = ("what", "measure", *RULES)


@dataclasses.dataclass(frozen=True)
class Part:
    """One figure of a claim: how it is measured, and what it has to be."""

    what: str
    measure: str
    arguments: Mapping[str, Any]
    rule: Rule

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return what a table of `[[parts]]` says."""
        for name in ("what", "measure"):
            if not isinstance(table.get(name), str):
                raise ValueError(f"{name}={table.get(name)!r} must be a text")

        measure = table["measure"]
        if measure not in MEASURES:
            raise ValueError(
                f"measure={measure!r} is unknown; use one of {[*MEASURES]}"
            )

        arguments = {n: x for n, x in table.items() if n not in _NO_ARGUMENTS}
        try:
            inspect.signature(MEASURES[measure].of).bind(None, **arguments)
        except TypeError as error:
            raise ValueError(f"measure={measure!r}: {error}") from None

        return cls(table["what"], measure, arguments, Rule.from_table(table))


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published sentence, and how it is tried here; see the module."""

    name: str
    claim: str
    source: str
    title: str
    seen: str
    scale: str
    setting: str = ""
    commands: tuple[tuple[str, ...], ...] = ()
    minutes: float = 0.0
    note: str = ""
    why: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def is_tried(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self.parts)


def read_all(folder: pathlib.Path = FOLDER) -> list[Claim]:
    """Return the claims of a folder, by name.

    Raises:
      ValueError: if there are none, or one file is not valid.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ValueError(f"{folder} has no claims: it holds no file NAME.toml")
    return [read(path) for path in paths]


def only(claims: list[Claim], name: str) -> Claim:
    """Return the claim of a name."""
    for claim in claims:
        if claim.name == name:
            return claim
    names = [claim.name for claim in claims]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; they are {', '.join(names)}"
    raise ValueError(f"only={name!r} is no claim{hint}")


def read(path: pathlib.Path) -> Claim:
    """Return the claim of a file.

    Raises:
      ValueError: one line, with the file, the key and what is wrong with it.
    """
    try:
        table = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None

    try:
        return _claim(path.stem, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _claim(name: str, table: Mapping[str, Any]) -> Claim:
    _check_keys(table)
    if table["seen"] not in SEEN:
        raise ValueError(f"seen={table['seen']!r} is unknown; use one of {[*SEEN]}")

    parts = []
    for number, part in enumerate(table.get("parts", []), 1):
        try:
            parts.append(Part.from_table(part))
        except ValueError as error:
            raise ValueError(f"part {number}: {error}") from None

    commands = tuple(tuple(shlex.split(words)) for words in table.get("commands", []))
    for words in commands:
        if not words or words[0] not in WRITTEN:
            raise ValueError(
                f"commands has {shlex.join(words)!r}; a command begins with one of "
                f"{[*WRITTEN]}, which write results"
            )
    if commands and not (parts and "results" in parts[0].arguments):
        raise ValueError("commands write results, but part 1 has no results")

    plain = {key: table[key] for key in table if key not in ("parts", "commands")}
    return Claim(name=name, parts=tuple(parts), commands=commands, **plain)


def _check_keys(table: Mapping[str, Any]) -> None:
    """Refuse keys that are missing, unknown, or of another type."""
    kinds = _NEEDED | _OPTIONAL
    if odd := sorted(table.keys() - kinds.keys()):
        near = difflib.get_close_matches(odd[0], kinds, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; keys are {[*kinds]}"
        raise ValueError(f"{odd[0]} is an unknown key{hint}")

    is_tried = bool(table.get("parts"))
    needed = [*_NEEDED, *(_OF_TRIED if is_tried else ["why"])]
    if missing := [key for key in needed if key not in table]:
        reason = "" if is_tried else " (a claim without parts says why)"
        raise ValueError(f"{missing[0]} is missing{reason}")
    if is_tried and "why" in table:
        raise ValueError("why has no meaning beside parts; say it in note")

    for key, value in table.items():
        kind = kinds[key]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{key}={value!r} must be {_KINDS[kind]}")
