"""The method of a run, and its arguments, which are read from the methods' functions.

Names, types and defaults come from the signatures of the functions in `METHODS`, help
from their "Args". A new argument of such a function is a flag in all programs.
"""

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import cocodc_jax as cc
from cocodc_jax.fields import Kind, Leaf, leaf_type, leaf_words, notes_of, one_of
from cocodc_jax.transforms.numerics import check_finite

_FEW = 3  # methods that are named in the help of a flag

# Arguments whose value may change when a run is resumed.
_FREE = ("outer_placement",)


def method_leaves(methods: Mapping[str, Callable]) -> dict[str, Leaf]:
    """Return a leaf for each argument that any of these methods takes.

    Arguments that all methods take have the type and the text of `methods.adapted`.
    """
    takers: dict[str, dict[str, Callable]] = {}
    for method, function in methods.items():
        for name in inspect.signature(function).parameters:
            takers.setdefault(name, {})[method] = function

    leaves = {
        name: _leaf(name, functions, _whose(name, functions))
        for name, functions in takers.items()
        if name not in cc.methods.COMMON
    }
    every_method = {"adapted": cc.methods.adapted}
    for name in cc.methods.COMMON:
        leaves[name] = _leaf(name, every_method, "For most methods.")
    return leaves


def _leaf(name: str, takers: Mapping[str, Callable], whose: str) -> Leaf:
    """Return the leaf of an argument, with the text of the first method that has one.

    Args:
      name: of the argument.
      takers: functions of the methods that take it.
      whose: the last sentence of its help.
    """
    annotations = []
    note = None
    for method, function in takers.items():
        hints = typing.get_type_hints(function)
        if name not in hints:
            raise ValueError(
                f"argument {name!r} of method {method!r} has no type; annotate it"
            )
        annotations.append(hints[name])
        note = note or notes_of(function, "Args").get(name)

    if note is None:
        raise ValueError(
            f"argument {name!r} of method {min(takers)!r} is not documented; add it to "
            "the Args of its docstring"
        )
    return Leaf(
        section="method",
        type=leaf_type(*annotations),
        help=f"{note.rstrip('.')}. {whose}",
        kind=Kind.FREE if name in _FREE else Kind.COMPUTED,
        choices=leaf_words(*annotations),
    )


def _whose(name: str, takers: Mapping[str, Callable]) -> str:
    """Return which methods take an argument, with its defaults if they are few."""
    if len(takers) > _FEW:
        return f"For {len(takers)} methods."
    texts = []
    for method, function in takers.items():
        default = inspect.signature(function).parameters[name].default
        texts.append(method if default in (None, "") else f"{method} ({default})")
    return f"For {', '.join(texts)}."


def check_taken(arguments: Mapping[str, Any], methods: Iterable[str]) -> None:
    """Refuse arguments that none of the methods takes."""
    methods = list(methods)
    taken = [name for method in methods for name in cc.methods.defaults(method)]
    for name, value in arguments.items():
        if name not in taken:
            takes = "takes" if len(methods) == 1 else "take"
            raise ValueError(
                f"{name}={value} has no meaning for {', '.join(methods)}, which "
                f"{takes} {', '.join(dict.fromkeys(taken))}; leave it out"
            )


Pairs = tuple[tuple[str, Any], ...]
WHERE_TAKEN = "where_taken"
ARGUMENTS = method_leaves(cc.methods.METHODS)
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

    method: str = one_of(cc.methods.METHODS, "cocodc")
    arguments: Mapping[str, Any] | Pairs = ()
    where_taken: Mapping[str, Any] | Pairs = ()

    def __post_init__(self):
        """Build the method once, so that its own checks run."""
        for name in ("arguments", WHERE_TAKEN):
            arguments = sorted(dict(getattr(self, name)).items())  # For equality.
            pairs = tuple(pair for pair in arguments if pair[1] is not None)
            object.__setattr__(self, name, pairs)

        check_taken(self.given, [self.method])
        for name, value in self.where_taken:
            if name not in ARGUMENTS:
                raise ValueError(f"{name}={value} is no argument of any method")
        for name, value in (*self.arguments, *self.where_taken):
            is_limit = name in _MAY_BE_INFINITE and value == math.inf
            if not is_limit:
                check_finite(name, value)
        self.build()

    @property
    def given(self) -> dict[str, Any]:
        """Arguments given for this method only."""
        return dict(self.arguments)

    @property
    def values(self) -> dict[str, Any]:
        """All arguments that this method takes, with defaults filled in."""
        arguments = dict(self.where_taken) | self.given
        defaults = cc.methods.defaults(self.method)
        return {name: arguments.get(name, x) for name, x in defaults.items()}

    def replace(self, method: str | None = None, **arguments: Any) -> Self:
        """Return a copy with another method or more arguments, which it must take."""
        arguments = self.given | arguments
        return dataclasses.replace(
            self, method=method or self.method, arguments=arguments
        )

    def where(self, **arguments: Any) -> Self:
        """Return a copy with more arguments for those methods that take them."""
        where_taken = dict(self.where_taken) | arguments
        return dataclasses.replace(self, where_taken=where_taken)

    def resolve(self) -> Self:
        """Return a copy with the method's defaults filled in, as recorded with runs."""
        return dataclasses.replace(self, arguments=self.values, where_taken=())

    def build(self) -> cc.methods.Method:
        """Return the method as a value."""
        return cc.methods.get(self.method, **self.values)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, arguments next to the method's name."""
        others = {WHERE_TAKEN: dict(self.where_taken)} if self.where_taken else {}
        return {"method": self.method, **self.given, **others}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Invert `to_json`.

        Also reads files of earlier versions, which have the arguments of all methods:
        null if not given, else for those methods that take them.
        """
        arguments = {name: x for name, x in value.items() if x is not None}
        method = arguments.pop("method", cls.method)
        where_taken = arguments.pop(WHERE_TAKEN, {})

        unknown = sorted(arguments.keys() - ARGUMENTS.keys())
        if unknown:
            raise ValueError(f"section 'method' has unknown fields: {unknown}")
        taken = cc.methods.defaults(method)
        others = {n: arguments.pop(n) for n in arguments.keys() - taken.keys()}
        return cls(method, arguments, where_taken | others)
