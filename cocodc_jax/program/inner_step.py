"""Inner steps: every region trains alone, in one scan under `shard_map`.

The program is manual over the region axis, and all that comes in and goes out is a
region's own. So values are not typed as varying over regions or the same for all
(`check_vma=False`): there is nothing to check, no gradient is summed over regions (as
one of *replicated* parameters is where types are on), and losses and optimizers that
were not written for types can be traced (`optax.MultiSteps` makes plain zeros in one
branch of a `lax.cond`). The only collective here is that of methods which exchange
something at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import OuterState, RegionState
from cocodc_jax.exchange.model_state import averaged
from cocodc_jax.exchange.per_step import gather_all, mean_for_all
from cocodc_jax.program.frozen import joined
from cocodc_jax.program.length_buckets import scan
from cocodc_jax.sharding.local_regions import (
    LocalRegions,
    for_all_regions,
    where_participating,
)
from cocodc_jax.sharding.mesh import REGION, wants_flat_buffer
from cocodc_jax.sharding.optimizer_memory import load, offload
from cocodc_jax.sync.model_state import (
    AnyLossFn,
    ModelState,
    StatefulLossFn,
    carried,
)
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.transforms.numerics import widen

PyTree = Any


def make_steps(
    loss_fn: AnyLossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    local: LocalRegions,
    per_step: PerStep | None = None,
    all_reduce: str = "direct",
    correct: Callable | None = None,
    model_state: ModelState | None = None,
    optimizer_lies: PyTree = None,
) -> Callable:
    """Make T inner steps of all regions, one program over the mesh (not yet jitted).

    Args:
      loss_fn: `(params, batch, key) -> (loss, aux)` of one region; with a
        `model_state` see there.
      optimizer: the inner optimizer; see `make_step` for what it is told.
      mesh: the inner mesh.
      local: the regions that a device holds.
      per_step: what regions exchange at every step, if anything.
      all_reduce: how that crosses where it does as a flat buffer.
      correct: `correct(gradient, params, outer) -> gradient` of one region, where the
        outer model of its own bends its steps; see `sync.outer.RegionalOuter`.
      model_state: of the model, None if it has none.
      optimizer_lies: shardings of the optimizer's state where some of it lies with the
        hosts; None is nothing.

    Returns:
      `steps(state, batches, participating, num_steps, frozen) -> (state, (losses,
      aux))` with batches `[T, R, ...]`, participating bool `[T, R]` (who has a step to
      do) or None, losses float32 (or wider) `[T, R]`, and aux a dict of the same shape;
      of num_steps see `counted.scan`, of frozen parameters `TrainState`. With `correct`
      a sixth argument is the regions' outer state, which it is given.
    """
    kind = all_reduce if wants_flat_buffer(mesh) else None
    loss = carried(loss_fn, model_state)
    averages = bool(model_state and model_state.average and per_step)
    averages = averages and local.size * mesh.shape[REGION] > 1

    def of_device(
        state: RegionState,
        batches: PyTree,
        participating: jax.Array | None,
        num_steps: jax.Array | None,
        frozen: PyTree,
        *outer: OuterState,
    ):
        def bend(grads: PyTree, params: PyTree) -> PyTree:
            assert correct is not None
            return local.map(correct)(grads, params, *outer)

        def whole_loss(params: PyTree, *rest: Any):
            return loss(joined(params, frozen), *rest)

        bent = bend if correct else None
        step = make_step(whole_loss, optimizer, local, per_step, kind, bent, averages)
        if optimizer_lies is not None:
            step = _with_state_of_hosts(step, optimizer_lies)
        return scan(step, state, (batches, participating), num_steps)

    of_outer = (P(REGION),) if correct else ()
    return jax.shard_map(
        of_device,
        mesh=mesh,
        axis_names={REGION},
        in_specs=(P(REGION), *(P(None, REGION),) * 2, P(), P(), *of_outer),
        out_specs=(P(REGION), P(None, REGION)),
        check_vma=False,
    )


def make_step(
    loss_fn: StatefulLossFn,
    optimizer: optax.GradientTransformation,
    local: LocalRegions,
    per_step: PerStep | None = None,
    all_reduce: str | None = None,
    bend: Callable | None = None,
    averages_state: bool = False,
) -> Callable:
    """Make one inner step of the regions of a shard, the body of a scan.

    Args:
      loss_fn: `(params, model_state, batch, key) -> (loss, (aux, new_model_state))` of
        one region.
      optimizer: the inner optimizer. It is given `value=`, the region's loss, which
        `optax.contrib.reduce_on_plateau` and its like go by; with an exchange at every
        step the mean of all regions' losses, so that regions stay equal which shall.
        That mean crosses only if the optimizer reads it: otherwise the compiler drops
        it. It is not counted among the bytes of a step.
      local: the regions a device holds.
      per_step: what regions exchange at every step, if anything.
      all_reduce: see `exchange.per_step`.
      bend: `bend(gradients, params) -> gradients` of the regions of the shard.
      averages_state: whether regions average the model's state after it.

    Returns:
      `step(state, (batch, participating)) -> (state, (loss, aux))`, every leaf
      `[block, ...]`; `participating` is bool `[block]`, or None if every region steps.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def gradient(params, model_state, batch, key_data):
        key, use = jax.random.split(jax.random.wrap_key_data(key_data))
        gradient_of = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (aux, new)), grads = gradient_of(params, model_state, batch, use)
        # Python's numbers are aux, and state, too.
        out, new = jax.tree.map(jnp.asarray, ((widen(loss), aux), new))
        return out, new, grads, jax.random.key_data(key)

    def update(grads, opt_state, params, value):
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    def step(state: RegionState, xs: tuple[PyTree, jax.Array | None]):
        batch, participating = xs
        out, model_state, grads, key = local.map_products(gradient)(
            state.params, state.model_state, batch, state.key
        )
        if averages_state:
            model_state = averaged(model_state, local, all_reduce)
        value, kept = out[0], state.per_step
        if bend is not None:
            grads = bend(grads, state.params)
        if per_step is not None:
            grads, kept = _exchange(per_step, local, grads, state, all_reduce)
            value = for_all_regions(mean_for_all(value, all_reduce), local.size)
        params, opt_state = local.map(update)(
            grads, state.opt_state, state.params, value
        )
        new = RegionState(params, opt_state, key, kept, model_state)
        if participating is not None:
            new = where_participating(participating, new, state)
        return new, out

    return step


def _with_state_of_hosts(step: Callable, lies: PyTree) -> Callable:
    """Have each step take in the optimizer's state, and put it back."""

    def whole(state: RegionState, xs: tuple):
        on_devices = state._replace(opt_state=load(state.opt_state, lies))
        new, out = step(on_devices, xs)
        return new._replace(opt_state=offload(new.opt_state, lies)), out

    return whole


def _exchange(
    per_step: PerStep,
    local: LocalRegions,
    grads: PyTree,
    state: RegionState,
    all_reduce: str | None,
):
    """Send every region's gradient; give each what it makes of all messages."""

    def send(grads, kept, key_data):
        # A key of its own: 0 and 1 are the two that the step splits.
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), 3)
        return per_step.send(grads, kept, key)

    message, kept = local.map(send)(grads, state.per_step, state.key)
    if per_step.receive is None:
        made = mean_for_all(message, all_reduce)
    else:
        made = per_step.receive(gather_all(message, all_reduce))
    return for_all_regions(made, local.size), kept


def are_finite(tree: PyTree) -> jax.Array:
    """Tell whether every number of a region is finite, bool `[R]`."""
    each = [
        jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(tree)
    ]
    return jnp.stack(each).all(axis=0)
