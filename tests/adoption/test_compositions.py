"""Parts put together as no method of the table does, and states as others hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cocodc_jax as cc
from cocodc_jax.engine.region_state import region_drift
from cocodc_jax.methods import Method, Sync
from cocodc_jax.methods.diloco_demo import decoupled_momentum
from cocodc_jax.sync import merge, schedules
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.outer import SharedOuter
from tests.slow import mostly_slow

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(6, 4)).astype(np.float32) for name in "abc"}
TARGETS = RNG.normal(size=(24, 2, 1, 6, 4)).astype(np.float32)


def loss_fn(params, batch, key=None):
    return sum(jnp.square(x - batch[0]).sum() for x in params.values()) / 2, {}


def run(method, params=PARAMS, targets=TARGETS):
    program = cc.RegionProgram(loss_fn, optax.sgd(0.05), method, params, 2)
    first = program.init(params, jax.random.key(0))
    syncs = []
    for state, output in cc.run_steps(  # noqa: B007
        program, first, iter(targets), num_steps=len(targets)
    ):
        syncs += output.syncs
    return jax.device_get(state.region.params), syncs


def test_an_invalid_outer_optimizer_is_refused_at_once():
    with pytest.raises(ValueError, match="optimizer=None must be an optax.Gradient"):
        SharedOuter(None)


def test_a_merge_after_ranked_rounds_gets_the_length_of_its_round():
    """Rounds get shorter with the rank; the merge gets the steps of its round."""

    def apply(local, staged, outer, *, delay_steps, **extra):
        return outer, {"steps": jnp.asarray(delay_steps, jnp.float32)}

    method = cc.methods.get("dilocox", sync_interval=4, rank=4, min_rank=1)
    zeros = {"a": np.zeros((6, 4), np.float32)}  # All updates have rank 1.
    _, syncs = run(
        method.with_sync(merge=Merge("steps", apply)), zeros, np.ones_like(TARGETS)
    )
    delays = [sync.apply_step - sync.start_step for sync in syncs]
    assert len(set(delays)) > 1
    assert [sync.metrics["steps"][0].item() for sync in syncs] == delays


@pytest.mark.parametrize("score", mostly_slow(["drift", "gain"], quick=["drift"]))
def test_scores_compare_each_region_with_its_own_outer_model(score):
    """Each region is compared with its outer fragment, in both forms."""
    sync = Sync(
        schedule=schedules.adaptive(6, 3, 0, 6, score),
        outer=decoupled_momentum(0.7, 0.9),
        merge=merge.replace(),
    )
    method = Method(name="mine", sync=sync)
    params_of_program, syncs = run(method)
    order = [sync_of.fragment_id for sync_of in syncs]
    tx = cc.synchronized(optax.sgd(0.05), method, axis_name="region")

    def of_region(batches):
        def step(carry, batch):
            params, state = carry
            grads = jax.grad(lambda x: loss_fn(x, batch)[0])(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jax.tree.map(jnp.asarray, PARAMS)
        return jax.lax.scan(step, (params, tx.init(params)), batches)

    runs = jax.vmap(of_region, axis_name="region")(TARGETS.swapaxes(0, 1))
    expected = runs[0][0]
    assert len(order) >= 6
    for name, x in expected.items():
        np.testing.assert_allclose(params_of_program[name], x, rtol=1e-4, atol=1e-5)


def test_the_drift_of_equal_regions_is_zero():
    zeros = {"w": jnp.zeros((2, 3))}
    with jax.debug_nans(True):
        assert jax.jit(region_drift)(zeros) == 0
        assert jax.jit(region_drift)({"w": jnp.ones((2, 3))}) == 0


def test_the_drift_of_regions_by_hand():
    apart = {"w": jnp.array([[1.0, 3.0], [3.0, 1.0]])}
    np.testing.assert_allclose(region_drift(apart), 0.5)
    assert region_drift({"w": jnp.array([[1.0], [-1.0]])}) == np.inf
    assert np.isnan(region_drift({"w": jnp.array([[1.0], [jnp.nan]])}))


@pytest.mark.parametrize("is_chained", [False, True])
def test_sync_metrics_takes_an_nnx_optimizer_or_its_state(is_chained):
    method = cc.methods.get(
        "streaming_diloco", sync_interval=2, num_fragments=1, delay_steps=1
    )
    tx = cc.synchronized(optax.adam(0.1), method, axis_name="region")
    tx = optax.chain(optax.clip(1.0), tx) if is_chained else tx
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, _):
        model, optimizer = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: model(jnp.ones((1, 3))).sum())(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    regions = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for _ in range(2):
        regions = jax.vmap(step, axis_name="region")(regions, jnp.zeros(2))
    metrics = cc.sync_metrics(regions)
    assert metrics["fragments_in_flight"].tolist() == [1, 1]
    assert metrics["bytes_sent"].tolist() == [4 * 8, 4 * 8]

    nnx.update(optimizer, jax.tree.map(lambda x: x[0], regions)[1])
    for holder in (optimizer, nnx.state(optimizer), nnx.to_pure_dict(regions)):
        np.testing.assert_array_equal(
            np.ravel(cc.sync_metrics(holder)["fragments_in_flight"])[0], 1
        )


def test_metrics_of_a_state_without_a_sync_are_refused():
    with pytest.raises(ValueError, match="state holds 0 states of synchronized"):
        cc.sync_metrics({"step": 1})
