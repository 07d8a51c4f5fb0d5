"""The life of a fragment: `start` sends it, `finish` applies the mean that comes back.

Regions train independently. From time to time fragment p of region m is sent to the
other regions, travels while the inner steps go on, and comes back as a mean:

    start    staged = theta^m_p;  Delta^m = theta^g_p - staged
             message^m, memory^m = encode(Delta^m, memory^m)
             mean = reduce(message^m)                             the only collective
    finish   theta^g_p, state = outer optimizer(theta^g_p, mean)
             theta^m_p = merge(theta^m_p, staged, theta^g_p)

Every function here is of one region and one fragment, a flat dict of arrays. Pseudo-
gradients Delta are old minus new, so that descent is minus. `theta^g_p` and the outer
state are equal in all regions. The caller passes `reduce`, a collective over a mesh
axis or a `jax.vmap` axis (`reduce.py`).

A program that places arrays on several devices maps `encode`, `outer_step` and `merge`
over the regions itself; in an Optax transform `start` and `finish` are the whole
algorithm. Regional outer models have `send` and `receive` in their place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.expert_leaves import TOKEN_UNIT
from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.outer import RegionalOuter, SharedOuter, pseudo_gradient
from cocodc_jax.sync.robust import length, without
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.extra_args import with_named_extras
from cocodc_jax.transforms.numerics import (
    cast_like,
    is_finite,
    vary_like,
    wide_dtype,
)

PyTree = Any


class Measured(NamedTuple):
    """A message and its `sync.robust.length`, for a robust mean."""

    message: PyTree
    length: Any


def start(
    sync: Sync,
    part: Fragment,
    anchor: Fragment,
    memory: PyTree,
    key_data: jax.Array,
    reduce: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    sync_key: jax.Array | None = None,
    weight: jax.Array | None = None,
) -> tuple[Fragment, PyTree]:
    """Send one region's fragment; return the mean, equal in all, and the new memory.

    `part` is the region's local fragment, `anchor` the outer one as regions received
    it, `memory` the state of the region's compressor, `key_data` that of its PRNG key.
    `reduce(message, memory) -> (mean, memory)` is over all regions. `sync_key` (see
    `sync.averages`) is None unless the average draws. `weight` is the region's in the
    mean; None if no region has weight 0.
    """
    message, memory = encode(
        sync, None, part, anchor, memory, key_data, weight, sync_key
    )
    if weight is not None:
        message = without(message, weight)
    mean, memory = reduce(message, memory)
    return sync.message.average.after(mean, anchor, sync_key), memory


def finish(
    sync: Sync,
    part: Fragment,
    outer: Fragment,
    opt_state: PyTree,
    memory: PyTree,
    mean: Fragment,
    seen: needs.MergeContext,
) -> tuple[Fragment, Fragment, PyTree, PyTree, jax.Array, dict[str, jax.Array]]:
    """Apply a mean, the result of `start`: outer step, then merge.

    `seen` is the context of the merge rule, whose `local` and `outer` are filled in
    here; its `kept` has the staged copy if the rule needs it or feeds back what it
    drops. Returns the region's fragment, the outer one, its optimizer's state, the
    compressor's, the norm of the mean (float32 scalar), and the merge's metrics.
    """
    assert isinstance(sync.outer, SharedOuter)
    if sync.merge.has_feedback:
        staged = seen.kept[needs.STAGED]
        assert staged is not None
        memory = remember(sync.merge.feedback_weight, part, staged, memory)
    stale = seen.kept.get(needs.STALE)
    outer, opt_state, norm = outer_step(
        sync.outer.optimizer,
        outer,
        opt_state,
        mean,
        stale,
        seen.user_inputs.token_counts,
    )
    given = sync.outer.start(outer, opt_state) if sync.outer.start else outer
    merged, metrics = merge(sync, seen._replace(local=part, outer=given))
    return merged, outer, opt_state, memory, norm, metrics


def encode(
    sync: Sync,
    params: PyTree,
    part: Fragment,
    anchor: Fragment,
    memory: PyTree,
    key_data: jax.Array,
    weight: jax.Array | None = None,
    sync_key: jax.Array | None = None,
    rank: int = 0,
) -> tuple[PyTree, PyTree]:
    """Make one region's message, and the new memory; arguments as of `start`.

    A robust mean gets a `Measured`, for which all of the region's `params` are checked.
    A region of `weight` 0 in the mean keeps its memory. `rank` is that of the message,
    if the schedule sets one.
    """
    delta = pseudo_gradient(anchor, part)
    message = sync.message.average.before(delta, sync_key)
    dtype = jax.tree.leaves(message)[0].dtype  # A sum has one dtype.
    compressor = sync.message.compressor(rank)
    if compressor is not None:
        dtype = jnp.float32
        message, new = compressor.encode(message, memory, message_key(key_data))
        if weight is not None:
            new = jax.tree.map(lambda x, y: jnp.where(weight > 0, x, y), new, memory)
        memory = vary_like(new, memory)
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
    extra = {} if stale_params is None else {"stale_params": stale_params}
    if token_counts is not None:
        mean_pseudo_gradient = {
            path: jnp.zeros_like(x) if token_counts(path) else x
            for path, x in mean_pseudo_gradient.items()
        }
    updates, opt_state = with_named_extras(optimizer).update(
        mean_pseudo_gradient, opt_state, params, **extra
    )
    norm = optax.tree_utils.tree_norm(mean_pseudo_gradient).astype(jnp.float32)
    return optax.apply_updates(params, updates), opt_state, norm


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
    residual = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), residual, memory.residual
    )
    return memory._replace(residual=residual)


def gap(
    name: str,
    outer: Fragment,
    local: Fragment,
    num_regions: int,
    token_counts: Callable[[str], bool] | None = None,
) -> jax.Array:
    """Measure how far regions are from an outer fragment, per parameter.

    "drift" is the sum over regions of |theta^g - theta^m|, "distance" the mean over
    regions of its square, "tokens" what experts saw; see `sync.needs`, also for
    `token_counts`. Where `local` is of some regions, `[R, ...]`, sum the result over
    all.
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
    if not counts:  # -1 for each region.
        return jnp.float32(-len(jax.tree.leaves(local)[0]))
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


