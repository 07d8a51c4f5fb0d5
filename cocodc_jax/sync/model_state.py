"""Model state that is not trained: running statistics, counters, caches.

A loss function with such a state takes it and returns its new value, for one region:

    loss_fn(params, model_state, batch, key) -> (loss, (aux, new_model_state))

Every region has its own, which every inner step replaces. With `ModelState.average` the
floating-point leaves become their plain mean over all regions

- after every inner step, if the method exchanges something at every step;
- else after the events of every step at which a sync was applied, in a separate
  collective that the regions wait for (statistics are small);
- never, if the method exchanges nothing.

With a robust mean (`sync.robust`), regions whose state or parameters are not finite are
left out of this mean too, and receive it. If none is left, each keeps its own.

All other leaves (counters, flags) stay regional.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import LossFn, UserInputs
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import wide_dtype

PyTree = Any
# `(params, model_state, batch, key) -> (loss, (aux, new_model_state))`.
StatefulLossFn = Callable[[PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, Any]]
# That, or a `LossFn` if the model has no state.
AnyLossFn = Callable[..., tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelState:
    """State of a model besides its parameters, see the module.

    Attributes:
      init: one region's initial state, a tree of arrays.
      average: whether floating-point leaves are averaged over the regions when their
        parameters are; else each region keeps its own, and only `mean_model_state`
        averages them.
    """

    init: PyTree
    average: bool = True

    def __post_init__(self):
        for path, leaf in named_leaves(self.init):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    f"model_state has a leaf {path!r} of type {type(leaf).__name__}, "
                    "which is no array: put it into loss_fn"
                )
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise ValueError(
                    f"model_state has a leaf {path!r} that is a PRNG key: leave it "
                    "out, loss_fn is given a fresh key at every step"
                )

    @property
    def averaged_bytes(self) -> int:
        """Bytes that one of several regions sends to average them once."""
        leaves = [x for x in jax.tree.leaves(self.init) if self.average and is_float(x)]
        return sum(math.prod(x.shape) * wide_dtype(x.dtype).itemsize for x in leaves)

    def check(self, method: Method) -> None:
        """Refuse averaging for methods whose regions never sync together."""
        sync = method.sync
        if not self.average or sync is None:
            return

        outer = sync.outer
        is_alone = sync.schedule.is_by_region
        if is_alone or (isinstance(outer, RegionalOuter) and outer.group != "all"):
            raise ValueError(
                f"model_state is averaged over all regions, but those of method="
                f"{method.name!r} exchange "
                f"{'one by one' if is_alone else 'with neighbours alone'}; use "
                "ModelState(init, average=False)"
            )


def is_float(leaf: Any) -> bool:
    """Return whether a leaf of a model's state can be averaged."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def carried(loss_fn: AnyLossFn, model_state: ModelState | None) -> StatefulLossFn:
    """Return a loss that takes and returns a model state, `()` if there is none."""
    if model_state is not None:
        return functools.partial(_checked, loss_fn)

    def without(
        params: PyTree, state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        must = "must return (loss, aux), aux a dict of scalars (`{}` is none)"
        loss, aux = _two(loss_fn(params, batch, key), must)
        return loss, (aux, state)

    return without


def _two(result: Any, must: str, subject: str = "it returned") -> tuple[Any, Any]:
    """Return a loss function's result, or a part of it, if it is a pair."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"loss_fn {must}, but {subject} {result!r}")
    return result


def _checked(
    loss_fn: AnyLossFn, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array
) -> tuple[jax.Array, Any]:
    # Rebuilt in this trace: Flax NNX leaves remember theirs.
    state = jax.tree.map(lambda x: x, state)
    must = "must return (loss, (aux, new_model_state))"
    loss, rest = _two(loss_fn(params, state, batch, key), must)
    _two(
        rest,
        f"of a model with a model_state {must}",
        subject="the second of what it returned is",
    )
    aux, new_state = rest

    def described(tree: PyTree) -> dict[str, str]:
        return {path: f"{x.dtype}{list(x.shape)}" for path, x in named_leaves(tree)}

    old_leaves = described(state)
    new_leaves = described(new_state)
    for path in sorted(old_leaves.keys() | new_leaves.keys()):
        if old_leaves.get(path) != new_leaves.get(path):
            raise ValueError(
                "loss_fn must return (loss, (aux, new_model_state)) with a state like "
                f"the one it was given: its leaf {path!r} is {new_leaves.get(path)}, "
                f"but was {old_leaves.get(path)}"
            )

    # The container may differ, such as a dict for a FrozenDict.
    new = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(new_state))
    return loss, (aux, new)


def at_state(
    loss_fn: AnyLossFn, user_inputs: UserInputs, state: PyTree
) -> tuple[LossFn, UserInputs]:
    """Bind a loss, and the user's inputs, to one state of the model."""

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, Any]:
        value, (aux, _) = loss_fn(params, state, batch, key)
        return value, aux

    if user_inputs.outputs is not None:
        model, of_outputs = user_inputs.outputs
        outputs = (lambda params, batch: model(params, state, batch)), of_outputs
        user_inputs = dataclasses.replace(user_inputs, outputs=outputs)
    return loss, user_inputs
