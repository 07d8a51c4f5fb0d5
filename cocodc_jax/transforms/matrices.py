"""A compressor for matrices; vectors, which are norm scales, go whole.

Norm scales are one number in some thousands and every activation is multiplied by one:
to shorten them saves nothing and is felt everywhere.

Source: MuLoCo (arXiv 2505.23725), whose norm scales are sent as they are.
"""

import dataclasses
import functools
from typing import Any

import jax

from cocodc_jax.transforms.compressor import Compressor, check_compressor, identity
from cocodc_jax.transforms.layers import distinct_leaves, is_matrix, named_leaves


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrices", "vectors"],
    meta_fields=["paths", "structure"],
)
@dataclasses.dataclass(frozen=True)
class Split:
    """A message in two parts."""

    matrices: Any  # What the inner compressor sends, of a dict from path to matrix.
    vectors: Any  # The others as they are, a dict from path to vector.
    paths: tuple[str, ...]  # Of all leaves in order, static.
    structure: Any  # Of the tree, static.


def matrices(inner: Compressor) -> Compressor:
    """Encode matrices by `inner`, and send vectors and scalars as they are.

    A leaf with a layer axis (see `layers.is_stack`) is what each of its layers is.

    Args:
      inner: any compressor; it sees a flat dict from path to matrix.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.compressor import message_bytes
    >>> from cocodc_jax.transforms.statistical import stat2
    >>> tree = {"blocks": {"up": jnp.ones((2, 4, 4)), "norm": jnp.ones((2, 4))}}
    >>> message, _ = matrices(stat2()).encode(tree, ())
    >>> message_bytes(message)  # 32 codes and a table; 8 float32
    56
    """
    check_compressor("inner", inner)
    whole = identity()

    def init(tree):
        return inner.init(_split(tree)[0])

    def encode(tree, state, key=None):
        chosen, others = _split(tree)
        encoded, state = inner.encode(chosen, state, key)
        kept, _ = whole.encode(others, ())
        paths = tuple(path for path, _ in named_leaves(tree))
        return Split(encoded, kept, paths, jax.tree.structure(tree)), state

    def decode(message):
        found = inner.decode(message.matrices) | whole.decode(message.vectors)
        return message.structure.unflatten([found[path] for path in message.paths])

    name = f"matrices({inner.name})"
    return Compressor(name, init, encode, decode, is_sparse=inner.is_sparse)


def _split(tree):
    leaves = distinct_leaves(tree)
    chosen = {path: x for path, x in leaves if is_matrix(path, x.ndim)}
    return chosen, {path: x for path, x in leaves if path not in chosen}
