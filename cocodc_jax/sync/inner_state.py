"""What a merge does to copies of the parameters in an inner optimizer's state.

A merge replaces a region's parameters. The state of most optimizers has no copy of
them, and is unchanged. Some hold a copy, which is treated by the type of the state:

- A point that the next step starts from moves as the parameters do, by new minus old:
  `z` of `optax.contrib.schedule_free`, the true parameters of `sam` during its
  adversarial steps, and the origin of `cocob` and `madgrad`, from which the next
  parameters are computed. To move all of them by the same vector is to move the
  optimizer's coordinates. Schedule-free's third sequence, `x = (y - (1 - b1) z) / b1`,
  moves by the same vector too. With a sync at every step the means over regions of x, y
  and z are those of one run on the mean gradient (the base optimizer SGD, the outer
  step a plain mean). A region's z sums its own gradients. If regions learn different
  things, it keeps differing from the mean, which no rule can avoid without sending z.
- The initial point of `dog`, `dowg`, `prodigy` and `mechanize` stays. It is where
  training began, whatever moved the parameters since. Prodigy's bound on the distance
  to a solution holds for gradients at any points: `sum <g_k, x_0 - x_k> <= <sum g_k,
  x_0 - x*>`.
- The last point of `lbfgs` stays. The gradient that belongs to it was taken there, so
  the difference of both to the next step is still one of the loss.
- A line search's last value and gradient are of the replaced parameters. The value
  becomes infinite, so `optax.value_and_grad_from_state` computes them anew.

Any other copy needs the user's `on_merge`. Copies are found by tracing `init`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import widen

PyTree = Any


class OnMerge(Protocol):
    """What a merge does to an inner optimizer that is not Optax's."""

    def __call__(
        self, opt_state: PyTree, old_params: PyTree, new_params: PyTree, /
    ) -> PyTree:
        """Return one region's optimizer state after a merge.

        Args:
          opt_state: of the inner optimizer; copies in states of Optax are moved.
          old_params: the region's parameters before the merge.
          new_params: the region's parameters after it.

        Returns:
          A state of the same structure, shapes and dtypes.
        """
        ...


# Fields that hold a copy of the parameters, by the type of state, see the module.
MOVES = {
    "COCOBState": ("init_particles",),
    "MadgradState": ("x0",),
    "SAMState": ("cache",),
    "ScheduleFreeState": ("z",),
}
STAYS = {
    "DoGState": ("init_params",),
    "DoWGState": ("init_params",),
    "MechanicState": ("x0",),
    "ProdigyState": ("params0",),
    "ScaleByDistanceOverGradientsState": ("init_params",),
    "ScaleByLBFGSState": ("params",),
    # Measurements of updates; the first is of the parameters.
    "SnapshotState": ("measurement",),
    "MonitorState": ("measurements", "measure_states"),
}
LINE_SEARCHES = ("ScaleByBacktrackingLinesearchState", "ScaleByZoomLinesearchState")

# Why a type of state is refused wherever parameters are merged.
REFUSED = {
    "LookaheadState": (
        "optax.lookahead trains a pair of fast and slow parameters, and regions would "
        "send both; use its fast optimizer alone, whose syncs are such steps already"
    ),
}
# Why `RegionProgram` cannot have a type of state. It passes the gradient of a batch and
# `value` to an update, in a scan.
NOT_IN_PROGRAM = {
    "DifferentiallyPrivateAggregateState": "needs the gradient of each example",
    "HutchinsonState": "needs obj_fn, the loss as a function of the parameters",
    "MonitorState": "has a state of another structure after its first update",
    "ScaleByBacktrackingLinesearchState": "needs grad and value_fn",
    "ScaleByZoomLinesearchState": "needs grad and value_fn",
}

_KEEPS_VALUES = frozenset(
    "copy convert_element_type reshape squeeze broadcast_in_dim concatenate".split()
)


def kind_of(node: Any) -> str:
    """Return the name of a state's type if it is Optax's or ours, else ""."""
    kind = type(node)
    is_known = kind.__module__.split(".")[0] in ("optax", "cocodc_jax")
    return kind.__name__ if is_known and hasattr(kind, "_fields") else ""


def kinds_in(state: PyTree) -> set[str]:
    """Return the types of all states in an optimizer's state."""
    kinds: set[str] = set()

    def note(node: Any) -> bool:
        kinds.add(kind_of(node))
        return False

    jax.tree.leaves(state, is_leaf=note)
    return kinds - {""}


def is_moved(state: PyTree) -> bool:
    """Return whether a merge changes an optimizer's state without `on_merge`."""
    return not kinds_in(state).isdisjoint({*MOVES, *LINE_SEARCHES})