def send(
    outer: RegionalOuter,
    compressor: Compressor,
    part: Fragment,
    params: Fragment,
    state: PyTree,
    key_data: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Make the message of a regional outer model, of its local `part` and `params`."""
    message, new = outer.send(params, state, part, compressor, message_key(key_data))
    return message, vary_like(new, state)


def receive(
    outer: RegionalOuter,
    params: Fragment,
    state: PyTree,
    arrived: PyTree,
    num_regions: int,
) -> tuple[Fragment, PyTree, jax.Array]:
    """Step one region's own outer model; the last is the pseudo-gradient's norm.

    A region that no other, nor itself, sent a finite message takes no step, but reports
    the norm. If a mean is of all regions, they step by it, so that it is seen.
    """
    new, new_state = outer.receive(params, state, arrived, num_regions)
    mean = getattr(arrived, "pseudo_gradient", arrived)
    norm = optax.tree_utils.tree_norm(mean).astype(jnp.float32)
    new, new_state = cast_like(new, params), vary_like(new_state, state)
    if outer.group != "all":
        finite = is_finite(arrived)
        new, new_state = jax.tree.map(
            lambda x, old: jnp.where(finite, x, old), (new, new_state), (params, state)
        )
    return new, new_state, norm


def make_correct(
    sync: Sync | None, fragments: Fragments, num_regions: int
) -> Callable | None:
    """Make `correct(gradient, params, outer) -> gradient` of one region, or None.

    It bends inner gradients; `outer` has the outer fragments, and their states.
    """
    outer = sync and sync.outer
    if not isinstance(outer, RegionalOuter) or outer.correct is None:
        return None
    of_fragment = outer.correct

    def correct(gradient: PyTree, params: PyTree, kept: PyTree) -> PyTree:
        for k, (part, state) in enumerate(zip(*kept, strict=True)):
            own = fragments.take(gradient, k)
            local = fragments.take(params, k)
            bent = of_fragment(own, local, part, state, num_regions)
            gradient = fragments.put(gradient, k, cast_like(bent, own))
        return gradient

    return correct
