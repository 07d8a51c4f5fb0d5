"""All compressors in one place, and their names on a command line.

`parse` reads an expression of the factories below, so every composition can be written
in a flag or a configuration, and for the usual ones a short form:

    fp4                       fp4
    none                      identity
    ef+topk:0.01              error_feedback(top_k(density=0.01))
    ef+lowrank:64+int4        error_feedback(low_rank(64, factors=int4()))    DiLoCoX
    ef:0.95+chunked:128+stat2
        error_feedback(chunked_top_k(k=128, values=stat2()), decay=0.95)
                                                                          SparseLoCo
    ef:0.9+matrices+stat2
        error_feedback(matrices(stat2()), decay=0.9)                      MuLoCo
    (long form only)          int4(block_size=128, stochastic=True)

The short form is

    form = part { "+" part }            part = name [ ":" number ]

A part passes the values that it sends to the part after it. All but `matrices` and `ef`
may be the last.

| name                                  | number     | after `+`     |
|---------------------------------------|------------|---------------|
| `none`, `float16`, `bfloat16`         |            |               |
| `stat2`                               |            |               |
| `int8`, `int4`, `int2`, `fp4`, `sign` | block size |               |
| `topk`, `threshold`                   | density    | its values    |
| `chunked`, `dct`                      | k          | its values    |
| `lowrank`                             | rank       | its factors   |
| `matrices`                            |            | what it wraps |
| `ef`                                  | decay      | what it wraps |

Numbers left out are the factory's defaults. Other arguments need the long form.
"""

import ast
import math
from collections.abc import Callable
from typing import NamedTuple

from cocodc_jax.transforms.compressor import (
    Compressor,
    Packed,
    identity,
    matrices,
    message_bytes,
)
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank
from cocodc_jax.transforms.quantize import (
    bfloat16,
    float16,
    fp4,
    int2,
    int4,
    int8,
    sign,
)
from cocodc_jax.transforms.sparsify import chunked_top_k, dct_top_k, top_k
from cocodc_jax.transforms.statistical import stat2
from cocodc_jax.transforms.threshold import threshold

__all__ = [
    "FACTORIES",
    "Compressor",
    "Packed",
    "bfloat16",
    "chunked_top_k",
    "dct_top_k",
    "error_feedback",
    "float16",
    "fp4",
    "identity",
    "int2",
    "int4",
    "int8",
    "low_rank",
    "matrices",
    "message_bytes",
    "parse",
    "sign",
    "stat2",
    "threshold",
    "top_k",
]


class _Part(NamedTuple):
    """A name's factory, its number's argument and type, and what may follow."""

    factory: Callable[..., Compressor]
    argument: str = ""
    kind: type = int
    inner: str = ""


_PARTS = {
    "none": _Part(identity),
    "float16": _Part(float16),
    "bfloat16": _Part(bfloat16),
    "int8": _Part(int8, "block_size"),
    "int4": _Part(int4, "block_size"),
    "int2": _Part(int2, "block_size"),
    "stat2": _Part(stat2),
    "fp4": _Part(fp4, "block_size"),
    "sign": _Part(sign, "block_size"),
    "topk": _Part(top_k, "density", float, "values"),
    "chunked": _Part(chunked_top_k, "k", int, "values"),
    "dct": _Part(dct_top_k, "k", int, "values"),
    "threshold": _Part(threshold, "density", float, "values"),
    "lowrank": _Part(low_rank, "rank", int, "factors"),
    "matrices": _Part(matrices, inner="inner"),
    "ef": _Part(error_feedback, "decay", float, "inner"),
}

FACTORIES = {part.factory.__name__: part.factory for part in _PARTS.values()}
"""The factories `parse` knows, by name."""


def parse(text: str) -> Compressor:
    """Build a compressor from its short form, or an expression of calls and numbers.

    An expression is a name of `FACTORIES`, or a call of one with numbers, booleans,
    strings or further compressors as arguments.

    >>> parse("error_feedback(top_k(density=0.1))").name
    'error_feedback(top_k)'
    >>> parse("ef:0.95+chunked:128+stat2").name
    'error_feedback(chunked_top_k(stat2))'
    >>> parse("none").name
    'identity'
    """
    if not isinstance(text, str):
        made = text.name if isinstance(text, Compressor) else text
        raise ValueError(
            f"compress={made!r} must be text, such as 'ef+int4'; a Compressor goes "
            "into a method by `method.compressed(compressor)`"
        )

    try:
        is_long = "(" in text or text in FACTORIES
        built = _build(ast.parse(text, mode="eval").body) if is_long else _short(text)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"compress={text!r}: {error}") from error

    if not isinstance(built, Compressor):
        raise ValueError(f"compress={text!r} is not a call of {tuple(FACTORIES)}")
    return built


def _build(node):
    if isinstance(node, ast.Call):
        options = {str(k.arg): _build(k.value) for k in node.keywords}
        return _factory(node.func)(*map(_build, node.args), **options)
    if isinstance(node, ast.Name):
        return _factory(node)()
    return ast.literal_eval(node)


def _factory(node) -> Callable[..., Compressor]:
    name = getattr(node, "id", ast.unparse(node))
    if name not in FACTORIES:
        raise ValueError(f"{name!r} is not one of {tuple(FACTORIES)}")
    return FACTORIES[name]


def _short(text: str) -> Compressor:
    """Build a compressor from its short form."""
    head, plus, rest = text.partition("+")
    name, colon, number = head.partition(":")
    if name not in _PARTS:
        raise ValueError(f"{name!r} is not one of {tuple(_PARTS)}")

    part = _PARTS[name]
    options = {}
    if colon:
        options[part.argument] = _number(head, number, part)

    if plus and not part.inner:
        raise ValueError(f"{head!r} takes nothing after it, but has {rest!r}")
    if part.inner == "inner" and not plus:
        raise ValueError(f"{head!r} needs what it wraps, as in '{name}+topk:0.01'")

    if plus:
        options[part.inner] = _short(rest)
    return part.factory(**options)


def _number(head: str, text: str, part: _Part) -> float:
    if not part.argument:
        raise ValueError(f"{head!r} takes no number")
    try:
        value = part.kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        wanted = "a whole number" if part.kind is int else "a number"
        raise ValueError(f"{head!r}: {part.argument}={text!r} must be {wanted}")
    return value
