"""Information that parts of a method can ask for by name: one table, `NEEDS`.

A merge rule, a curvature, an outer optimizer and a schedule each name what they need in
a frozenset called `needs`, and receive it under that name: a merge (and its curvature)
as extra arguments of `apply`, an outer optimizer of `update`, and a schedule by
`observe`: of applied updates, or measured on demand.

A new need is only an entry of the table. Entries are pure; the executor keeps the
copies, passes the arrays to a merge's program, and passes observations to the schedule.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.transforms import low_rank
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import widen

LossFn = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]

# Copies of a fragment that can be kept while it is in flight.
STAGED = "staged"
HALFWAY = "midway"
STALE = "stale_params"
REGIONAL_COPIES = (STAGED, HALFWAY)
# Norm of a mean, used by schedules.
NORM = "norm"
# Reductions over all regions' parameters that a schedule can ask for.
MEASURED_NOW = frozenset({"drift", "distance", "tokens"})


@dataclasses.dataclass(frozen=True)
class UserInputs:
    """Inputs of some merges and inner optimizers that only the user can provide.

    Attributes:
      learning_rate: of the inner optimizer, a constant or a schedule of the step.
      second_moment: maps the regional inner optimizer state, every leaf `[R, ...]`, to
        a tree like the parameters; see `adam_second_moment`.
      outputs: the loss in two parts, `model(params, batch) -> outputs` and
        `loss(outputs, batch) -> scalar`. With a `ModelState` the model is
        `model(params, model_state, batch) -> outputs`.
      on_merge: `(opt_state, old_params, new_params) -> opt_state` of one region, for an
        inner optimizer that holds a copy of the parameters: called after each merge. It
        gets a state in which Optax's own copies are moved already, and what it returns
        has the same structure. See `sync/inner_state.py`.
      token_counts: `token_counts(path) -> bool`, which leaves of the parameters are not
        weights but counts of the tokens of a mixture's experts (`models.experts`);
        paths are joined by "/". None if there are none. Outer parameters hold 0 there.
    """

    learning_rate: float | Callable[[int], Any] | None = None
    second_moment: Callable[[PyTree], PyTree] | None = None
    outputs: tuple[Callable, Callable] | None = None
    on_merge: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
    token_counts: Callable[[str], bool] | None = None

    def rate(self, step: int) -> jax.Array:
        """Return the learning rate of the inner step that led to `step`."""
        rate = self.learning_rate
        value = rate(max(step - 1, 0)) if callable(rate) else rate
        return jnp.asarray(value, float)


class MergeContext(NamedTuple):
    """One region's values when a fragment arrives; no leaf has a region axis.

    Attributes:
      local: its local fragment now.
      outer: the outer fragment.
      kept: copies by name: `STAGED` from the start of the sync, `HALFWAY`
        `delay_steps // 2` steps later; None if not needed.
      regional: results of `Need.of_regions`, by need.
      batch: the last batch, or None.
      whole: puts a fragment into the region's parameters.
      sync_key: PRNG key of the sync, equal in every region, or None.
    """

    local: Fragment
    outer: Fragment
    kept: Mapping[str, Fragment | None]
    delay_steps: int | jax.Array
    regional: Mapping[str, Fragment]
    learning_rate: jax.Array | None
    batch: PyTree
    key: jax.Array | None
    whole: Callable[[Fragment], PyTree]
    loss_fn: LossFn
    user_inputs: UserInputs
    sync_key: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Need:
    """One entry of the table.

    Attributes:
      about: its description.
      keeps: copies that must be kept of a fragment in flight.
      given_by: field of `UserInputs` that it comes from, and how to fill it.
      wants_batch: whether it uses the last batch; it then gets a key too.
      wants_key: whether it uses a PRNG key.
      of_regions: `(optimizer state, user_inputs) -> tree` like the parameters, both
        with a leading region axis; its fragment is in `MergeContext.regional`.
      of_region: computes a merge's argument from `MergeContext`; None if a merge always
        receives it.
      of_mean: computed from an applied mean pseudo-gradient, on its devices.
    """

    about: str
    keeps: tuple[str, ...] = ()
    given_by: tuple[str, str] | None = None
    wants_batch: bool = False
    wants_key: bool = False
    of_regions: Callable[[PyTree, UserInputs], PyTree] | None = None
    of_region: Callable[[MergeContext], Any] | None = None
    of_mean: Callable[[Fragment], jax.Array] | None = None


def effective_rank(tree: PyTree) -> jax.Array:
    """Return the mean effective rank of tensors, weighted by their parameters.

    With these weights stacked norms, which factors do not shrink, hardly count. See
    `low_rank.effective_rank` for a single tensor. The weights are ours.
    """
    leaves = named_leaves(tree)
    total = sum(x.size for _, x in leaves)
    # The path distinguishes a stack of layers from a tensor.
    weighted = [
        x.size / total * low_rank.effective_rank({path: x}) for path, x in leaves
    ]
    return jnp.sum(jnp.stack(weighted))


def _gradient_fn(context: MergeContext) -> Callable:
    def loss(part: Fragment) -> jax.Array:
        assert context.key is not None
        return context.loss_fn(context.whole(part), context.batch, context.key)[0]

    return jax.grad(loss)


def _outputs(context: MergeContext) -> tuple[Callable, Callable]:
    assert context.user_inputs.outputs is not None
    return context.user_inputs.outputs


def _later_gradient(context: MergeContext) -> Fragment:
    """Return a region's gradient extrapolated from the two halves, for `secant`."""
    steps = context.delay_steps
    assert isinstance(steps, int)
    first = steps // 2
    rest = steps - steps // 2

    def later(staged: jax.Array, middle: jax.Array, local: jax.Array) -> jax.Array:
        full = (staged - local) / steps
        return full + (middle - local) / rest - (staged - middle) / first

    return jax.tree.map(
        later,
        jax.tree.map(widen, context.kept[STAGED]),
        jax.tree.map(widen, context.kept[HALFWAY]),
        jax.tree.map(widen, context.local),
    )


