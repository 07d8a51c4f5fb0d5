"""Compressors: encode a tree to a message of packed arrays, and decode it.

    memory = compressor.init(tree)
    message, memory = compressor.encode(tree, memory, key)
    tree = compressor.decode(message)

All three are pure and have static shapes: they run under jit, vmap (a message per
region) and shard_map (where an all-gather of a message is an all-gather of its
arrays). A message is a pytree whose array leaves are exactly what goes on the wire;
the shape and dtype that `decode` restores are static metadata of its `Packed` nodes,
which both ends know beforehand. `message_bytes` counts the leaves.

A compressor with memory must survive a bad batch: a number that is not finite would
stay in its memory forever. `keep_finite` makes it keep the old memory then, and marks
the message, which a mean over regions leaves out (`without_bad`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.transforms.layers import distinct_leaves, is_stack, named_leaves
from cocodc_jax.transforms.numerics import is_finite


@runtime_checkable
class CompressorInitFn(Protocol):
    """The `init` of a `Compressor`."""

    def __call__(self, tree: Any, /) -> Any:
        """Return the memory before the first message.

        Args:
          tree: arrays of the shapes and dtypes that will be encoded, of one region.

        Returns:
          The memory, a tree of arrays; `()` for a compressor without one.
        """
        ...


@runtime_checkable
class CompressorEncodeFn(Protocol):
    """The `encode` of a `Compressor`."""

    def __call__(
        self, tree: Any, memory: Any, key: jax.Array | None = None, /
    ) -> tuple[Any, Any]:
        """Encode a tree, and return the memory for the next call.

        Args:
          tree: float arrays of any shape; only `identity` takes any dtype.
          memory: what `init` or the last `encode` returned.
          key: PRNG key; only stochastic rounding needs one.

        Returns:
          The message, a tree whose array leaves are exactly what goes on the wire, and
          the new memory, with the structure, shapes and dtypes of the old one.

        Raises:
          ValueError: if leaves are of another dtype, a key is missing, or the memory
            is of another compressor or tree.
        """
        ...


@runtime_checkable
class CompressorDecodeFn(Protocol):
    """The `decode` of a `Compressor`."""

    def __call__(self, message: Any, /) -> Any:
        """Return the tree of a message, with the structure, shapes and dtypes encoded.

        Args:
          message: from `encode`, in this region or another one.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Compressor:
    """Three pure functions of one region, and a name.

    Attributes:
      name: its name in configurations and reports.
      init: returns the memory before the first message.
      encode: encodes a tree; see `CompressorEncodeFn`.
      decode: decodes a message.
      is_sparse: whether messages lack entries of a leaf, which decode to 0.
      needs_model: whether it reads the names and shapes of a model's leaves.
      has_memory: whether it is a result of `keep_finite`: if a message is not finite,
        it keeps its memory, and means over regions leave the message out.
    """

    name: str
    init: CompressorInitFn
    encode: CompressorEncodeFn
    decode: CompressorDecodeFn
    is_sparse: bool = dataclasses.field(default=False, kw_only=True)
    needs_model: bool = dataclasses.field(default=False, kw_only=True)
    has_memory: bool = dataclasses.field(default=False, kw_only=True)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["shape", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """One encoded leaf: a pytree of arrays, and its own shape and dtype, static."""

    arrays: Any
    shape: tuple[int, ...]
    dtype: Any


def message_bytes(message) -> int:
    """Return the bytes of a message, or of its shapes from `jax.eval_shape`.

    >>> import jax, jax.numpy as jnp
    >>> from cocodc_jax.transforms import quantize
    >>> compressor = quantize.int4(block_size=64)
    >>> message, _ = compressor.encode(jnp.ones((10, 64)), ())
    >>> message_bytes(message)  # 640 / 2 bytes of codes, 10 float32 scales
    360
    """
    leaves = jax.tree.leaves(message)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def keep_finite(compressor: Compressor) -> Compressor:
    """Let a compressor with memory survive values that are not finite.

    If the message or the new memory of a call has a number that is not finite, the
    memory stays as it was, and all floating-point arrays of the message become NaN, a
    mark for its readers (`without_bad`). A message without such arrays has no mark.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.error_feedback import error_feedback
    >>> compressor = error_feedback(identity())  # As it is in its factory.
    >>> memory = compressor.init(jnp.zeros(2))
    >>> message, memory = compressor.encode(jnp.array([1.0, jnp.nan]), memory)
    >>> print(compressor.decode(message), memory.residual)
    [nan nan] [0. 0.]
    """

    def encode(tree: Any, memory: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
        message, new_memory = compressor.encode(tree, memory, key)
        finite = is_finite((message, new_memory))
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), new_memory, memory
        )
        return marked(message, finite), kept

    return dataclasses.replace(compressor, encode=encode, has_memory=True)


