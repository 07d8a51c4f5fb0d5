"""The method of a run, and its arguments, which are read from the functions.

Names, types and defaults are those of the signatures of the functions in `METHODS`,
help is in "Args" there. A new argument of such a function is a flag everywhere.
"""

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import cocodc_jax as cc
from cocodc_jax.fields import Kind, Leaf, leaf_type, notes_of, one_of
from cocodc_jax.methods.decoupled_diloco import AVERAGES
from cocodc_jax.methods.lt_admm import GRAPHS
from cocodc_jax.sync.cutting import STRATEGIES
from cocodc_jax.sync.messages import MEANS
from cocodc_jax.sync.method import WEIGHTS
from cocodc_jax.sync.outer import PLACEMENTS
from cocodc_jax.sync.schedules.adaptive import SCORES
from cocodc_jax.transforms.curvature import NAMES
from cocodc_jax.transforms.lion import RULES
from cocodc_jax.transforms.numerics import check_finite
from cocodc_jax.transforms.outer import GAPS

_FEW = 3  # methods that are named in the help of a flag

# Arguments of `COMMON`, which methods' functions need not document.
_OF_ALL = {
    "compress": Leaf(
        "method",
        str,
        "compressor of a region's messages, such as fp4, int8, topk:0.01, "
        "lowrank:32+int4, or ef+topk:0.01 with error feedback; default: the method's "
        "own, else float32 (streaming_diloco as published sends fp4)",
    ),
    "outer_placement": Leaf(
        "method",
        str,
        "host keeps the outer state on a host device, divided divides it over the "
        "devices of each region",
        Kind.FREE,
    ),
    "region_weights": Leaf(
        "method",
        str,
        "weights of regions in a mean: equal, or tokens, the tokens that each trained "
        "on",
    ),
    "expert_weights": Leaf(
        "method",
        str,
        "equal, or tokens to weigh regions in the mean of an expert by the tokens that "
        "it saw there; an expert that nobody trained gets no update",
    ),
    "exclude_above": Leaf(
        "method",
        float,
        "leaves a region out of a mean, and restores it from the outer parameters, if "
        "its parameters or message are not finite, or if its message is longer than "
        "this multiple of the median over regions; inf checks for finite values only",
    ),
    "robust_mean": Leaf(
        "method",
        str,
        "clip cuts messages to the median length over regions (sparse ones tensor by "
        "tensor); trim:0.25 drops the largest and the smallest quarter of the values, "
        "entry by entry",
    ),
}

# Possible values of arguments that are one of a few words.
_CHOICES: dict[str, Collection[str]] = {
    "averaging": AVERAGES,
    "curvature": (*NAMES, "secant"),
    "expert_weights": WEIGHTS,
    "fragment_strategy": STRATEGIES,
    "graph": GRAPHS,
    "lion_vote": RULES,
    "outer_placement": PLACEMENTS,
    "region_weights": WEIGHTS,
    "sparse_mean": MEANS,
    "staleness_gap": GAPS,
    "transmission_score": SCORES,
}


def method_leaves(methods: Mapping[str, Callable]) -> dict[str, Leaf]:
    """Return a leaf for each argument that any of these methods takes."""
    defaults: dict[str, dict[str, Any]] = {}
    hints: dict[str, list[Any]] = {}
    notes: dict[str, str] = {}
    for method, function in methods.items():
        types = typing.get_type_hints(function)
        notes = notes_of(function, "Args") | notes
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in types:
                raise ValueError(
                    f"argument {name!r} of method {method!r} has no type; annotate it"
                )
            defaults.setdefault(name, {})[method] = parameter.default
            hints.setdefault(name, []).append(types[name])

    leaves = {}
    for name, of_methods in defaults.items():
        if name in _OF_ALL:
            continue
        if name not in notes:
            raise ValueError(
                f"argument {name!r} of method {min(of_methods)!r} is not documented; "
                "add it to the Args of its docstring"
            )
        text = f"{notes[name].rstrip('.')}. {_whose(of_methods)}"
        leaves[name] = Leaf("method", leaf_type(*hints[name]), text)
    for name, leaf in _OF_ALL.items():
        leaves[name] = dataclasses.replace(leaf, help=f"{leaf.help}. For most methods.")

    for name in leaves.keys() & _CHOICES.keys():
        leaves[name] = dataclasses.replace(leaves[name], choices=_CHOICES[name])
    return leaves


def _whose(defaults: Mapping[str, Any]) -> str:
    """Return which methods take an argument, as a sentence of its help.

    Args:
      defaults: the argument's default in each of them.
    """
    if len(defaults) > _FEW:
        return f"For {len(defaults)} methods."
    has_none = (None, "")
    texts = [
        name if default in has_none else f"{name} ({default})"
        for name, default in defaults.items()
    ]
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