_MOMENT = "second_moment=adam_second_moment(b2) with the optimizer's b2"
_OUTPUTS = ("outputs", "outputs=(model, loss)")

NEEDS: dict[str, Need] = {
    # Of a merge.
    "staged": Need("The region's fragment when its sync started.", keeps=(STAGED,)),
    "learning_rate": Need(
        "The inner optimizer's, of the step just done; float32 scalar.",
        given_by=("learning_rate", "learning_rate=, the inner optimizer's"),
        of_region=lambda context: context.learning_rate,
    ),
    "second_moment": Need(
        "The inner Adam's second moment of the fragment, bias-corrected.",
        given_by=("second_moment", _MOMENT),
        of_regions=lambda state, inputs: cast(Callable, inputs.second_moment)(state),
        of_region=lambda context: context.regional["second_moment"],
    ),
    "key": Need(
        "A PRNG key of the region's own.",
        wants_key=True,
        of_region=lambda context: context.key,
    ),
    "sync_key": Need(
        "The PRNG key of the sync, the same in every region.",
        of_region=lambda context: context.sync_key,
    ),
    "gradient_fn": Need(
        "A fragment to its gradient on the last batch.",
        wants_batch=True,
        of_region=_gradient_fn,
    ),
    "model_fn": Need(
        "A fragment to the model's outputs on the last batch.",
        given_by=_OUTPUTS,
        wants_batch=True,
        of_region=lambda context: (
            lambda part: _outputs(context)[0](context.whole(part), context.batch)
        ),
    ),
    "output_loss_fn": Need(
        "Outputs to their loss on the last batch.",
        given_by=_OUTPUTS,
        wants_batch=True,
        of_region=lambda context: (
            lambda outputs: _outputs(context)[1](outputs, context.batch)
        ),
    ),
    "later_params": Need(
        "The region's fragment halfway to the merge.",
        keeps=(STAGED, HALFWAY),
        of_region=lambda context: context.kept[HALFWAY],
    ),
    "later_gradient": Need(
        "The pseudo-gradient per step, extrapolated by the change from the first half "
        "of the overlap to the second.",
        keeps=(STAGED, HALFWAY),
        of_region=_later_gradient,
    ),
    # Of an outer optimizer.
    "stale_params": Need(
        "The outer fragment that the pseudo-gradients were measured from.",
        keeps=(STALE,),
    ),
    # Of a schedule.
    NORM: Need("L2 norm of an applied mean pseudo-gradient; the outer step tells it."),
    "effective_rank": Need(
        "Effective rank of an applied mean pseudo-gradient.", of_mean=effective_rank
    ),
    "drift": Need(
        "Mean |outer - local| per parameter of each fragment, summed over regions; "
        "measured when it is asked for."
    ),
    "distance": Need(
        "Mean (outer - local)^2 per parameter of each fragment, mean over regions; "
        "measured when it is asked for."
    ),
    "tokens": Need(
        "Batches' worth of tokens in the regions' progress of a fragment of experts, "
        "mean over experts and regions, -1 for others; measured when it is asked for."
    ),
    "times": Need(
        "Seconds of an inner step and of a sync as each region had measured them, "
        "`[R, 2]`; they travel with the message."
    ),
}


