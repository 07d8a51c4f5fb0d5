"""Inner steps: each region trains independently, in one scan under `shard_map`.

The program is manual over the region axis, and all inputs and outputs are regional. So
with `check_vma=False` no gradient is summed over regions (with types on, gradients of
*replicated* parameters are), and losses and optimizers that were not written for
varying types can be traced (`optax.MultiSteps` makes plain zeros in one branch of a
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
    optimizer_lies: PyTree = None,
) -> Callable:
    """Make T inner steps of all regions, one program over the mesh (not yet jitted).

    `steps(state, batches, participating, num_steps, frozen) -> (state, (losses, aux))`
    with batches `[T, R, ...]`, participating bool `[T, R]` (who takes a step) or None,
    losses float32 (or wider) `[T, R]`, and aux a dict of the same shape; for num_steps
    see `batches.scan`. With `correct`, of `core.sync.make_correct`, the regions' outer
    state is a sixth argument. `all_reduce` is for flat buffers, see
    `collectives.mean_for_all`; `optimizer_lies` are the shardings of an optimizer state
    that is partly in host memory.
    """
    kind = all_reduce if wants_flat_buffer(mesh) else None
    loss = carried(loss_fn, model_state)
    averages = bool(model_state and model_state.average and per_step)
    averages = averages and local.size * mesh.shape[REGION] > 1
    # Several regions at once are a batch, and of several devices the compiler decides.
    is_alone = local.size == 1 and mesh.size == mesh.shape[REGION]

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

        step = make_step(
            whole_loss,
            optimizer,
            local,
            per_step=per_step,
            all_reduce=kind,
            bend=bend if correct else None,
            averages_state=averages,
            reorders=is_cpu(mesh) and is_alone,
        )
        xs = (batches, participating)
        if optimizer_lies is not None:
            step = _with_state_of_hosts(step, optimizer_lies)
            return scan(step, state, xs, num_steps)

        if local.size == 1:
            return _scan_of_one_region(step, state, xs, num_steps)
        return scan(step, state, xs, num_steps)

    regions, of_steps = P(REGION), P(None, REGION)
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
    optimizer = with_named_extras(optimizer)

    def gradient(params, model_state, batch, key_data):
        key, use = jax.random.split(jax.random.wrap_key_data(key_data))
        gradient_of = jax.value_and_grad(loss_fn, has_aux=True)
        with explained_if_of_another_mesh():
            (loss, (aux, new)), grads = gradient_of(params, model_state, batch, use)
        # Aux and state may be Python numbers.
        out, new = jax.tree.map(jnp.asarray, ((widen(loss), aux), new))
        return out, new, grads, jax.random.key_data(key)

    if reorders:
        gradient = in_quick_order(gradient)

    def update(grads, opt_state, params, value):
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    def step(state: RegionState, xs: tuple[PyTree, jax.Array | None]):
        batch, participating = xs
        out, model_state, grads, key = local.map(gradient)(
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


def _scan_of_one_region(
    step: Callable, state: PyTree, xs: PyTree, num_steps: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Scan over the steps of a block of one region, without that axis in the carry.

    With it, a new array is needed in two shapes: by the carry, and by who reads it in
    the same step, as the update of the parameters reads new moments. XLA then computes
    it for each from the old array, and copies all of the old state in every step.
    """

    def step_of_one(one: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        new, out = step(jax.tree.map(lambda leaf: leaf[None], one), x)
        return jax.tree.map(lambda leaf: leaf[0], new), out

    one, out = scan(
        step_of_one, jax.tree.map(lambda leaf: leaf[0], state), xs, num_steps
    )
    return jax.tree.map(lambda leaf: leaf[None], one), out


def _with_state_of_hosts(step: Callable, lies: PyTree) -> Callable:
    """Load the optimizer's state from host memory in each step, and store it back."""

    def whole(state: RegionState, xs: tuple):
        new, out = step(state._replace(opt_state=load(state.opt_state, lies)), xs)
        return new._replace(opt_state=offload(new.opt_state, lies)), out

    return whole


def _exchange(
    per_step: PerStep, local: LocalRegions, grads: PyTree, state: RegionState, how: Any
):
    """Exchange every region's gradient; return what each makes of all messages."""

    def send(grads, kept, key_data):
        # A key of its own: the step's split uses folds 0 and 1.
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), 3)
        return per_step.send(grads, kept, key)

    message, kept = local.map(send)(grads, state.per_step, state.key)
    if per_step.receive is None:
        made = mean_for_all(message, how)
    else:
        made = per_step.receive(gather_all(message, how))
    return for_all_regions(made, local.size), kept
