"""All compressors in one place, and their names on a command line.

`parse` reads an expression of the factories below, so every composition can be written
in a flag or a configuration, and for the usual ones a short form (`short_form.py`):

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
"""

import ast
from collections.abc import Callable

from cocodc_jax.transforms.compressor import (
    Compressor,
    Packed,
    identity,
    message_bytes,
)
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank
from cocodc_jax.transforms.matrices import matrices
from cocodc_jax.transforms.quantize import (
    bfloat16,
    float16,
    fp4,
    int2,
    int4,
    int8,
    sign,
)
from cocodc_jax.transforms.short_form import expand
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

FACTORIES = {
    factory.__name__: factory
    for factory in (
        identity,
        float16,
        bfloat16,
        int8,
        int4,
        int2,
        stat2,
        fp4,
        sign,
        top_k,
        chunked_top_k,
        dct_top_k,
        threshold,
        low_rank,
        matrices,
        error_feedback,
    )
}
"""The factories `parse` knows, by name."""


def parse(text: str) -> Compressor:
    """Build a compressor from its short form, or an expression of calls and numbers.

    Args:
      text: value of the flag `compress`: a name of `FACTORIES`; a call of one with
        numbers, booleans, strings or further compressors as arguments; or parts
        `name:number` joined by `+`, each handing what it sends to the next, with
        the names and numbers of `short_form`.

    Raises:
      ValueError: naming `compress` and the text, if it is none, neither of these, or
        an argument is wrong.

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
        expression = text if is_long else expand(text)
        built = _build(ast.parse(expression, mode="eval").body)
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
