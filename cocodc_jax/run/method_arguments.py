"""The arguments of methods, read from the functions that make them.

Names, types and defaults are those of the signatures of the functions in `METHODS`,
their help is in "Args" there. A new argument of such a function is a flag everywhere.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cocodc_jax as cc
from cocodc_jax.kinds import Kind
from cocodc_jax.run.leaves import Leaf, leaf_type, notes_of

_FEW = 3  # methods that are named in the help of a flag

# Arguments of `COMMON`, which methods' functions need not document.
_OF_ALL: dict[str, tuple[type, str, Kind]] = {
    "compress": (
        str,
        "compressor of a region's messages, such as fp4, int8, topk:0.01, "
        "lowrank:32+int4, or ef+topk:0.01 with error feedback; default: the method's "
        "own, else float32 (streaming_diloco as published sends fp4)",
        Kind.COMPUTED,
    ),
    "outer_placement": (
        str,
        "host keeps the outer state on a host device, divided divides it over the "
        "devices of each region",
        Kind.FREE,
    ),
    "region_weights": (
        str,
        "weights of regions in a mean: equal, or tokens, the tokens that each trained "
        "on",
        Kind.COMPUTED,
    ),
    "expert_weights": (
        str,
        "equal, or tokens to weigh regions in the mean of an expert by the tokens that "
        "it saw there; an expert that nobody trained gets no update",
        Kind.COMPUTED,
    ),
    "exclude_above": (
        float,
        "leaves a region out of a mean, and restores it from the outer parameters, if "
        "its parameters or message are not finite, or if its message is longer than "
        "this multiple of the median over regions; inf checks for finite values only",
        Kind.COMPUTED,
    ),
    "robust_mean": (
        str,
        "clip cuts messages to the median length over regions (sparse ones tensor by "
        "tensor); trim:0.25 drops the largest and the smallest quarter of the values, "
        "entry by entry",
        Kind.COMPUTED,
    ),
}


def method_leaves(
    methods: Mapping[str, Callable] | None = None, section: str = "method"
) -> dict[str, Leaf]:
    """Return a leaf for each argument that any method takes.

    Raises:
      ValueError: for an argument without a type or documentation, or of types that do
        not fit together.
    """
    methods = cc.methods.METHODS if methods is None else methods
    defaults: dict[str, dict[str, Any]] = {}
    hints: dict[str, list[Any]] = {}
    notes: dict[str, str] = {name: note for name, (_, note, _) in _OF_ALL.items()}
    for method, function in methods.items():
        types, said = typing.get_type_hints(function), notes_of(function, "Args")
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in types:
                raise ValueError(
                    f"argument {name!r} of method {method!r} has no type; annotate it"
                )
            defaults.setdefault(name, {})[method] = parameter.default
            hints.setdefault(name, []).append(types[name])
            if name in said:
                notes.setdefault(name, said[name])
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
        leaves[name] = Leaf(section, leaf_type(*hints[name]), text)
    for name, (type_, note, kind) in _OF_ALL.items():
        leaves[name] = Leaf(section, type_, f"{note}. For all methods.", kind)
    return leaves


def _whose(defaults: Mapping[str, Any]) -> str:
    """Return which methods take an argument, as a sentence of its help."""
    if len(defaults) > _FEW:
        return f"For {len(defaults)} methods."
    told = [f"{n} ({x})" if x not in (None, "") else n for n, x in defaults.items()]
    return f"For {', '.join(told)}."


def check_taken(arguments: Mapping[str, Any], methods: Iterable[str]) -> None:
    """Refuse arguments that none of the methods takes.

    Raises:
      ValueError: naming the argument, its value and what the methods take.
    """
    methods = list(methods)
    taken = {name: None for method in methods for name in cc.methods.defaults(method)}
    for name, value in arguments.items():
        if name not in taken:
            takes = "takes" if len(methods) == 1 else "take"
            raise ValueError(
                f"{name}={value} has no meaning for {', '.join(methods)}, which "
                f"{takes} {', '.join(taken)}; leave it out"
            )
