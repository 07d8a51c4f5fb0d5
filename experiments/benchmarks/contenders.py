"""The contenders: each returns a turn, `case.interval` steps of every region.

All train the same model on the same batches with the same inner optimizer. Those that
average do so once a turn, with Nesterov momentum, as DiLoCo (arXiv 2311.08105).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc

from .cases import OUTER_LR, OUTER_MOMENTUM, Case, torch_loss

PyTree = Any
# Trains for a turn, waits for it, and returns all trained parameters.
Turn = Callable[[], PyTree]


def region_program(case: Case, method: str, num_devices: int, **arguments: Any) -> Turn:
    """Return a turn of this package's `RegionProgram`."""
    chosen = cc.methods.get(method, sync_interval=case.interval, **arguments)
    mesh = cc.make_mesh(case.regions, devices=jax.devices()[:num_devices])
    program = cc.RegionProgram(
        case.loss_fn, case.optimizer, chosen, case.params, case.regions, mesh=mesh
    )
    return program_turn(program, case.params, case.batches)


def program_turn(
    program: cc.RegionProgram, params: PyTree, batches: np.ndarray
) -> Turn:
    """Return a turn of a program: a step for each of the batches `[T, ...]`."""
    held = [program.init(params, jax.random.key(0))]

    def turn() -> PyTree:
        for state, _ in cc.run_steps(program, held.pop(), iter(batches), len(batches)):
            held[:] = [state]
        return jax.block_until_ready(held[0].region.params)

    return turn


def make_loop(case: Case, optimizer: Any = None) -> Callable:
    """Return a scan over a region's batches; None is the case's optimizer."""
    tx = case.optimizer if optimizer is None else optimizer

    def step(carry: PyTree, batch: jax.Array):
        params, opt_state = carry
        gradient_of = jax.value_and_grad(case.loss_fn, has_aux=True)
        (loss, _), grads = gradient_of(params, batch, jax.random.key(0))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return lambda carry, batches: jax.lax.scan(step, carry, batches)


def transform(case: Case, method: str, num_devices: int, **arguments: Any) -> Turn:
    """Return a turn of a scan with a method as one Optax transform."""
    chosen = cc.methods.get(method, sync_interval=case.interval, **arguments)
    tx = cc.synchronized(case.optimizer, chosen, axis_name="region")
    everywhere, where = _shardings("region", num_devices)
    # State that is equal in all regions is kept once.
    axes = (0, cc.sync_axes(chosen))
    layout = (where, cc.sync_axes(chosen, where, everywhere))
    over = (axes, 0)
    spmd = "region" if num_devices > 1 else None
    run = jax.vmap(make_loop(case, tx), over, over, "region", spmd_axis_name=spmd)
    spread = jax.vmap(lambda x: x, None, axes, axis_size=case.regions)
    first = spread((case.params, tx.init(case.params)))
    loop = jax.jit(run, donate_argnums=0, out_shardings=(layout, where))

    return _turn(case, loop, jax.device_put(first, layout), where)


def plain_loops(case: Case) -> Turn:
    """Return a turn of plain scans, one region after the other on one device."""
    loop = jax.jit(make_loop(case), donate_argnums=0)
    first = (case.params, case.optimizer.init(case.params))
    carries = [jax.tree.map(jnp.copy, first) for _ in range(case.regions)]

    def turn() -> PyTree:
        for region, carry in enumerate(carries):
            carries[region], _ = loop(carry, case.batches[:, region])
        return jax.block_until_ready([params for params, _ in carries])

    return turn


def scan_alone(case: Case, num_devices: int) -> Turn:
    """Return a turn of a `shard_map` of a scan without any sync.

    Regions that share a device are one batch, which is faster for such small models.
    """
    scan = make_loop(case)

    def block(carry: PyTree, xs: jax.Array):
        if num_devices < case.regions:
            return jax.vmap(scan)(carry, xs)
        carry, losses = scan(jax.tree.map(lambda x: x[0], carry), xs[0])
        return jax.tree.map(lambda x: x[None], (carry, losses))

    _, where = _shardings("region", num_devices)
    over = where.spec
    run = jax.shard_map(
        block, mesh=where.mesh, in_specs=over, out_specs=over, check_vma=False
    )
    first = (case.params, case.optimizer.init(case.params))
    loop = jax.jit(run, donate_argnums=0)

    return _turn(case, loop, _for_all(case, first, where), where)


