"""Validate the user's arguments before anything is traced."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.expert_leaves import count_of, expert_axis
from cocodc_jax.sync import inner_keys, inner_state, needs
from cocodc_jax.sync.accumulation import Accumulation
from cocodc_jax.sync.cutting import ROUTERS, cut
from cocodc_jax.sync.expert_mean import ExpertMean
from cocodc_jax.sync.fragments import Fragments, check_partition, fitted
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import HALFWAY, UserInputs
from cocodc_jax.sync.schedules import traced
from cocodc_jax.transforms.error_feedback import ErrorFeedbackState
from cocodc_jax.transforms.layers import (
    distinct_leaves,
    named_leaves,
    nodes_of,
    unboxed_paths,
)

PyTree = Any


def check_accumulation(
    accumulation: Accumulation, method: Method, step_times: tuple[float, ...] = (1.0,)
) -> None:
    """Refuse syncs in the middle of an accumulation of gradients.

    Where the number of accumulated steps is not known, says what a method counts.
    """
    every_k = accumulation.steps
    if method.schedule is None or every_k == 1:
        return

    who = " and ".join(accumulation.names)
    if every_k is None:
        warnings.warn(
            f"sync_interval={method.schedule.sync_interval} counts calls of the "
            f"optimizer, of which {who} makes an update after a number that is not "
            "known before the run (a schedule, or calls that may be left out): "
            "fragments may leave or arrive in the middle of it",
            stacklevel=4,
        )
        return

    if max(step_times) > 1:
        raise ValueError(
            f"step_times={step_times} with {who} of {every_k} steps would "
            "have syncs in the middle of it; use regions of equal speed"
        )

    if method.schedule.is_measured or (method.sync and method.sync.message.is_ranked):
        raise ValueError(
            f"{who} of {every_k} steps needs events at multiples of them, "
            f"but those of method={method.name!r} follow what is measured; use numbers "
            "for delay_steps, syncs_per_interval and the interval"
        )

    for name in ("sync_interval", "slot_steps", "delay_steps", "phase_steps"):
        value = getattr(method.schedule, name, 0)
        if value % every_k:
            below = value // every_k * every_k
            above = below + every_k
            possible = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"{name}={value} is not a multiple of the {every_k} steps of an update "
                f"by {who}, so that fragments would leave or arrive in the middle of "
                f"it; use {possible}"
            )

    delay = method.schedule.delay_steps
    if method.sync and HALFWAY in method.sync.copies and delay % (2 * every_k):
        raise ValueError(
            f"delay_steps={delay} must be a multiple of {2 * every_k}, as the secant "
            f"looks at its middle, and {who} makes an update of {every_k} steps"
        )


def check_inner_state(
    optimizer: Any, method: Method, params: PyTree, user_inputs: UserInputs
) -> inner_state.Copies:
    """Refuse an inner optimizer whose state a merge would make wrong.

    Returns:
      The copies in its state, and the shapes of the state of one region.
    """
    copies = inner_state.find_copies(optimizer, params)
    kinds = inner_state.kinds_in(copies.state)

    if method.per_step is None:
        inner_keys.warn_of_raw_keys(copies.state)
    elif "DifferentiallyPrivateAggregateState" in kinds:
        raise ValueError(
            "differentially_private_aggregate takes the gradient of each example, but "
            f"regions of method={method.name!r} exchange their sum; use a method that "
            "exchanges parameters, such as 'diloco'"
        )

    if method.sync is None:
        return copies

    _refuse(kinds)

    if copies.unknown and user_inputs.on_merge is None:
        raise ValueError(
            f"the inner optimizer's state has a copy of the parameters at "
            f"{copies.unknown[0]!r}, and a merge replaces the parameters alone; pass "
            "UserInputs(on_merge=...), which returns the state after a merge (as it "
            "is, if the copy is to stay)"
        )

    jax.eval_shape(inner_state.merge_opt_state, copies.state, params, params)
    return copies


def _refuse(kinds: set[str]) -> None:
    """Raise ValueError for inner optimizers that regions do not support."""
    for kind, reason in inner_state.REFUSED.items():
        if kind in kinds:
            raise ValueError(f"the inner optimizer is not for regions: {reason}")


def check_passed(state: PyTree) -> None:
    """Refuse an optimizer that needs arguments that `RegionProgram` does not pass."""
    kinds = inner_state.kinds_in(state)
    _refuse(kinds)

    reasons = [
        reason for kind, reason in inner_state.NOT_IN_PROGRAM.items() if kind in kinds
    ]
    if any(sam.cache is None for sam in nodes_of(optax.contrib.SAMState, state)):
        reasons.append("needs grad_fn")

    if reasons:
        raise ValueError(
            f"the inner optimizer {reasons[0]}, but RegionProgram passes the gradient "
            "of a batch and value to it, in a scan; use cc.synchronized in a loop of "
            "your own, which passes on what it gets, or another optimizer"
        )


def check_arrays(params: PyTree) -> None:
    """Refuse empty parameters, leaves that are not arrays, and paths that repeat."""
    leaves = distinct_leaves(params)
    if not leaves:
        raise ValueError("params has no arrays: there is nothing to train")

    for path, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"params has a leaf {path!r} of type {type(leaf).__name__}, which is "
                "no array: pass the arrays alone (Equinox: `params, static = "
                "eqx.partition(model, eqx.is_inexact_array)`), and put the rest back "
                "in loss_fn"
            )


def check_params(params: PyTree) -> None:
    """Refuse parameters that are not real floating point, which have no mean."""
    for path, leaf in named_leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"params has a leaf {path!r} of dtype {leaf.dtype}: pass its real and "
                "its imaginary part, and put them together in loss_fn"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"params has a leaf {path!r} of dtype {leaf.dtype}, which is not "
                "trained and has no mean over regions: only floating-point leaves are "
                "parameters; name those with trainable=, or keep it out of params, and "
                "put it back in loss_fn"
            )


class UnevenFragmentsWarning(UserWarning):
    """Some fragments have more than twice the parameters of others."""


def checked_fragments(
    method: Method, params: PyTree, fragments: Fragments | None
) -> Fragments:
    """Return `fragments`, checked, or cut the parameters as the method does."""
    strategy = method.sync.fragment_strategy if method.sync else "strided"
    if fragments is None:
        fragments = cut(params, method.num_fragments, strategy)
        if strategy != ROUTERS:  # They are uneven on purpose.
            _warn_of_uneven(fragments)

    fitted_fragments = fitted(fragments, params)
    if len(fitted_fragments) != method.num_fragments:
        raise ValueError(
            f"fragments has {len(fitted_fragments)} entries, but "
            f"method={method.name!r} was made for "
            f"num_fragments={method.num_fragments}; use "
            f"fragments=cut(params, {method.num_fragments})"
        )
    check_partition(fitted_fragments, params)
    return fitted_fragments


def _warn_of_uneven(fragments: Fragments) -> None:
    sizes = fragments.num_params
    if max(sizes) <= 2 * min(sizes):
        return

    numbers = ", ".join(f"{size:,}" for size in sizes)
    warnings.warn(
        f"num_fragments={len(fragments)} cuts the model into fragments of {numbers} "
        "parameters, so that some syncs carry more than twice what others do; pass "
        "fragments=cut(params, num_fragments, strategy='balanced'), with blocks=NAME "
        "where the layers were not found",
        UnevenFragmentsWarning,
        stacklevel=4,
    )


def check_feedback(method: Method, fragments: Fragments, params: PyTree) -> None:
    """Refuse `merge_feedback` if messages have no error-feedback residual."""
    if method.sync is None or not method.sync.merge.has_feedback:
        return

    for k in range(len(fragments)):
        part = jax.eval_shape(lambda x, k=k: fragments.take(x, k), params)
        memory = jax.eval_shape(method.sync.message.init, part)
        residual = memory.residual if isinstance(memory, ErrorFeedbackState) else ()
        if jax.tree.map(np.shape, residual) != jax.tree.map(np.shape, part):
            raise ValueError(
                f"merge_feedback=True needs messages of method={method.name!r} with "
                "error feedback of whole fragments, such as compress='ef+int4' without "
                f"expert_weights; fragment {k} has other ones"
            )


def check_counts(
    method: Method, fragments: Fragments, user_inputs: UserInputs, params: PyTree
) -> None:
    """Refuse `token_counts` that marks no leaf, or not the counts that a mean reads.

    `params` are all parameters, also those that are not trained.
    """
    is_count = user_inputs.token_counts
    if is_count is not None and not callable(is_count):
        raise ValueError(
            f"token_counts={is_count!r} must be a function of a leaf's path, such as "
            "models.experts.is_token_count"
        )

    sent = {part.path for slices in fragments.slices for part in slices}
    paths = sent | {path for path, _ in named_leaves(params)}
    marked = {path for path in paths if is_count is not None and is_count(path)}
    if is_count is not None and not marked:
        examples = ", ".join(repr(path) for path in sorted(paths)[:3])
        raise ValueError(
            f"token_counts={is_count!r} marks none of the leaves {examples}, ...: "
            "leave it out of UserInputs"
        )

    if method.sync and isinstance(method.sync.message.average, ExpertMean):
        experts = {path for path in sent if expert_axis(path) is not None}
        missing = sorted({count_of(path) for path in experts} - marked)
        if missing:
            raise ValueError(
                f"expert_weights='tokens' reads the counts {missing[0]!r}, which are "
                "not marked: pass UserInputs(token_counts="
                "models.experts.is_token_count), or a function of your own"
            )


def check_inside(method: Method, user_inputs: UserInputs) -> None:
    """Raise ValueError for a method that `synchronized` does not support.

    See `core.optimizer`.
    """
    reason = None
    sync = method.sync
    if sync is not None:
        reason = traced.why_not(sync.schedule)
        if reason is None and sync.robust:
            reason = "exclude_above and robust_mean have the host restore regions"
    if reason is not None:
        raise ValueError(
            f"method={method.name!r} cannot be used with synchronized: {reason}; use "
            "RegionProgram"
        )

    needs.check(method.needs, user_inputs, f"method={method.name!r}")


def unboxed(fragments: Fragments, params: PyTree) -> Fragments:
    """Return fragments of `params` with the same names for boxed and bare leaves.

    Flax NNX gives `init` its variables, and `update` the arrays in them.
    """
    fitted_fragments = fitted(fragments, params)
    paths = unboxed_paths(params)
    slices = []
    for parts in fitted_fragments.slices:
        slices.append(
            tuple(dataclasses.replace(part, path=paths[part.leaf]) for part in parts)
        )
    return dataclasses.replace(fitted_fragments, slices=tuple(slices))
