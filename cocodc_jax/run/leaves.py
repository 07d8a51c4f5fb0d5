"""The leaves of a configuration, single numbers and names, and their help.

A leaf is documented once, in the docstring of the class or function that takes it;
flags read their help from there.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

from cocodc_jax.kinds import Kind, kind_of

# A number, or a word such as "auto".
COUNT_OR_WORD = int | str
_PLAIN = (int, float, bool, str)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One configurable number or name.

    Attributes:
      section: the section it belongs to.
      type: int, float, bool, str or `COUNT_OR_WORD`.
      help: its meaning, with its unit.
      kind: what a change means for a run that has begun.
    """

    section: str
    type: Any
    help: str
    kind: Kind = Kind.COMPUTED


def leaves_of(
    section: str, cls: type, without: Sequence[str] = (), kind: Kind = Kind.COMPUTED
) -> dict[str, Leaf]:
    """Return the leaves of a section, by name."""
    notes, hints = notes_of(cls, "Attributes"), typing.get_type_hints(cls)
    return {
        field.name: Leaf(
            section,
            leaf_type(hints[field.name]),
            notes[field.name],
            kind_of(field, kind),
        )
        for field in dataclasses.fields(cls)
        if field.name not in without
    }


def leaf_type(*annotations: Any) -> Any:
    """Return the type of a leaf's flag, from its annotations.

    >>> leaf_type(int | None)
    <class 'int'>
    >>> leaf_type(int, int | str)
    int | str
    """
    found = {part for hint in annotations for part in _parts(hint)} & set(_PLAIN)
    if len(found) == 1:
        return found.pop()
    if found == {int, str}:
        return COUNT_OR_WORD
    raise ValueError(
        f"no flag can be made for {' and '.join(map(str, annotations))}: it must be "
        "one of int, float, bool and str, or int | str"
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(type(value) for value in typing.get_args(hint))
    return (hint,)


def notes_of(documented: Any, heading: str) -> dict[str, str]:
    """Read a section of a Google-style docstring, such as "Args" or "Attributes"."""
    text = inspect.cleandoc(documented.__doc__ or "")
    notes: dict[str, list[str]] = {}
    name = ""
    for line in text.partition(f"{heading}:\n")[2].splitlines():
        if line.startswith("    "):
            notes[name].append(line.strip())
        elif line.startswith("  "):
            name, _, note = line.strip().partition(": ")
            notes[name] = [note]
        elif line:  # The next section.
            break
    return {name: " ".join(lines).strip() for name, lines in notes.items()}
