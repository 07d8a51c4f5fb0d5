"""All compressors in one place, and their names on a command line.

`parse` reads an expression of the factories below, so every composition can be written
in a flag or a configuration:

    fp4
    int4(block_size=128, stochastic=True)
    error_feedback(low_rank(rank=64, factors=int4()))                       DiLoCoX
    error_feedback(chunked_top_k(values=int2(block_size=32)), decay=0.95)   SparseLoCo
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
    "message_bytes",
    "parse",
    "sign",
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
        fp4,
        sign,
        top_k,
        chunked_top_k,
        dct_top_k,
        low_rank,
        error_feedback,
    )
}
"""The factories `parse` knows, by name."""


def parse(text: str) -> Compressor:
    """Build a compressor from an expression of names, calls and numbers.

    Args:
      text: a name of `FACTORIES`, or a call of one with numbers, booleans, strings or
        further compressors as arguments.

    Raises:
      ValueError: if the text is not such an expression or an argument is wrong.

    >>> parse("error_feedback(top_k(density=0.1))").name
    'error_feedback(top_k)'
    """
    try:
        built = _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"compressor {text!r}: {error}") from error
    if not isinstance(built, Compressor):
        raise ValueError(f"compressor {text!r} is not one of {tuple(FACTORIES)}")
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
