"""Arithmetic that the transforms share: wide types, safe norms, casts."""

import functools
import math
from collections.abc import Callable
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.transforms.layers import named_leaves


def wide_dtype(dtype) -> jnp.dtype:
    """Return float32, or `dtype` if that is as wide."""
    # `jax.numpy_dtype_promotion("strict")` refuses to promote types asked for.
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4
    return jnp.dtype(dtype if is_wide else jnp.float32)


def widen(x) -> jax.Array:
    """Cast to float32 at least: squares of small numbers vanish in narrower types."""
    return jnp.asarray(x, wide_dtype(jnp.result_type(x)))


def wide_zeros(x) -> jax.Array:
    """Return zeros like `x`, float32 at least, that vary over the axes that it does."""
    return vary_like(jnp.zeros_like(widen(x)), x)


def safe_norm(tree) -> jax.Array:
    """Return the length of all leaves together, with gradient 0 (not nan) at 0."""
    return safe_sqrt(inner_product(tree, tree))


def safe_sqrt(x: float | jax.Array) -> jax.Array:
    """Return the square root of x >= 0, with gradient 0 (not infinity) at 0."""
    positive = jnp.where(x > 0, x, 1.0)
    return jnp.where(x > 0, jnp.sqrt(positive), x)


def is_finite(tree) -> jax.Array:
    """Return whether all floating-point numbers of a tree are finite, bool scalar."""
    leaves = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
    finite = [jnp.isfinite(x).all() for x in leaves]
    return jnp.stack(finite).all() if finite else jnp.ones((), bool)


