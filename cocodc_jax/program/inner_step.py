"""Inner steps: each region trains independently, in one scan under `shard_map`.

The program is manual over the region axis, and all inputs and outputs are regional. So
`check_vma=False` sums no gradient over regions; with varying types, gradients of
*replicated* parameters are summed. It also traces losses and optimizers that were not
written for varying types (`optax.MultiSteps` makes plain zeros in one branch of a
`lax.cond`). The only collective is that of methods which exchange at every step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import OuterState, RegionState
from cocodc_jax.engine.collectives import averaged, gather_all, mean_for_all
from cocodc_jax.engine.frozen import joined
from cocodc_jax.engine.mesh import (
    REGION,
    explained_if_of_another_mesh,
    is_cpu,
    wants_flat_buffer,
)
from cocodc_jax.engine.placement import load, offload
from cocodc_jax.engine.region_map import (
    LocalRegions,
    for_all_regions,
    where_participating,
)
from cocodc_jax.program.batches import scan
from cocodc_jax.program.weight_gradients import in_quick_order
from cocodc_jax.sync.model_state import AnyLossFn, ModelState, StatefulLossFn, carried
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.transforms.extra_args import with_named_extras
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
    optimizer_shardings: PyTree = None,
) -> Callable:
    """Make T inner steps of all regions, one program over the mesh (not yet jitted).

    `steps(state, batches, participating, num_steps, frozen) -> (state, (losses, aux))`
    with batches `[T, R, ...]`, participating bool `[T, R]` (who takes a step) or None,
    losses float32 (or wider) `[T, R]`, and aux a dict of the same shape; for num_steps
    see `batches.scan`. With `correct`, of `core.sync.make_correct`, the regions' outer
    state is a sixth argument. `all_reduce` is for flat buffers, see
    `collectives.mean_for_all`; `optimizer_shardings` are those of an optimizer state
    that is partly in host memory.
    """
    loss = carried(loss_fn, model_state)
    flat_all_reduce = all_reduce if wants_flat_buffer(mesh) else None
    are_several = local.size * mesh.shape[REGION] > 1
    averages_state = bool(
        are_several and per_step and model_state and model_state.average
    )
    # Regions in one batch need no reordering; on several devices the compiler decides.
    is_alone = local.size == 1 and mesh.size == mesh.shape[REGION]

    def of_device(
        state: RegionState,
        batches: PyTree,
        participating: jax.Array | None,
        num_steps: jax.Array | None,
        frozen: PyTree,
        *outer: OuterState,
    ) -> tuple[RegionState, PyTree]:
        def bend(grads: PyTree, params: PyTree) -> PyTree:
            assert correct is not None
            return local.map(correct)(grads, params, *outer)

        def whole_loss(params: PyTree, *rest: Any) -> Any:
            return loss(joined(params, frozen), *rest)

        step = make_step(
            whole_loss,
            optimizer,
            local,
            per_step=per_step,
            all_reduce=flat_all_reduce,
            bend=bend if correct else None,
            averages_state=averages_state,
            reorders=is_cpu(mesh) and is_alone,
        )
        xs = (batches, participating)
        if optimizer_shardings is not None:
            step = _with_state_of_hosts(step, optimizer_shardings)
            return scan(step, state, xs, num_steps)
        if local.size == 1:
            return _scan_of_one_region(step, state, xs, num_steps)
        return scan(step, state, xs, num_steps)

    regions = P(REGION)
    of_steps = P(None, REGION)
    of_outer = (regions,) if correct else ()
    return jax.shard_map(
        of_device,
        mesh=mesh,
        axis_names={REGION},
        in_specs=(regions, of_steps, of_steps, P(), P(), *of_outer),
        out_specs=(regions, of_steps),
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
    reorders: bool = False,
) -> Callable:
    """Make one inner step of the regions of a shard, the body of a scan.

    `step(state, (batch, participating)) -> (state, (loss, aux))`, every leaf `[block,
    ...]`; `participating` is bool `[block]`, or None if every region steps.

    The optimizer receives `value=`, the region's loss, for
    `optax.contrib.reduce_on_plateau` and the like. With an exchange at every step it is
    the mean loss of all regions, so that regions stay equal. XLA drops that collective
    if the optimizer does not read the value; its bytes are not counted.

    With `reorders`, gradients of weights are computed by `in_quick_order`.
    """
    inner = with_named_extras(optimizer)

    def gradient(
        params: PyTree, model_state: PyTree, batch: PyTree, key_data: jax.Array
    ) -> tuple[tuple[jax.Array, dict], PyTree, PyTree, jax.Array]:
        new_key, loss_key = jax.random.split(jax.random.wrap_key_data(key_data))
        gradient_of = jax.value_and_grad(loss_fn, has_aux=True)
        with explained_if_of_another_mesh():
            (loss, (aux, new_model_state)), grads = gradient_of(
                params, model_state, batch, loss_key
            )

        # Aux and state may be Python numbers.
        out, new_model_state = jax.tree.map(
            jnp.asarray, ((widen(loss), aux), new_model_state)
        )
        return out, new_model_state, grads, jax.random.key_data(new_key)

    if reorders:
        gradient = in_quick_order(gradient)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, value: jax.Array
    ) -> tuple[PyTree, PyTree]:
        updates, new_opt_state = inner.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), new_opt_state

    def step(
        state: RegionState, xs: tuple[PyTree, jax.Array | None]
    ) -> tuple[RegionState, tuple[jax.Array, dict]]:
        batch, participating = xs
        out, model_state, grads, key = local.map(gradient)(
            state.params, state.model_state, batch, state.key
        )
        value, _ = out
        if averages_state:
            model_state = averaged(model_state, local, all_reduce)

        if bend is not None:
            grads = bend(grads, state.params)
        per_step_state = state.per_step
        if per_step is not None:
            grads, per_step_state = _exchange(per_step, local, grads, state, all_reduce)
            value = for_all_regions(mean_for_all(value, all_reduce), local.size)

        params, opt_state = local.map(update)(
            grads, state.opt_state, state.params, value
        )
        new_state = RegionState(
            params=params,
            opt_state=opt_state,
            key=key,
            per_step=per_step_state,
            model_state=model_state,
        )
        if participating is not None:
            new_state = where_participating(participating, new_state, state)
        return new_state, out

    return step


def _scan_of_one_region(
    step: Callable, state: PyTree, xs: PyTree, num_steps: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Scan over the steps of a block of one region, without that axis in the carry.

    With the axis, a new array is needed in two shapes: by the carry, and by what reads
    it in the same step, as the update of the parameters reads new moments. XLA then
    computes it twice from the old array, and copies all of the old state in every step.
    """

    def step_of_one(state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        new_state, out = step(jax.tree.map(lambda leaf: leaf[None], state), x)
        return jax.tree.map(lambda leaf: leaf[0], new_state), out

    first_state = jax.tree.map(lambda leaf: leaf[0], state)
    last_state, out = scan(step_of_one, first_state, xs, num_steps)
    return jax.tree.map(lambda leaf: leaf[None], last_state), out


def _with_state_of_hosts(step: Callable, shardings: PyTree) -> Callable:
    """Load the optimizer's state from host memory in each step, and store it back."""

    def step_on_devices(state: RegionState, xs: tuple) -> tuple[RegionState, PyTree]:
        loaded = state._replace(opt_state=load(state.opt_state, shardings))
        new_state, out = step(loaded, xs)
        opt_state = offload(new_state.opt_state, shardings)
        return new_state._replace(opt_state=opt_state), out

    return step_on_devices


def _exchange(
    per_step: PerStep,
    local: LocalRegions,
    grads: PyTree,
    state: RegionState,
    all_reduce: str | None,
) -> tuple[PyTree, PyTree]:
    """Exchange every region's gradient; return the combined gradient of each region."""

    def send(
        grads: PyTree, per_step_state: PyTree, key_data: jax.Array
    ) -> tuple[PyTree, PyTree]:
        # Not a key of the step, whose split uses folds 0 and 1.
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), 3)
        return per_step.send(grads, per_step_state, key)

    message, new_state = local.map(send)(grads, state.per_step, state.key)
    if per_step.receive is None:
        combined = mean_for_all(message, all_reduce)
    else:
        combined = per_step.receive(gather_all(message, all_reduce))
    return for_all_regions(combined, local.size), new_state