def merge_opt_state(
    opt_state: PyTree,
    old_params: PyTree,
    new_params: PyTree,
    on_merge: OnMerge | None = None,
) -> PyTree:
    """Apply a merge's change of the parameters to an inner optimizer's state.

    `RegionProgram` and `synchronized` call it themselves. Call it where your own code
    replaces the parameters between two updates. The module says what it changes.

    Args:
      opt_state: of one region, or of R regions with leaves `[R, ...]`.
      old_params: the parameters before the merge, leaves as of `opt_state`. Leaves that
        the merge leaves alone are equal in both.
      new_params: the parameters after it.
      on_merge: `(opt_state, old_params, new_params) -> opt_state`, for copies in states
        that are not Optax's; called last.

    Raises:
      ValueError: if a copy has another structure than the parameters.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax.contrib.schedule_free_sgd(0.1)
    >>> state = tx.init(jnp.zeros(2))
    >>> merge_opt_state(state, jnp.zeros(2), jnp.ones(2)).z.tolist()
    [1.0, 1.0]
    """

    def after_merge(node: Any) -> Any:
        kind = kind_of(node)
        for field in MOVES.get(kind, ()):
            copy = getattr(node, field)
            if copy is not None:
                moved = _moved(copy, old_params, new_params, f"{kind}.{field}")
                node = node._replace(**{field: moved})

        if kind in LINE_SEARCHES:
            is_new = _differs(old_params, new_params, jnp.ndim(node.value))
            node = node._replace(value=jnp.where(is_new, jnp.inf, node.value))
        return node

    changed = _rewritten(opt_state, after_merge)
    return changed if on_merge is None else on_merge(changed, old_params, new_params)


def _rewritten(state: PyTree, rule: Callable[[Any], Any]) -> PyTree:
    """Apply a rule to all states of Optax's and ours, first to those inside."""

    def is_known(node: Any) -> bool:
        return bool(kind_of(node)) and not _is_hole(node)

    def one(node: Any) -> Any:
        if not is_known(node):
            return node
        return rule(type(node)(*(_rewritten(field, rule) for field in node)))

    return jax.tree.map(one, state, is_leaf=is_known)


def _is_hole(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)


def _moved(copy: PyTree, old: PyTree, new: PyTree, field: str) -> PyTree:
    """Add new minus old parameters to a copy, which may have masked leaves.

    `field` is its name in errors.
    """

    def add(x: Any, before: PyTree, after: PyTree) -> Any:
        if _is_hole(x):
            return x
        return (widen(x) + (widen(after) - widen(before))).astype(x.dtype)

    try:
        if hasattr(copy, "shape") and not hasattr(old, "shape"):  # `optax.flatten`.
            old, new = (_flat(tree, copy.ndim - 1) for tree in (old, new))
        moved = jax.tree.map(add, copy, old, new, is_leaf=_is_hole)
        if jax.tree.map(np.shape, moved) != jax.tree.map(np.shape, copy):
            raise ValueError("other shapes")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the inner optimizer's {field} is a copy of the parameters in another "
            "structure, so a merge cannot move it; leave out what changes their "
            "structure before it (such as optax.flatten inside of a mask)"
        ) from error

    return moved


def _flat(params: PyTree, lead: int) -> jax.Array:
    """Return all parameters in one array, as `optax.flatten` has them."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(params)]
    rows = [x.reshape(*x.shape[:lead], -1) for x in leaves]
    return jnp.concatenate(rows, axis=lead)


def _differs(old: PyTree, new: PyTree, lead: int) -> jax.Array:
    """Return whether any parameter differs, of each region if `lead` is 1."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    differ = [(x != y).any(axis=tuple(range(lead, jnp.ndim(x)))) for x, y in pairs]
    return functools.reduce(jnp.logical_or, differ)


class Copies(NamedTuple):
    """Leaves of an optimizer's state that `init` copies from the parameters."""

    state: PyTree  # Shapes.
    unknown: tuple[str, ...]  # Paths of those that no rule is known for.
    some: bool  # Whether there are any.


def find_copies(optimizer: optax.GradientTransformation, params: PyTree) -> Copies:
    """Find the copies of the parameters in an optimizer's state; traces its `init`."""
    shapes = jax.eval_shape(lambda x: x, params)
    closed, state = jax.make_jaxpr(optimizer.init, return_shape=True)(shapes)
    inputs = [True] * len(closed.jaxpr.invars)
    are_copies = _copies(closed.jaxpr, inputs)
    numbered = jax.tree.structure(state).unflatten(range(len(are_copies)))
    known: set[int] = set()

    def note(node: Any) -> Any:
        for field in (*MOVES.get(kind_of(node), ()), *STAYS.get(kind_of(node), ())):
            known.update(jax.tree.leaves(getattr(node, field)))
        return node

    _rewritten(numbered, note)
    paths = [path for path, _ in named_leaves(state)]
    copies = [i for i, is_copy in enumerate(are_copies) if is_copy]
    unknown = tuple(paths[i] for i in copies if i not in known)

    return Copies(state, unknown, bool(copies))


def _copies(jaxpr: jex_core.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Return which outputs are inputs that are marked, or copies of them."""
    known: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def is_copy(x: Any) -> bool:
        return not isinstance(x, jex_core.Literal) and known.get(x, False)

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        values = [is_copy(x) for x in eqn.invars]
        outputs = [name in _KEEPS_VALUES and bool(values) and all(values)]
        if name in ("jit", "pjit"):
            outputs = _copies(eqn.params["jaxpr"].jaxpr, values)
        known.update(zip(eqn.outvars, outputs, strict=False))

    return [is_copy(x) for x in jaxpr.outvars]
