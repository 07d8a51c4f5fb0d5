"""Random state in an inner optimizer's state, such as that of `optax.add_noise`.

If all regions had a copy of it, they would add equal noise, and their mean would be as
noisy as one region. So each region but the first gets its own. Regions that exchange
something at every step keep equal ones, because they must stay equal.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Names of fields with random state that is no typed key.
_RAW_NAMES = ("key", "rng", "seed")
_KEY_SHAPES = ((2,), (4,))  # Of the data of JAX's implementations.


def has_keys(state: PyTree) -> bool:
    """Return whether an optimizer's state holds random state."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return any(_is_random(path, x) for path, x in leaves)


def fold_keys(state: PyTree, number: Any) -> PyTree:
    """Return one region's state with random state of its own.

    Args:
      state: of the optimizer. Typed keys are found by their dtype, raw ones (uint32)
        and seeds (one whole number) by "key", "rng" or "seed" in their field's name.
      number: int32 scalar, such as the region's index; 0 leaves the state as it is.
    """

    def one(path: Any, x: Any) -> Any:
        return _folded(x, number) if _is_random(path, x) else x

    return jax.tree_util.tree_map_with_path(one, state)


def with_keys_of(state: PyTree, other: PyTree) -> PyTree:
    """Return a state with the random state of another one of the same optimizer."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, y: y if _is_random(path, x) else x, state, other
    )


def _folded(x: Any, number: Any) -> jax.Array:
    """Draw a key or seed anew, unless `number` is 0."""
    if _is_typed(x) or x.shape:
        return jnp.where(number > 0, jax.random.fold_in(x, number), x)
    key = jax.random.fold_in(jax.random.key(x), number)
    limit = jnp.iinfo(x.dtype).max
    return jnp.where(number > 0, jax.random.randint(key, (), 0, limit, x.dtype), x)


def _is_typed(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_random(path: tuple, x: Any) -> bool:
    if not hasattr(x, "dtype"):
        return False
    if _is_typed(x):
        return True
    name = str(getattr(path[-1], "name", getattr(path[-1], "key", ""))) if path else ""
    if not any(word in name.lower() for word in _RAW_NAMES):
        return False
    if x.dtype == jnp.uint32 and x.shape[-1:] in _KEY_SHAPES:
        return True
    return "seed" in name.lower() and jnp.issubdtype(x.dtype, jnp.integer)


def warn_of_raw_keys(state: PyTree) -> None:
    """Warn of leaves that may be raw keys, but are not named so."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        is_raw = x.dtype == jnp.uint32 and x.shape in _KEY_SHAPES
        if is_raw and not _is_random(path, x):
            warnings.warn(
                f"the inner optimizer's state has uint32{list(x.shape)} at "
                f"{jax.tree_util.keystr(path)!r}: if it is a PRNG key, all regions "
                "draw the same from it; use a typed key, jax.random.key(seed)",
                stacklevel=4,
            )