def marked(message, finite: jax.Array):
    """Return a message whose floating-point arrays are NaN unless `finite`, a bool."""

    def mark(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(finite, x, jnp.nan).astype(x.dtype)

    return jax.tree.map(mark, message)


def without_bad(messages, weights: jax.Array):
    """Give weight 0 to messages that are not finite, and their weight to the others.

    If none is finite, all stay as they are, so the mean is NaN and the error visible.

    Args:
      messages: of M regions as one tree, every array `[M, ...]`.
      weights: `[M]` of the regions, of any sum, which is kept.

    Returns:
      The messages, zero where they have weight 0, and the weights.
    """
    bad = (weights > 0) & ~jax.vmap(is_finite)(messages)
    rest = jnp.where(bad, 0, weights)
    total = rest.sum()
    is_some = bad.any() & (total > 0)
    scale = weights.sum() / jnp.where(total > 0, total, 1)
    weights = jnp.where(is_some, rest * scale, weights)
    return zeroed(messages, ~(bad & is_some)), weights


def zeroed(messages, kept: jax.Array):
    """Replace messages `[M, ...]`, or a single one, by zeros unless `kept`, bool `[M]`.

    A weight of 0 is not enough, as 0 times NaN is NaN.
    """

    def choose(x: Any) -> jax.Array:
        shape = (*kept.shape, *(1,) * (x.ndim - kept.ndim))
        return jnp.where(kept.reshape(shape), x, jnp.zeros_like(x))

    return jax.tree.map(choose, messages)


def per_leaf(
    name: str,
    encode_leaf: Callable[[jax.Array, jax.Array | None], Any],
    decode_leaf: Callable[[Any, tuple[int, ...]], jax.Array],
    is_exact: bool = False,
) -> Compressor:
    """Lift a pair of functions on one array to a compressor of trees, without memory.

    `encode_leaf(leaf, key or None)` returns arrays, `decode_leaf(arrays, shape)` a leaf
    of any dtype and any shape of that size. If nothing is lost (`is_exact`), leaves may
    be of any dtype.
    """

    def encode(tree: Any, memory: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
        if not is_exact:
            check_floats(name, tree)
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))

        keys = [None] * len(leaves)
        if key is not None and leaves:
            keys = list(jax.random.split(key, len(leaves)))

        packed = [
            Packed(encode_leaf(x, k), x.shape, x.dtype)
            for x, k in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, packed), memory

    def decode(message):
        return map_packed(lambda p: decode_leaf(p.arrays, p.shape), message)

    return Compressor(name, lambda tree: (), encode, decode)


def map_packed(decode_leaf: Callable[[Packed], jax.Array], message):
    """Decode every `Packed` of a message to its shape and dtype."""
    return jax.tree.map(
        lambda p: decode_leaf(p).reshape(p.shape).astype(p.dtype),
        message,
        is_leaf=lambda x: isinstance(x, Packed),
    )


def identity() -> Compressor:
    """Send every leaf as it is."""
    return per_leaf("identity", lambda x, key: x, lambda arrays, shape: arrays, True)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrices", "vectors"],
    meta_fields=["paths", "structure"],
)
@dataclasses.dataclass(frozen=True)
class Split:
    """A message of `matrices`, in two parts."""

    matrices: Any  # The inner compressor's message of a dict from path to matrix.
    vectors: Any  # The other leaves unchanged, a dict from path to vector.
    paths: tuple[str, ...]  # Of all leaves in order, static.
    structure: Any  # Of the tree, static.


