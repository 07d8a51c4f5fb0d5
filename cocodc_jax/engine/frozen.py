"""Parameters that are not trained: find them and keep them separate.

A program trains a tree with None for every frozen leaf, so that fragments, optimizers,
messages and checkpoints never see those. The frozen tree has None for the trained ones.
There is one copy of it for all regions, sharded inside a region like the parameters.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.layers import named_leaves

PyTree = Any
# A tree of bools like the parameters (or a prefix of one), a predicate on paths, or
# "optimizer".
Trainable = PyTree | Callable[[str], bool] | str | None

# Primitives that map zeros to zeros.
_KEEP_ZERO = frozenset(
    "add broadcast_in_dim convert_element_type copy neg reshape sub transpose".split()
)


def split(tree: PyTree, trained: PyTree) -> tuple[PyTree, PyTree]:
    """Split `tree` into trained and frozen leaves, each with None elsewhere."""
    if trained is None:
        return tree, ()
    return (
        jax.tree.map(lambda is_trained, x: x if is_trained else None, trained, tree),
        jax.tree.map(lambda is_trained, x: None if is_trained else x, trained, tree),
    )


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """Return the full tree; the inverse of `split`."""
    if not jax.tree.leaves(frozen):
        return trained
    return jax.tree.map(
        lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
    )


@jax.jit
def copied(tree: PyTree) -> PyTree:
    """Copy arrays in place of the user's, who may donate or overwrite them."""
    return jax.tree.map(jnp.copy, tree)


def find_trained(
    trainable: Trainable, params: PyTree, optimizer: optax.GradientTransformation
) -> PyTree:
    """Return bools like the parameters, None if all of them are trained.

    Warns if `trainable` is None and the optimizer never updates some leaves.
    """
    if trainable is None:
        _warn_of_unchanged(params, optimizer)
        return None

    treedef = jax.tree.structure(params)
    paths = [path for path, _ in named_leaves(params)]
    if isinstance(trainable, str) and trainable == "optimizer":
        unchanged = _are_unchanged(params, optimizer)
        are_trained = [not is_unchanged for is_unchanged in unchanged]
    elif callable(trainable):
        are_trained = [bool(trainable(path)) for path in paths]
    else:
        are_trained = _listed(trainable, params)

    examples = ", ".join(repr(path) for path in paths[:3])
    if len(paths) > 3:
        examples += ", ..."
    if not any(are_trained):
        raise ValueError(
            f"trainable={trainable!r} trains none of the leaves {examples}"
        )
    if not all(are_trained):
        return treedef.unflatten(are_trained)
    if callable(trainable) or isinstance(trainable, str):
        raise ValueError(
            f"trainable={trainable!r} freezes none of the leaves {examples}: leave it "
            "out, or name those that are trained"
        )
    return None


def _listed(trainable: PyTree, params: PyTree) -> list[bool]:
    """List the bools of a tree, one for each leaf of the parameters."""
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(trainable, params))
    except ValueError as error:
        raise ValueError(
            f"trainable has the structure {jax.tree.structure(trainable)}, but params "
            f"has {jax.tree.structure(params)}; give a bool for each leaf, or for all "
            "below a node"
        ) from error

    wrong = [leaf for leaf in leaves if not isinstance(leaf, bool | np.bool_)]
    if wrong:
        raise ValueError(
            f"trainable={wrong[0]!r} must be 'optimizer', a predicate on paths, or a "
            "tree of bools like params"
        )
    return leaves


def _warn_of_unchanged(params: PyTree, optimizer: optax.GradientTransformation) -> None:
    state = jax.eval_shape(optimizer.init, params)
    is_masked = lambda node: isinstance(node, optax.MaskedState)  # noqa: E731
    nodes = jax.tree.leaves(state, is_leaf=is_masked)
    if not any(is_masked(node) for node in nodes):  # Tracing an update is slow.
        return

    try:
        unchanged = _are_unchanged(params, optimizer)
    except Exception:  # Some optimizers trace only under the region axis.
        return
    leaves = named_leaves(params)
    frozen = [leaf for leaf, is_so in zip(leaves, unchanged, strict=True) if is_so]
    if not frozen or len(frozen) == len(leaves):
        return

    frozen_bytes = sum(x.size * x.dtype.itemsize for _, x in frozen)
    total_bytes = sum(x.size * x.dtype.itemsize for _, x in leaves)
    warnings.warn(
        f"the optimizer leaves {len(frozen)} of {len(leaves)} leaves as they are, such "
        f"as {frozen[0][0]!r}: {frozen_bytes:,} of {total_bytes:,} bytes that each "
        "region keeps, and sends, for nothing; pass trainable='optimizer'",
        stacklevel=6,
    )


def _are_unchanged(
    params: PyTree, optimizer: optax.GradientTransformation
) -> list[bool]:
    """Return for each leaf whether its update is zero for any gradient."""
    update = with_named_extras(optimizer).update
    shapes = jax.eval_shape(lambda x: x, params)
    state = jax.eval_shape(optimizer.init, shapes)
    update_of = jax.make_jaxpr(lambda *args: update(*args, value=jnp.float32(0))[0])
    jaxpr = update_of(shapes, state, shapes).jaxpr
    return _zeros(jaxpr, [False] * len(jaxpr.invars))


def _zeros(jaxpr: jex_core.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Return which outputs are zero, where `inputs` says which inputs are."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def is_zero(x: Any) -> bool:
        if isinstance(x, jex_core.Literal):
            return bool(np.all(x.val == 0))
        return known.get(x, False)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        zeros = [is_zero(x) for x in eqn.invars]
        if name == "mul":
            outputs = [any(zeros)]
        elif name == "select_n":
            outputs = [all(zeros[1:])]
        elif name in ("jit", "pjit"):
            outputs = _zeros(eqn.params["jaxpr"].jaxpr, zeros)
        elif name == "cond":
            branches = [_zeros(x.jaxpr, zeros[1:]) for x in eqn.params["branches"]]
            outputs = [all(of_output) for of_output in zip(*branches, strict=True)]
        else:
            outputs = [name in _KEEP_ZERO and bool(zeros) and all(zeros)]
        known.update(zip(eqn.outvars, outputs, strict=False))
    return [is_zero(x) for x in jaxpr.outvars]


def without_masks(second_moment: Callable, params: PyTree) -> Callable:
    """Hide the masks of frozen leaves from the user's `second_moment` function."""
    treedef = jax.tree.structure(params)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    unmasked = lambda x: None if is_masked(x) else x  # noqa: E731

    def without(state: PyTree) -> PyTree:
        plain = jax.tree.map(unmasked, state, is_leaf=is_masked)
        leaves = jax.tree.leaves(second_moment(plain))
        if len(leaves) != treedef.num_leaves:  # Masked for another reason.
            return second_moment(state)
        return treedef.unflatten(leaves)

    return without