def check_known(needs: Iterable[str], who: str) -> None:
    """Refuse needs that are not in the table."""
    unknown = sorted(set(needs) - set(NEEDS))
    if unknown:
        raise ValueError(
            f"{who} needs {unknown}, which nothing here can give; known are "
            f"{sorted(NEEDS)}"
        )


def check(needs: Iterable[str], user_inputs: UserInputs, who: str) -> None:
    """Refuse needs that the user's inputs do not satisfy."""
    check_known(needs, who)
    for name in sorted(needs):
        source = NEEDS[name].given_by
        if source and getattr(user_inputs, source[0]) is None:
            raise ValueError(f"{who} needs {name!r}: pass UserInputs({source[1]})")


def copies(needs: Iterable[str]) -> frozenset[str]:
    """Return the copies that `needs` require of a fragment in flight."""
    return frozenset(copy for name in needs for copy in NEEDS[name].keeps)


def wants_batch(needs: Iterable[str]) -> bool:
    """Return whether any of `needs` uses the last batch."""
    return any(NEEDS[name].wants_batch for name in needs)


def wants_state(needs: Iterable[str]) -> bool:
    """Return whether any of `needs` is computed from the inner optimizers' states."""
    return any(NEEDS[name].of_regions is not None for name in needs)


def wants_key(needs: Iterable[str]) -> bool:
    """Return whether any of `needs` uses a PRNG key, for itself or with a batch."""
    return any(NEEDS[name].wants_batch or NEEDS[name].wants_key for name in needs)


def wants_mean(needs: Iterable[str]) -> bool:
    """Return whether any of `needs` is computed from an applied mean."""
    return any(NEEDS[name].of_mean is not None for name in needs)


def regional(
    needs: Iterable[str], opt_state: PyTree, user_inputs: UserInputs
) -> dict[str, PyTree]:
    """Return the trees computed from all regions, like the parameters, by need."""
    trees = {}
    for name in sorted(needs):
        make = NEEDS[name].of_regions
        if make is not None:
            trees[name] = make(opt_state, user_inputs)
    return trees


def arguments(needs: Iterable[str], context: MergeContext) -> dict[str, Any]:
    """Return the extra arguments of one region's merge, by need."""
    values = {}
    for name in sorted(needs):
        make = NEEDS[name].of_region
        if make is not None:
            values[name] = make(context)
    return values


def of_mean(needs: Iterable[str], mean: Fragment) -> dict[str, jax.Array]:
    """Return observations of a mean pseudo-gradient, by need."""
    observations = {}
    for name in sorted(needs):
        make = NEEDS[name].of_mean
        if make is not None:
            observations[name] = make(mean)
    return observations