def masked_median(values: jax.Array, counted: jax.Array) -> jax.Array:
    """Return the median of the values `[M]` that count, bool `[M]`; 0 of none."""
    num = counted.sum()
    ordered = jnp.sort(jnp.where(counted, values, jnp.inf))
    middle = (ordered[(num - 1) // 2] + ordered[num // 2]) / 2
    return jnp.where(num > 0, middle, 0)


def down_to_median(lengths: jax.Array, counted: jax.Array) -> jax.Array:
    """Return factors that cut lengths `[M]` to the median of those that count."""
    limit = masked_median(lengths, counted)
    is_long = counted & (lengths > limit)
    return jnp.where(is_long, limit / jnp.where(is_long, lengths, 1), 1)


def inner_product(a, b) -> jax.Array:
    """Return the sum of products over all leaves, as a scalar of at least float32."""
    products = jax.tree.leaves(
        jax.tree.map(lambda x, y: jnp.sum(widen(x) * widen(y)), a, b)
    )
    if not products:
        return jnp.float32(0.0)
    dtype = np.result_type(*(x.dtype for x in products))
    return functools.reduce(jnp.add, (x.astype(dtype) for x in products))


def difference(a, b):
    """Return a - b, of leaves of at least float32."""
    return jax.tree.map(lambda x, y: widen(x) - widen(y), a, b)


cast_like = optax.tree.cast_like


def vary_like(tree, like):
    """Mark leaves as varying over the mesh axes that their counterparts vary over.

    Inside `jax.shard_map` a tangent must vary as its primal does. Elsewhere this does
    nothing, and the compiler removes the choice between equal values.
    """
    return jax.tree.map(lambda x, y: jnp.where(y == y, x, x), tree, like)


def _is_hole(x) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def has_holes(updates) -> bool:
    """Return whether updates have holes (None, masked)."""
    return any(map(_is_hole, jax.tree.leaves(updates, is_leaf=_is_hole)))


def match_holes(updates, tree):
    """Put the holes of `updates` (None, masked) into a tree of full structure.

    `optax.masked` and `optax.multi_transform` put holes into updates and parameters,
    but pass extra arguments unchanged.
    """
    return jax.tree.map(
        lambda u, x: u if _is_hole(u) else x, updates, tree, is_leaf=_is_hole
    )


def matched(updates, **trees) -> list:
    """Return trees with the holes of `updates`; refuse what would be broadcast."""
    parts = []
    named = named_leaves(updates)
    for name, tree in trees.items():
        try:
            part = match_holes(updates, tree)
            pairs = list(zip(named, jax.tree.leaves(part), strict=True))
        except ValueError as error:
            raise ValueError(
                f"{name} has the structure {jax.tree.structure(tree)}, but the updates "
                f"have {jax.tree.structure(updates)}: pass {name} of the same "
                "parameters"
            ) from error

        for (where, update), leaf in pairs:
            if jnp.shape(leaf) != jnp.shape(update):
                raise ValueError(
                    f"{name} has {where!r} of shape {jnp.shape(leaf)}, but its update "
                    f"has {jnp.shape(update)}: pass {name} of the same parameters"
                )

        parts.append(part)

    return parts


def fill_holes(updates, part, whole):
    """Put `part`, with the holes of `updates`, into a tree of full structure."""
    return jax.tree.map(
        lambda u, x, y: y if _is_hole(u) else x, updates, part, whole, is_leaf=_is_hole
    )


def check_choice(argument: str, value, choices) -> None:
    """Raise ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is unknown; use one of {choices}")


def is_number(value) -> TypeGuard[float]:
    """Return whether a value is a number of Python or NumPy, but not an array."""
    return isinstance(value, (int, float, np.number))


def _check(is_right: Callable[[float], bool], words: str) -> Callable[..., None]:
    """Make `check(argument, value)` of a number; arrays pass unchecked."""

    def check(argument: str, value) -> None:
        is_array = hasattr(value, "dtype") and not is_number(value)
        if not is_array and not (is_number(value) and is_right(value)):
            raise ValueError(f"{argument}={value!r} must be {words}")

    return check


_check_finite_number = _check(lambda x: -math.inf < x < math.inf, "a finite number")


def check_number(argument: str, value) -> None:
    """Raise ValueError unless a value is a finite number, an array or a schedule."""
    if not callable(value):
        _check_finite_number(argument, value)


def check_finite(argument: str, value) -> None:
    """Raise ValueError for a number that is not finite; other values pass."""
    if is_number(value):
        _check_finite_number(argument, value)


check_unit_interval = _check(lambda x: 0 <= x < 1, "at least 0 and below 1")
check_positive = _check(lambda x: x > 0, "positive")
check_not_negative = _check(lambda x: 0 <= x < math.inf, "at least 0 and finite")
check_rate = _check(lambda x: 0 < x < math.inf, "positive and finite")
check_count = _check(lambda x: x >= 1 and x % 1 == 0, "a whole number, at least 1")
check_share = _check(lambda x: 0 < x <= 1, "above 0 and at most 1")


def check_outer(outer_lr, outer_momentum) -> None:
    """Raise ValueError unless an outer step's rate and momentum are valid."""
    check_rate("outer_lr", outer_lr)
    check_unit_interval("outer_momentum", outer_momentum)


def descend(learning_rate) -> optax.GradientTransformation:
    """Scale by minus the rate; Optax would not scale for None, not even by -1."""
    check_number("learning_rate", learning_rate)
    return optax.scale_by_learning_rate(learning_rate)


def check_unused(argument: str, value, default, where: str) -> None:
    """Raise ValueError for a number that was given but has no meaning."""
    if is_number(value) and value != default:
        raise ValueError(
            f"{argument}={value} has no meaning with {where}; leave it out"
        )


def check_between(argument: str, value, least, most) -> None:
    """Raise ValueError unless a number is in a range; arrays pass unchecked."""
    _check(lambda x: least <= x <= most, f"between {least} and {most}")(argument, value)


def check_transform(argument: str, value, made_by: str) -> None:
    """Raise ValueError unless it is a transformation; `made_by` is an example."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise ValueError(
            f"{argument}={value!r} must be an optax.GradientTransformation, as "
            f"{made_by} gives"
        )


def check_at_least(argument: str, value, least: int) -> None:
    """Raise ValueError unless a static number is whole, and at least `least`."""
    words = f"a whole number, at least {least}"
    if not hasattr(value, "__index__"):
        raise ValueError(f"{argument}={value!r} must be {words}")
    if value < least:
        raise ValueError(f"{argument}={value} must be at least {least}")
