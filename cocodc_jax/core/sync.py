"""The life of a fragment: `start` sends it, `finish` applies the mean that comes back.

Regions train independently. From time to time fragment p of region m is sent to the
other regions, travels while the inner steps go on, and comes back as a mean:

    start    leave   staged = theta^m_p;  Delta^m = theta^g_p - staged
                     message^m, memory^m = encode(Delta^m, memory^m)
             cross   the only collective, by the message's way (`sync.axis`)
             arrive  mean = sum_m w_m decode(message^m)
    finish           theta^g_p, state = outer optimizer(theta^g_p, mean)
                     theta^m_p = merge(theta^m_p, staged, theta^g_p)

A fragment is a flat dict of arrays. Pseudo-gradients Delta are old minus new, so that
descent is minus. `theta^g_p` and the outer state are equal in all regions.

`leave` computes for the regions that a program holds (`sync.axis.Axis`); its caller
sends what it returns. `start` and `finish` only fix the order of the stages. The stages
are functions of a transform, parts of one compiled program, or separate programs, with
arrays that move between devices in between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.expert_leaves import TOKEN_UNIT
from cocodc_jax.sync import needs
from cocodc_jax.sync.axis import GATHERED, Axis
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.outer import RegionalOuter, pseudo_gradient
from cocodc_jax.sync.robust import VERDICT, length, without
from cocodc_jax.transforms.compressor import Compressor, identity
from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.numerics import (
    cast_like,
    is_finite,
    vary_like,
    wide_dtype,
)

PyTree = Any
# What arrives with a mean, by name, such as verdicts of a robust mean.
Extras = dict[str, Any]


class Measured(NamedTuple):
    """A message and its `sync.robust.length`, for a robust mean."""

    message: PyTree
    length: Any


class Left(NamedTuple):
    """What crosses regions."""

    # By the message's way: the sum, the regions' messages, or their block's sum.
    sent: PyTree
    # Of the regions in the mean, if messages are gathered; else `()`.
    weights: Any = ()
    extras: Extras = {}  # Known before anything crosses.


class Crossing(Protocol):
    """How a fragment crosses regions: the stages of `start`."""

    def leave(self) -> tuple[Any, PyTree]:
        """Encode the fragment; return what crosses, and the compressors' state."""
        ...

    def cross(self, left: Any) -> Any:
        """Send it; never waits."""
        ...

    def arrive(self, crossed: Any) -> tuple[PyTree, Extras]:
        """Return the mean pseudo-gradient, and what arrives with it."""
        ...


