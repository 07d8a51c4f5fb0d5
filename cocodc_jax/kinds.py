"""What becomes of a run that has begun where a field of its configuration changes.

The kind of a field is in its metadata, where its dataclass defines it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

T = TypeVar("T")
_KEY = "kind"


class Kind(enum.Enum):
    """Kinds of fields."""

    COMPUTED = "what the run computes: refused, but another run can adopt its state"
    MODEL = "the model: refused"
    BEGINNING = "what it began with: refused"
    DATA = "where the data are: taken if they are the same"
    LENGTH = "how long it is: taken, where nothing else depends on it or a flag says so"
    FREE = "where and how it runs: taken"


def of_kind(kind: Kind, default: T) -> T:
    """Return a dataclass field of a kind."""
    return dataclasses.field(default=default, metadata={_KEY: kind})


def free(default: T) -> T:
    """Return a dataclass field that says where and how a run runs."""
    return of_kind(Kind.FREE, default)


def kind_of(field: dataclasses.Field[Any], default: Kind = Kind.COMPUTED) -> Kind:
    """Return a field's kind, the default where it has none."""
    return field.metadata.get(_KEY, default)
