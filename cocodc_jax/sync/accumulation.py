"""After how many steps an inner optimizer updates the parameters.

`optax.MultiSteps` and `optax.apply_every` accumulate k gradients for an update, and
`optax.contrib.sam` leaves its true parameters for k - 1 steps. In between, a sync
should neither send nor replace the parameters. A method counts steps, that is calls of
the optimizer, so its events must be at multiples of k.

No state holds the number k. It is found by tracing the update, wherever the
accumulation is wrapped: the counter's next value is computed from its last one until it
is 0 again. This needs no gradient and no parameter. If the counter depends on anything
else (a number of steps that is a schedule, steps that `apply_if_finite` or
`should_skip_update_fn` leave out), k is unknown.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.sync.inner_state import kind_of
from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.known_values import evaluate

PyTree = Any

# Longer accumulations count as unknown.
MAX_STEPS = 4096


class Accumulator(NamedTuple):
    """A type of state that counts steps up to an update.

    Attributes:
      name: the function that makes it.
      counter: field that is 0 after an update.
      updates: field that counts updates, or None.
      inside: fields of states that change only with an update.
    """

    name: str
    counter: str
    updates: str | None = None
    inside: tuple[str, ...] = ()


ACCUMULATORS = {
    "MultiStepsState": Accumulator(
        "optax.MultiSteps", "mini_step", "gradient_step", ("inner_opt_state",)
    ),
    "ApplyEvery": Accumulator("optax.apply_every", "count"),
    "SAMState": Accumulator(
        "optax.contrib.sam", "steps_since_sync", inside=("opt_state",)
    ),
}


class Accumulation(NamedTuple):
    """The accumulations of one optimizer.

    Attributes:
      names: the functions that make them.
      steps: steps after which all have made an update; None if unknown.
      periods: the same for each accumulation, outer ones before those that they
        contain.
    """

    names: tuple[str, ...]
    steps: int | None
    periods: tuple[int | None, ...]


NONE = Accumulation((), 1, ())


def find(optimizer: optax.GradientTransformation, params: PyTree) -> Accumulation:
    """Find the accumulations of an optimizer; traces its update if there are any.

    Args:
      optimizer: the inner optimizer, with any wrappers around an accumulation.
      params: one region's parameters, or their shapes.

    >>> import jax, optax
    >>> tx = optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation()
    >>> find(optax.chain(optax.clip(1.0), tx), jax.numpy.zeros(3)).steps
    4
    """
    shapes = jax.eval_shape(lambda x: x, params)
    state = jax.eval_shape(optimizer.init, shapes)

    nodes = accumulators(state)
    if not nodes:
        return NONE

    names = tuple(dict.fromkeys(ACCUMULATORS[kind_of(x)].name for x in nodes))
    bare = of_multi_steps(optimizer)
    if bare is not NONE and len(nodes) == 1:  # Without a trace.
        return bare

    try:
        series = _series(optimizer, shapes, state)
    except Exception:  # Some optimizers trace only under the region axis.
        series = None

    if series is None:
        return Accumulation(names, None, (None,) * len(nodes))

    periods = tuple(_first_return(column) for column in np.transpose(series))
    return Accumulation(names, len(series), periods)


def of_multi_steps(optimizer: optax.GradientTransformation) -> Accumulation:
    """Return the accumulation of an `optax.MultiSteps`, `NONE` for others."""
    bare = getattr(optimizer.update, "__self__", None)
    if not isinstance(bare, optax.MultiSteps):
        return NONE
    every_k = bare._every_k_schedule(np.int32(0))
    steps = every_k if isinstance(every_k, int) else None
    return Accumulation((ACCUMULATORS["MultiStepsState"].name,), steps, (steps,))


def accumulators(state: PyTree) -> list[Any]:
    """Return the states that accumulate, outer ones before those that they contain."""
    nodes = []
    for node in jax.tree.leaves(state, is_leaf=accumulates):
        if accumulates(node):
            nodes.append(node)
            nodes += [x for field in node for x in accumulators(field)]
    return nodes


def accumulates(node: Any) -> bool:
    """Return whether a node of an optimizer's state is one that accumulates."""
    # Where one call of `sam` does all its steps, it has no copy.
    return kind_of(node) in ACCUMULATORS and getattr(node, "cache", ()) is not None


def _first_return(counts: np.ndarray) -> int:
    """Return after how many steps a counter is 0 again; 1 if it never changes."""
    before = np.concatenate([[0], counts[:-1]])
    (returns,) = np.nonzero((counts == 0) & (before != 0))
    return int(returns[0]) + 1 if len(returns) else 1


def _series(
    optimizer: optax.GradientTransformation, shapes: PyTree, state: PyTree
) -> list[list[int]] | None:
    """List all counters step by step until they are 0 again; None if not known."""
    update = with_named_extras(optimizer).update

    def counters_after(grads: PyTree, state: PyTree, params: PyTree) -> list[jax.Array]:
        _, new = update(grads, state, params, value=jnp.zeros(()))
        return _counters(new)

    closed = jax.make_jaxpr(counters_after)(shapes, state, shapes)
    places = _places(state, shapes)
    counts: list[Any] = [np.zeros((), np.int32) for _ in places]

    series = []
    while len(series) < MAX_STEPS:
        arguments: list[Any] = [None] * len(closed.jaxpr.invars)
        for place, count in zip(places, counts, strict=True):
            arguments[place] = count
        # A trace may be in progress, whose operations would not be computed.
        with jax.ensure_compile_time_eval():
            counts = evaluate(closed.jaxpr, closed.consts, arguments)

        if any(count is None for count in counts):
            return None

        series.append([int(count) for count in counts])
        if not any(series[-1]):
            return series

    return None


def _counters(state: PyTree) -> list[Any]:
    return [
        getattr(node, ACCUMULATORS[kind_of(node)].counter)
        for node in accumulators(state)
    ]


def _places(state: PyTree, shapes: PyTree) -> list[int]:
    """Return the numbers of the counters among the leaves of gradients and state."""
    first = len(jax.tree.leaves(shapes))
    numbers = range(first, first + len(jax.tree.leaves(state)))
    return _counters(jax.tree.structure(state).unflatten(numbers))
