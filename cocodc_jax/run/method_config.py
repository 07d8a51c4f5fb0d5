"""The method of a run, and its arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import cocodc_jax as cc
from cocodc_jax.run.method_arguments import check_taken, method_leaves
from cocodc_jax.transforms.numerics import check_finite

Pairs = tuple[tuple[str, Any], ...]
WHERE_TAKEN = "where_taken"
ARGUMENTS = method_leaves()
# Limits that nothing reaches then.
_MAY_BE_INFINITE = ("exclude_above", "momentum_clip")


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """The method of a run, and its arguments.

    Attributes:
      method: a name of `cocodc_jax.methods.METHODS`, such as cocodc or diloco.
      arguments: of this method, as a mapping or as pairs; None is the method's default.
      where_taken: arguments for those methods that take them, so that one preset serves
        many methods; `arguments` take precedence.

    >>> config = MethodConfig("diloco", {"sync_interval": 20}, {"delay_steps": 5})
    >>> config.to_json()
    {'method': 'diloco', 'sync_interval': 20, 'where_taken': {'delay_steps': 5}}
    >>> config.build().schedule.delay_steps
    0
    """

    method: str = "cocodc"
    arguments: Mapping[str, Any] | Pairs = ()
    where_taken: Mapping[str, Any] | Pairs = ()

    def __post_init__(self):
        """Build the method once, so that its own checks run."""
        for name in ("arguments", WHERE_TAKEN):
            object.__setattr__(self, name, _pairs(getattr(self, name)))
        check_taken(self.given, [self.method])
        for name, value in self.where_taken:
            if name not in ARGUMENTS:
                raise ValueError(f"{name}={value} is no argument of any method")
        for name, value in (*self.arguments, *self.where_taken):
            if not (value == math.inf and name in _MAY_BE_INFINITE):
                check_finite(name, value)
        self.build()

    @property
    def given(self) -> dict[str, Any]:
        """Arguments given for this method only."""
        return dict(self.arguments)

    @property
    def values(self) -> dict[str, Any]:
        """All arguments that this method takes, with defaults filled in."""
        given = dict(self.where_taken) | self.given
        defaults = cc.methods.defaults(self.method)
        return {name: given.get(name, default) for name, default in defaults.items()}

    def replace(self, method: str | None = None, **arguments: Any) -> MethodConfig:
        """Return a copy with another method or more arguments.

        Raises:
          ValueError: for arguments that the method does not take, also earlier ones.
        """
        return MethodConfig(
            method or self.method, self.given | arguments, self.where_taken
        )

    def where(self, **arguments: Any) -> MethodConfig:
        """Return a copy with more arguments for those methods that take them."""
        return MethodConfig(
            self.method, self.arguments, dict(self.where_taken) | arguments
        )

    def resolve(self) -> MethodConfig:
        """Return a copy with the method's defaults filled in, as recorded with runs."""
        return MethodConfig(self.method, self.values)

    def build(self) -> cc.methods.Method:
        """Return the method as a value."""
        return cc.methods.get(self.method, **self.values)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, arguments next to the method's name."""
        others = {WHERE_TAKEN: dict(self.where_taken)} if self.where_taken else {}
        return {"method": self.method, **self.given, **others}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MethodConfig:
        """Invert `to_json`.

        Also reads files of earlier versions, which have the arguments of all methods:
        null if not given, else for those methods that take them.

        Raises:
          ValueError: for an argument that no method takes.
        """
        given = {name: x for name, x in value.items() if x is not None}
        method, where = given.pop("method", cls.method), given.pop(WHERE_TAKEN, {})
        taken = cc.methods.defaults(method)
        if odd := sorted(given.keys() - ARGUMENTS.keys()):
            raise ValueError(f"section 'method' has unknown fields: {odd}")
        others = {name: x for name, x in given.items() if name not in taken}
        arguments = {name: x for name, x in given.items() if name in taken}
        return cls(method, arguments, where | others)


def _pairs(arguments: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Pairs:
    """Return sorted pairs, for equality, without arguments that are None."""
    return tuple(sorted((k, v) for k, v in dict(arguments).items() if v is not None))