def matrices(
    inner: Compressor, has_layers: Callable[[str], bool] = is_stack
) -> Compressor:
    """Encode matrices by `inner`, and send vectors and scalars as they are.

    Vectors are norm scales: one number in some thousands, by which every activation is
    multiplied. To compress them saves almost nothing and has an effect everywhere.
    MuLoCo (arXiv 2505.23725) sends them uncompressed. A leaf with a layer axis (see
    `layers.is_stack`) counts as one of its layers.

    Args:
      inner: any compressor; it sees a flat dict from path to matrix.
      has_layers: `has_layers(path) -> bool`, whether a leaf's first axis is of layers;
        by default a guess by its name.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.statistical import stat2
    >>> tree = {"blocks": {"up": jnp.ones((2, 4, 4)), "norm": jnp.ones((2, 4))}}
    >>> message, _ = matrices(stat2()).encode(tree, ())
    >>> message_bytes(message)  # 32 codes and a table; 8 float32
    56
    """
    check_compressor("inner", inner)
    of_vectors = identity()

    def split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the matrices and the vectors of a tree, by path."""
        leaves = distinct_leaves(tree)
        matrices = {path: x for path, x in leaves if x.ndim - has_layers(path) >= 2}
        vectors = {path: x for path, x in leaves if path not in matrices}
        return matrices, vectors

    def init(tree: Any) -> Any:
        matrices, _ = split(tree)
        return inner.init(matrices)

    def encode(tree: Any, memory: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
        matrices, vectors = split(tree)
        matrix_message, memory = inner.encode(matrices, memory, key)
        vector_message, _ = of_vectors.encode(vectors, ())

        message = Split(
            matrices=matrix_message,
            vectors=vector_message,
            paths=tuple(path for path, _ in named_leaves(tree)),
            structure=jax.tree.structure(tree),
        )
        return message, memory

    def decode(message: Any) -> Any:
        leaves = inner.decode(message.matrices) | of_vectors.decode(message.vectors)
        return message.structure.unflatten([leaves[path] for path in message.paths])

    compressor = Compressor(
        name=f"matrices({inner.name})",
        init=init,
        encode=encode,
        decode=decode,
        is_sparse=inner.is_sparse,
        needs_model=True,
    )
    # Vectors that are not finite must not reach the memory of matrices.
    return keep_finite(compressor) if inner.has_memory else compressor


def check_floats(name: str, tree: Any) -> None:
    """Refuse leaves that must not be rounded, such as counters."""
    for path, x in named_leaves(tree):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise ValueError(
                f"{name} takes float arrays, but the leaf {path!r} is of dtype "
                f"{jnp.result_type(x)}, which it would round; encode such leaves by "
                "identity(), or leave them out"
            )


def check_compressor(argument: str, value: Any) -> None:
    """Raise ValueError unless `value` is a `Compressor`."""
    if not isinstance(value, Compressor):
        raise ValueError(
            f"{argument}={value!r} must be a Compressor, as quantize.int8() or "
            "compression.parse('int8') gives"
        )


def check_state(
    name: str,
    state: Any,
    kind: type,
    per_leaf: Callable[[Any], Sequence[Any]],
    tree: Any,
    shapes: Sequence[tuple[int, ...]],
) -> None:
    """Refuse a state of another type than `kind`, or of another tree.

    `per_leaf(state)` has a value for each leaf; `shapes` are those for this tree.
    """
    remedy = "pass what `init(tree)` of the same tree or the last `encode` returned"
    if not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, but must be the {kind.__name__} of "
            f"{name}: {remedy}"
        )

    known = per_leaf(state)
    if len(shapes) != len(known):
        raise ValueError(
            f"state of {name} is of {len(known)} leaves, but the tree has "
            f"{len(shapes)}: {remedy}"
        )

    for (path, x), array, shape in zip(named_leaves(tree), known, shapes, strict=True):
        if np.shape(array) != shape:
            raise ValueError(
                f"state of {name} has {np.shape(array)} for the leaf {path!r} of shape "
                f"{np.shape(x)}, which takes {shape}: {remedy}"
            )


def stateless(argument: str, compressor: Compressor | None) -> Compressor:
    """Return a compressor to use inside another, `identity()` for None.

    One that keeps a state is refused: the outer one would drop it.
    """
    compressor = identity() if compressor is None else compressor
    check_compressor(argument, compressor)
    if compressor.init(()) != ():
        raise ValueError(
            f"{argument}={compressor.name} keeps a state and cannot be used inside "
            "another compressor; wrap the outer one instead"
        )
    if compressor.needs_model:
        raise ValueError(
            f"{argument}={compressor.name} is given values without the model's shapes; "
            "put matrices before the compressor that sends them"
        )

    return compressor


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Fold a shape into the matrix with the fewest rows plus columns.

    Axes keep their order; (1, n) for a vector, (1, 1) for a scalar. A tensor
    [layers, in, out] of square layers becomes [layers * in, out].

    >>> matrix_shape((1024, 16, 64))
    (1024, 1024)
    """
    if len(shape) < 2:
        return (1, math.prod(shape))
    splits = [
        (math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))
    ]
    # Of equal sums the later: the one that keeps the stack axis with the rows.
    return min(reversed(splits), key=sum)