def drjax_diloco(case: Case, num_devices: int) -> Turn:
    """Return a DiLoCo round of DrJAX (arXiv 2403.07128) as one program."""
    import drjax  # pyright: ignore[reportMissingImports]

    everywhere, of_clients = _shardings("clients", num_devices)
    mesh = of_clients.mesh
    scan = make_loop(case)
    outer = optax.sgd(OUTER_LR, OUTER_MOMENTUM, nesterov=True)

    def local(params: PyTree, opt_state: PyTree, batches: jax.Array):
        (new, opt_state), losses = scan((params, opt_state), batches)
        return jax.tree.map(jnp.subtract, params, new), opt_state, losses

    @drjax.program(placements={"clients": case.regions})
    def one_round(state: PyTree, batches: jax.Array):
        params, outer_state, opt_states = state
        spread = drjax.broadcast(params, mesh=mesh)
        deltas, opt_states, losses = drjax.map_fn(
            local, (spread, opt_states, batches), mesh=mesh
        )
        mean = drjax.reduce_mean(deltas)
        updates, outer_state = outer.update(mean, outer_state, params)
        params = optax.apply_updates(params, updates)
        return (params, outer_state, opt_states), losses

    params = jax.tree.map(jnp.copy, case.params)  # It is donated.
    first = (
        jax.device_put(params, everywhere),
        jax.device_put(outer.init(params), everywhere),
        _for_all(case, case.optimizer.init(params), of_clients),
    )

    return _turn(case, jax.jit(one_round, donate_argnums=0), first, of_clients)


def torch_diloco(case: Case) -> Turn:
    """Return a turn of a plain DiLoCo loop of PyTorch, for the case `gpt`.

    It has the simplest form: eager mode, regions one after another with all threads.
    It starts from the same parameters as the others, and ends at the same ones up to
    rounding.
    """
    import torch  # pyright: ignore[reportMissingImports]

    gpt = case.gpt
    assert gpt is not None

    def tensors() -> PyTree:
        return jax.tree.map(
            lambda x: torch.tensor(np.asarray(x), requires_grad=True), case.params
        )

    outer = tensors()
    regions = [tensors() for _ in range(case.regions)]
    leaves = jax.tree.leaves(outer)
    outer_optimizer = torch.optim.SGD(leaves, OUTER_LR, OUTER_MOMENTUM, nesterov=True)
    optimizers = [
        torch.optim.AdamW(jax.tree.leaves(region), 1e-3, weight_decay=1e-4)
        for region in regions
    ]
    batches = torch.from_numpy(case.batches.astype(np.int64))

    def turn() -> PyTree:
        for m, (region, optimizer) in enumerate(zip(regions, optimizers, strict=True)):
            for step in range(case.interval):
                optimizer.zero_grad()
                torch_loss(gpt, region, batches[step, m]).backward()
                optimizer.step()

        with torch.no_grad():
            region_leaves = map(jax.tree.leaves, regions)
            for outer_leaf, *local_leaves in zip(leaves, *region_leaves, strict=True):
                outer_leaf.grad = outer_leaf - torch.stack(local_leaves).mean(0)
            outer_optimizer.step()
            for region in regions:
                jax.tree.map(lambda x, new: x.copy_(new), region, outer)

        return jax.tree.map(lambda x: x.detach().numpy(), outer)

    return turn


def _turn(case: Case, loop: Callable, state: PyTree, where: NamedSharding) -> Turn:
    """Return a turn of `loop(state, batches)`; the parameters are first in the state.

    The batches are `[R, T, B, ...]`; the state is donated.
    """
    held = [state]
    batches = np.ascontiguousarray(case.batches.swapaxes(0, 1))

    def turn() -> PyTree:
        held[0], _ = loop(held[0], jax.device_put(batches, where))
        return jax.block_until_ready(held[0][0])

    return turn


def _shardings(axis: str, num_devices: int) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings of replicated values, and of those with a region axis."""
    devices = np.array(jax.devices()[:num_devices])
    mesh = Mesh(devices, (axis,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(axis))


def _for_all(case: Case, tree: PyTree, where: NamedSharding) -> PyTree:
    """Repeat a tree for every region, `[R, ...]`."""
    repeat = lambda x: jnp.broadcast_to(x[None], (case.regions, *x.shape))  # noqa: E731
    return jax.device_put(jax.tree.map(repeat, tree), where)
