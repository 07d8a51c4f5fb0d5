"""Fields of configurations: their types, kinds, choices and help.

A field is one line of a dataclass with one entry in its docstring. Its default, what it
may be (`one_of`), and what a change means for a run that has begun (`of_kind`, `free`)
stand in that line. `leaves_of` reads all of it; flags, `--help` and checks follow.
"""

import dataclasses
import enum
import inspect
import pathlib
import re
import typing
from collections.abc import Collection, Sequence
from types import UnionType
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


def of_kind(
    kind: Kind | None,
    default: T,
    is_path: bool = False,
    choices: Collection[str] = (),
) -> T:
    """Return a dataclass field.

    Args:
      kind: what a change means for a run that has begun; None is its section's.
      default: its value where none is passed.
      is_path: whether it is a path, whose ~ is a home folder.
      choices: its possible values if they are few, see `check_choices`.
    """
    metadata = {"kind": kind, "is_path": is_path, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def free(default: T, is_path: bool = False) -> T:
    """Return a dataclass field that says where and how a run runs."""
    return of_kind(Kind.FREE, default, is_path)


def one_of(choices: Collection[str], default: str, kind: Kind | None = None) -> str:
    """Return a dataclass field that is one of a few words."""
    return of_kind(kind, default, choices=choices)


# A number, or a word such as "auto".
COUNT_OR_WORD = int | str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One configurable number or name.

    Attributes:
      section: the section it belongs to.
      type: int, float, bool, str, `COUNT_OR_WORD`, or `pathlib.Path` for a text that is
        a path, whose ~ is a home folder.
      help: its meaning, with its unit.
      kind: what a change means for a run that has begun.
      choices: its possible values, if there are few.
    """

    section: str
    type: Any
    help: str
    kind: Kind = Kind.COMPUTED
    choices: Collection[str] = ()


def leaves_of(
    section: str, cls: type, without: Sequence[str] = (), kind: Kind = Kind.COMPUTED
) -> dict[str, Leaf]:
    """Return the leaves of a section by name, of a kind where they have no other."""
    notes = notes_of(cls, "Attributes")
    hints = typing.get_type_hints(cls)
    choices = choices_of(cls)

    leaves = {}
    for field in dataclasses.fields(cls):
        name = field.name
        if name in without:
            continue
        if name not in notes:
            raise ValueError(
                f"{name} of {cls.__name__} has no help: write an entry under "
                "Attributes in the docstring"
            )
        is_path = field.metadata.get("is_path", False)
        leaves[name] = Leaf(
            section=section,
            type=pathlib.Path if is_path else leaf_type(hints[name]),
            help=notes[name],
            kind=field.metadata.get("kind") or kind,
            choices=choices.get(name, ()),
        )
    return leaves


def choices_of(cls: type) -> dict[str, Collection[str]]:
    """Return the possible values of fields that have few, by name."""
    return {
        field.name: field.metadata["choices"]
        for field in dataclasses.fields(cls)
        if field.metadata.get("choices")
    }


def leaf_type(*annotations: Any) -> Any:
    """Return the type of a leaf's flag, from its annotations.

    >>> leaf_type(int | None)
    <class 'int'>
    >>> leaf_type(int, int | str)
    int | str
    >>> leaf_type(typing.Literal["ring", "complete"])
    <class 'str'>
    """
    types = {
        str if typing.get_origin(part) is typing.Literal else part
        for annotation in annotations
        for part in _parts_of(annotation)
    }
    types &= {int, float, bool, str}
    if len(types) == 1:
        return types.pop()
    if types == {int, str}:
        return COUNT_OR_WORD
    raise ValueError(
        f"no flag can be made for {' and '.join(map(str, annotations))}: it must be "
        "one of int, float, bool and str, or int | str"
    )


def leaf_words(*annotations: Any) -> tuple[str, ...]:
    """Return the words that a leaf may be, from its annotations; empty for any.

    >>> leaf_words(typing.Literal["equal", "tokens"] | None)
    ('equal', 'tokens')
    """
    parts = [part for annotation in annotations for part in _parts_of(annotation)]
    if str in parts:
        return ()
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    words = [word for literal in literals for word in typing.get_args(literal)]
    return tuple(dict.fromkeys(words))


def _parts_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; any other type is one."""
    is_union = typing.get_origin(annotation) in (typing.Union, UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


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


def check_choices(config: Any, **choices: Collection[str]) -> None:
    """Refuse fields of a configuration that are not one of their choices.

    Args:
      config: a dataclass, whose fields may have choices.
      **choices: of further fields, or in place of those that a field has.
    """
    for name, known in (choices_of(type(config)) | choices).items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; use one of {known}")