class Finishing(Protocol):
    """How a fragment's outer model is stepped and merged: the stages of `finish`."""

    def remember(self, memory: PyTree) -> PyTree:
        """Feed what the merge drops into the compressors' state, see `remember`."""
        ...

    def step(
        self, outer: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Take the outer step with the mean; return its norm too, see `outer_step`."""
        ...

    def hand_out(self, outer: PyTree, opt_state: PyTree) -> PyTree:
        """Return the outer fragment as regions receive it, where they are."""
        ...

    def merge(self, received: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        """Merge it into the regions; return them, and the merge's metrics."""
        ...


class Finished(NamedTuple):
    """Results of `finish`."""

    merged: Any  # The regions.
    outer: PyTree  # The outer fragment.
    opt_state: PyTree  # Of the outer optimizer.
    memory: PyTree  # The compressors' state.
    norm: jax.Array  # Of the mean, float32 scalar.
    metrics: dict[str, jax.Array]  # Of the merge.


def start(crossing: Crossing) -> tuple[PyTree, Extras, PyTree]:
    """Send a fragment; return its mean, what arrives with it, and the new memory."""
    left, memory = crossing.leave()
    mean, extras = crossing.arrive(crossing.cross(left))
    return mean, extras, memory


def finish(
    finishing: Finishing, outer: PyTree, opt_state: PyTree, memory: PyTree
) -> Finished:
    """Apply a mean, the result of `start`: outer step, then merge."""
    new_memory = finishing.remember(memory)
    new_outer, new_opt_state, norm = finishing.step(outer, opt_state)
    received = finishing.hand_out(new_outer, new_opt_state)
    merged, metrics = finishing.merge(received)

    return Finished(
        merged=merged,
        outer=new_outer,
        opt_state=new_opt_state,
        memory=new_memory,
        norm=norm,
        metrics=metrics,
    )


def encode_all(
    sync: Sync,
    axis: Axis,
    part: Fragment,
    anchor: Fragment,
    memory: PyTree,
    key_data: jax.Array,
    weights: jax.Array,
    *,
    params: PyTree = None,
    has_own_anchors: bool = False,
    are_partial: bool = True,
    sync_key: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Encode the fragments of the regions that are held.

    Args:
      sync: the syncs, with the message that this one sends.
      axis: the regions that are held.
      part: their local fragments.
      anchor: the outer fragment as regions received it, equal in all of them.
      memory: the states of their compressors.
      key_data: of their PRNG keys.
      weights: theirs in the mean, of sum 1 over all regions.
      params: all of their parameters, which a robust mean checks.
      has_own_anchors: whether the `anchor` is one of each region.
      are_partial: whether a weight may be 0; such a region keeps its memory.
      sync_key: see `sync.averages`; None unless the average draws.

    Returns:
      Their messages, `Measured` for a robust mean, and their memories.
    """

    def one_region(
        anchor: Fragment,
        params: PyTree,
        part: Fragment,
        memory: PyTree,
        weight: jax.Array,
        key_data: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        return encode(
            sync=sync,
            params=params,
            part=part,
            anchor=anchor,
            memory=memory,
            key_data=key_data,
            weight=weight if are_partial else None,
            sync_key=sync_key,
        )

    in_axes = (0 if has_own_anchors else None, 0, 0, 0, 0, 0)
    message, new_memory = axis.map(one_region, in_axes)(
        anchor, params, part, memory, weights, key_data
    )
    if sync.message.compressor() is None:
        return message, memory
    return message, new_memory


def leave(
    sync: Sync,
    axis: Axis,
    sent: PyTree,
    memory: PyTree,
    weights: jax.Array,
    *,
    are_partial: bool = True,
) -> tuple[Left, PyTree]:
    """Begin to send the messages of the regions that are held.

    Arguments are results of `encode_all`, or as there. Returns what crosses, and the
    memories.
    """
    message = sync.message
    if message.way == GATHERED:  # Filtered on arrival, by the messages of all.
        return Left(sent, weights), memory

    extras = {}
    if sync.robust is not None:
        verdict, counted = sync.robust.judge(
            axis.of_all(sent.length), axis.of_all(weights)
        )
        extras[VERDICT] = verdict
        weights = axis.held(counted)
        sent = without(sent.message, weights)
    elif are_partial:
        sent = sync.counted(sent, weights)

    crossing, new_memory = message.leave(axis, sent, memory, weights)
    return Left(sent=crossing, extras=extras), new_memory


def arrive(
    sync: Sync, crossed: Left, like: Fragment, sync_key: jax.Array | None
) -> tuple[Fragment, Extras]:
    """Return the mean pseudo-gradient, of shapes `like`, and what arrives with it."""
    if sync.message.way == GATHERED:
        mean, extras = mean_of_gathered(sync, crossed.sent, crossed.weights)
    else:
        mean = crossed.sent
        extras = crossed.extras
    return sync.message.average.after(mean, like, sync_key), extras


def mean_of_gathered(
    sync: Sync, sent: PyTree, weights: jax.Array
) -> tuple[PyTree, Extras]:
    """Return the mean of all regions' messages `[M, ...]`, and the verdict on them."""
    message = sync.message
    counted = sync.counted(sent, weights)
    if sync.robust is None:
        return message.combine(counted, weights), {}

    verdict, counted_weights = sync.robust.judge(counted.length, weights)
    messages = without(counted.message, counted_weights)
    mean = sync.robust.combine(message, messages, counted_weights)
    return mean, {VERDICT: verdict}


def encode(
    sync: Sync,
    params: PyTree,
    part: Fragment,
    anchor: Fragment,
    memory: PyTree,
    key_data: jax.Array,
    weight: jax.Array | None = None,
    sync_key: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Make one region's message, and the new memory; arguments as of `encode_all`.

    A robust mean gets a `Measured`, for which all of the region's `params` are checked.
    A region of `weight` 0 in the mean keeps its memory.
    """
    delta = pseudo_gradient(anchor, part)
    message = sync.message.average.before(delta, sync_key)
    dtype = jax.tree.leaves(message)[0].dtype  # A sum has one dtype.

    compressor = sync.message.compressor()
    if compressor is not None:
        dtype = jnp.float32
        message, encoded_memory = compressor.encode(
            message, memory, message_key(key_data)
        )
        if weight is not None:
            encoded_memory = jax.tree.map(
                lambda new, old: jnp.where(weight > 0, new, old),
                encoded_memory,
                memory,
            )
        memory = vary_like(encoded_memory, memory)

    if sync.robust:
        # Of the pseudo-gradient: an encoded message may be normalized.
        message = Measured(message, length(params, delta).astype(dtype))
    return message, memory


def outer_step(
    optimizer: optax.GradientTransformation,
    params: Fragment,
    opt_state: PyTree,
    mean_pseudo_gradient: Fragment,
    stale_params: Fragment | None,
    token_counts: Callable[[str], bool] | None = None,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Step the outer optimizer on one fragment, by a mean that is old minus new.

    The optimizer receives `stale_params`, the outer fragment that the mean was measured
    from, if not None. For `token_counts` see `UserInputs`. The last result is the norm
    of the mean, a float32 scalar.
    """
    if token_counts is not None:
        mean_pseudo_gradient = {
            path: jnp.zeros_like(x) if token_counts(path) else x
            for path, x in mean_pseudo_gradient.items()
        }

    extra = {} if stale_params is None else {"stale_params": stale_params}
    updates, new_opt_state = with_named_extras(optimizer).update(
        mean_pseudo_gradient, opt_state, params, **extra
    )
    norm = optax.tree_utils.tree_norm(mean_pseudo_gradient).astype(jnp.float32)
    return optax.apply_updates(params, updates), new_opt_state, norm


def merge(
    sync: Sync, seen: needs.MergeContext
) -> tuple[Fragment, dict[str, jax.Array]]:
    """Merge an outer fragment by the method's rule, whose metrics are returned too."""
    rule = sync.merge
    return rule.apply(
        seen.local,
        seen.kept.get(needs.STAGED),
        seen.outer,
        delay_steps=seen.delay_steps,
        **needs.arguments(rule.needs, seen),
    )


def remember(
    share: float | jax.Array, part: Fragment, staged: Fragment, memory: Any
) -> Any:
    """Put the local progress that a merge drops into the error-feedback residual.

    A merge that keeps the share 1 - s of the progress `part - staged` drops s of it,
    which no message has carried. As a pseudo-gradient it is added to `memory`, an
    `ErrorFeedbackState`: `e <- e - s (part - staged)`, unless it is not finite. Ours;
    no source.
    """
    residual = jax.tree.map(
        lambda e, x, s: e - share * (x.astype(e.dtype) - s.astype(e.dtype)),
        memory.residual,
        part,
        staged,
    )

    finite = is_finite(residual)
    finite_residual = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), residual, memory.residual
    )
    return memory._replace(residual=finite_residual)


def gap(
    name: str,
    outer: Fragment,
    local: Fragment,
    num_regions: int,
    token_counts: Callable[[str], bool] | None = None,
) -> jax.Array:
    """Measure how far regions are from an outer fragment, per parameter.

    "drift" is the sum over regions of |theta^g - theta^m|, "distance" the mean over
    regions of its square, "tokens" the tokens of experts; see `sync.needs`, also for
    `token_counts`. If `local` has only some regions, `[R, ...]`, sum the results.
    """
    if name == "tokens":
        return _tokens(outer, local, token_counts) / num_regions

    of_entry = {"drift": jnp.abs, "distance": jnp.square}[name]
    share = 1 / num_regions if name == "distance" else 1

    gaps = jax.tree.map(
        lambda o, x: of_entry(o[None] - x.astype(o.dtype)).sum(), outer, local
    )

    size = sum(x.size for x in jax.tree.leaves(outer))
    return jnp.asarray(sum(jax.tree.leaves(gaps)) * share / size)


def _tokens(
    outer: Fragment, local: Fragment, token_counts: Callable[[str], bool] | None
) -> jax.Array:
    """Return the mean count of a fragment's experts, summed over some regions."""
    counts = [
        ((local[path] - x[None]) / TOKEN_UNIT).reshape(len(local[path]), -1)
        for path, x in outer.items()
        if token_counts is not None and token_counts(path)
    ]
    if not counts:
        # Minus one for each region that is held.
        num_held = len(jax.tree.leaves(local)[0])
        return jnp.float32(-num_held)

    return jnp.concatenate(counts, axis=1).mean(axis=1).sum()


def outer_parts(fragments: Fragments, params: PyTree) -> tuple[Fragment, ...]:
    """Copy one region's parameters as the initial outer fragments, at least float32."""
    return tuple(
        jax.tree.map(
            lambda x: jnp.array(x, wide_dtype(jnp.result_type(x)), copy=True),
            fragments.take(params, k),
        )
        for k in range(len(fragments))
    )


def message_key(key_data: jax.Array) -> jax.Array:
    """Make one region's key for stochastic rounding of a message."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), 4)


def merge_key(key_data: jax.Array) -> jax.Array:
    """Make one region's key for its merge; the next step's split uses folds 0 and 1."""
    return jax.random.fold_in(jax.random.wrap_key_data(key_data), 2)


def leave_regional(
    sync: Sync,
    axis: Axis,
    part: Fragment,
    params: Fragment,
    state: PyTree,
    key_data: jax.Array,
    row: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Encode for regional outer models, and begin to send; see `leave`.

    `params` and `state` are of the outer models of the regions that are held; for `row`
    see `RegionalOuter.leave`. Returns what crosses, and the outer states.
    """
    outer = sync.outer
    assert isinstance(outer, RegionalOuter)
    compressor = regional_compressor(sync)

    def one_region(
        params: Fragment, state: PyTree, part: Fragment, key_data: jax.Array
    ) -> tuple[PyTree, PyTree]:
        key = message_key(key_data)
        message, new_state = outer.send(params, state, part, compressor, key)
        return message, vary_like(new_state, state)

    message, new_state = axis.map(one_region)(params, state, part, key_data)
    return outer.leave(axis, message, compressor, row), new_state


def regional_compressor(sync: Sync) -> Compressor:
    """Return the compressor of regional outer models' messages."""
    return sync.message.compressor() or identity()


def receive(
    outer: RegionalOuter,
    params: Fragment,
    state: PyTree,
    arrived: PyTree,
    num_regions: int,
) -> tuple[Fragment, PyTree, jax.Array]:
    """Step one region's outer model; the last result is the pseudo-gradient's norm.

    A region that received no finite message, not even its own, takes no step, but
    reports the norm. If the mean is of all regions, they step by it even if it is not
    finite, so that the error is visible.
    """
    new_params, new_state = outer.receive(params, state, arrived, num_regions)
    mean = getattr(arrived, "pseudo_gradient", arrived)
    norm = optax.tree_utils.tree_norm(mean).astype(jnp.float32)

    new_params = cast_like(new_params, params)
    new_state = vary_like(new_state, state)
    if outer.group == "all":
        return new_params, new_state, norm

    finite = is_finite(arrived)
    new_params, new_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new_params, new_state),
        (params, state),
    )
    return new_params, new_state, norm


def make_correct(
    sync: Sync | None, fragments: Fragments, num_regions: int
) -> Callable | None:
    """Make `correct(gradient, params, outer) -> gradient` of one region, or None.

    It corrects inner gradients; `outer` has the outer fragments, and their states.
    """
    outer = sync.outer if sync else None
    if not isinstance(outer, RegionalOuter) or outer.correct is None:
        return None
    correct_fragment = outer.correct

    def correct(gradient: PyTree, params: PyTree, kept: PyTree) -> PyTree:
        corrected = gradient
        outer_params, opt_states = kept
        for k, outer_part in enumerate(outer_params):
            part = fragments.take(corrected, k)
            local = fragments.take(params, k)
            bent = correct_fragment(part, local, outer_part, opt_states[k], num_regions)
            corrected = fragments.put(corrected, k, cast_like(bent, part))
        return corrected

    return correct
