"""Fields of configurations: their checks, kinds and help.

A field is documented once, in the docstring of the class or function that takes it; its
kind is in its metadata.
"""

import dataclasses
import enum
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Kind(enum.Enum):
    """What becomes of a run that has begun where a field changes."""

    COMPUTED = "what the run computes: refused, but another run can adopt its state"
    MODEL = "the model: refused"
    BEGINNING = "what it began with: refused"
    DATA = "where the data are: taken if they are the same"
    LENGTH = "how long it is: taken, where nothing else depends on it or a flag says so"
    FREE = "where and how it runs: taken"


def of_kind(kind: Kind, default: T, is_path: bool = False) -> T:
    """Return a dataclass field of a kind; a path is one whose ~ is a home folder."""
    metadata = {"kind": kind, "is_path": is_path}
    return dataclasses.field(default=default, metadata=metadata)


def free(default: T, is_path: bool = False) -> T:
    """Return a dataclass field that says where and how a run runs."""
    return of_kind(Kind.FREE, default, is_path)


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
      is_path: whether it is a path, whose ~ is a home folder.
    """

    section: str
    type: Any
    help: str
    kind: Kind = Kind.COMPUTED
    is_path: bool = False

    @property
    def flag_type(self) -> Any:
        """Type of its flag: `type`, or `pathlib.Path`."""
        return pathlib.Path if self.is_path else self.type


def leaves_of(
    section: str, cls: type, without: Sequence[str] = (), kind: Kind = Kind.COMPUTED
) -> dict[str, Leaf]:
    """Return the leaves of a section by name, of a kind where they have no other."""
    notes, hints = notes_of(cls, "Attributes"), typing.get_type_hints(cls)
    return {
        name: Leaf(
            section,
            leaf_type(hints[name]),
            notes[name],
            x.metadata.get("kind", kind),
            x.metadata.get("is_path", False),
        )
        for name, x in cls.__dataclass_fields__.items()
        if name not in without
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
    section = text.partition(f"{heading}:\n")[2].partition("\n\n")[0]
    notes = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {name: " ".join(note.split()) for name, note in notes}


def check_least(config: Any, least: float, *names: str) -> None:
    """Refuse fields of a configuration that are below a number."""
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_choices(config: Any, **choices: tuple[str, ...]) -> None:
    """Refuse fields of a configuration that are not one of their choices."""
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; use one of {known}")
