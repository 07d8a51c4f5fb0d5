"""A batch of one region is not finite: memories survive, and the others go on.

In the first round region 1 of three has a NaN in its batch. The others then agree on
the same values as without it, and no memory has a NaN.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.transforms import lion, quantize
from cocodc_jax.transforms.compressor import keep_finite, without_bad
from cocodc_jax.transforms.error_feedback import error_feedback
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

SHAPES = {"w": (6, 4), "b": (4,)}
RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
TARGETS = {
    name: RNG.normal(size=(16, 3, 1, *s)).astype(np.float32)
    for name, s in SHAPES.items()
}
BAD = {name: x.copy() for name, x in TARGETS.items()}
BAD["w"][0, 1, 0, 2, 3] = np.nan
EVERYWHERE = {name: x.copy() for name, x in TARGETS.items()}
EVERYWHERE["w"][0, :, 0, 2, 3] = np.nan
H = {"sync_interval": 4}

# Name, options, steps of the first round, and whether the others then are as without.
CASES = {
    "distributed_lion": ({}, 1, True),
    "distributed_lion average": ({"lion_vote": "average"}, 1, True),
    "demo": ({"compress": "dct:4"}, 1, True),
    "dct_threshold": ({}, 1, True),
    "data_parallel": ({"compress": "ef+int4"}, 1, True),
    "data_parallel threshold": ({"compress": "threshold:0.5"}, 1, True),
    "diloco": (H | {"compress": "ef+int4"}, 4, True),
    "diloco low rank": (H | {"compress": "ef+lowrank:1"}, 4, True),
    "sparseloco": (H, 4, True),
    "muloco": (H | {"compress": "ef+int4"}, 4, True),
    "qsparse": (H, 4, True),
    "diloco_demo": (H | {"compress": "dct:4"}, 4, True),
    "noloco": (H, 4, False),
    "eager": (H, 8, False),
    "lt_admm": (H, 4, False),
    "dilocox": (
        H | {"rank": 1, "min_rank": 1, "sum_factors": True, "adaptive_rank": False},
        8,
        True,
    ),
}


def loss_fn(params, batch, key=None):
    gaps = (jnp.square(params[n] - batch[n][0]).sum() for n in SHAPES)
    return sum(gaps) / 2, {}


def method_of(case):
    return cc.methods.get(case.split()[0], **CASES[case][0])


def run_program(method, batches, num_steps, regions):
    """Parameters after each step, and memories after the last."""
    program = cc.RegionProgram(loss_fn, optax.sgd(0.1), method, PARAMS, regions)
    state = program.init(PARAMS, jax.random.key(0))
    params = []

    for step in range(num_steps):  # One length of a scan is compiled.
        batch = jax.tree.map(lambda x, t=step: x[t : t + 1], batches)
        state, _ = program.advance(state, batch)
        params.append(jax.device_get(state.region.params))

    memories = (state.region.per_step, state.sync.arrays if state.sync else ())
    return params, jax.device_get(memories)


def scanned(tx, batches, num_steps, regions):
    """Parameters after each step of a transform, and its state after the last."""

    def of_region(carry, batches):
        def step(carry, batch):
            params, state = carry
            grads = jax.grad(lambda x: loss_fn(x, batch)[0])(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), params = jax.lax.scan(step, carry, batches)
        return params, state

    carry = jax.tree.map(lambda x: jnp.stack([x] * regions), (PARAMS, tx.init(PARAMS)))
    batches = jax.tree.map(lambda x: np.moveaxis(x[:num_steps], 1, 0), batches)
    scan = jax.jit(jax.vmap(of_region, axis_name="region", out_axes=(1, 0)))
    return jax.device_get(scan(carry, batches))


def run_transform(method, batches, num_steps, regions):
    """The same by a transform."""
    tx = cc.synchronized(optax.sgd(0.1), method, axis_name="region")
    params, state = scanned(tx, batches, num_steps, regions)

    of_steps = [jax.tree.map(lambda x, t=t: x[t], params) for t in range(num_steps)]
    return of_steps, state._replace(inner=())


FORMS = {"program": run_program, "transform": run_transform}


def are_finite(tree):
    floats = (x for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.floating))
    return all(np.isfinite(x).all() for x in floats)


def of_regions(tree, which):
    return jax.tree.map(lambda x: x[:, which], tree)


# Each kind of memory once, in a program or in a transform; the rest are slow.
QUICK = (
    ("distributed_lion", "program"),
    ("demo", "transform"),
    ("dct_threshold", "program"),
    ("data_parallel", "transform"),
    ("diloco low rank", "transform"),
    ("sparseloco", "program"),
    ("qsparse", "transform"),
    ("noloco", "transform"),
    ("eager", "program"),
    ("lt_admm", "transform"),
    ("dilocox", "program"),
)


@pytest.mark.parametrize(
    ("case", "form"), mostly_slow(itertools.product(CASES, FORMS), quick=QUICK)
)
def test_a_bad_batch_of_one_region_leaves_no_trace_in_memories(case, form):
    options, first, is_as_without = CASES[case]
    run = FORMS[form]
    method = method_of(case)

    history, memories = run(method, BAD, 16, 3)
    params = history[-1]

    assert are_finite(memories)

    # A transform adds to parameters, so that NaN stays; nor does lt_admm replace them.
    keeps = method.sync and (form == "transform" or case == "lt_admm")
    healthy = [0, 2] if keeps else [0, 1, 2]
    assert are_finite({n: x[healthy] for n, x in params.items()})

    if is_as_without:
        after = history[first - 1]
        (*_, expected), _ = run(method, of_regions(TARGETS, [0, 2]), first, 2)
        for name in SHAPES:
            np.testing.assert_allclose(
                after[name][[0, 2]], expected[name], rtol=2e-5, atol=2e-6
            )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["distributed_lion", "demo", "diloco", "dilocox"])
def test_if_every_region_is_bad_the_mean_is_nan(case, form):
    steps = 8 if case == "dilocox" else 4
    (*_, params), memories = FORMS[form](method_of(case), EVERYWHERE, steps, 3)
    assert np.isnan(params["w"]).any()
    if method_of(case).per_step:  # Sent after the user's optimizer has skipped.
        assert are_finite(memories)


@pytest.mark.parametrize("exchange", ["program", "outer"])
def test_moments_that_are_not_finite_are_in_no_mean(exchange):
    """Updates that are not finite are dropped, but Adam's moments would keep them."""
    optimizer = optax.chain(optax.adam(0.1), optax.zero_nans())
    method = cc.methods.get("des_loc", sync_interval=2, sync_moments="1,1")

    def moments(targets, regions):
        program = cc.RegionProgram(
            loss_fn,
            optimizer,
            method,
            PARAMS,
            regions,
            transport=cc.Transport(exchange=exchange),
        )
        state = program.init(PARAMS, jax.random.key(0))
        batches = (jax.tree.map(lambda x, t=t: x[t], targets) for t in range(2))
        *_, (state, _) = cc.run_steps(program, state, batches, num_steps=2)
        return jax.device_get(state.region.opt_state[0][0])

    expected = moments(of_regions(TARGETS, [0, 2]), 2)
    in_all_regions = jax.tree.map(lambda x: x[:1].repeat(3, 0), expected)
    assert_all_close(moments(BAD, 3), in_all_regions, rtol=1e-6)


def test_moments_that_are_not_finite_are_in_no_mean_of_a_transform():
    optimizer = optax.chain(optax.adam(0.1), optax.zero_nans())
    method = cc.methods.get("des_loc", sync_interval=2, sync_moments="1,1")
    tx = cc.synchronized(optimizer, method, axis_name="region")

    def moments(targets, regions):
        _, state = scanned(tx, targets, 2, regions)
        return state.inner[0][0]

    expected = moments(of_regions(TARGETS, [0, 2]), 2)
    in_all_regions = jax.tree.map(lambda x: x[:1].repeat(3, 0), expected)
    assert_all_close(moments(BAD, 3), in_all_regions, rtol=1e-6)


def test_weights_of_bad_messages_go_to_the_others():
    messages = {"x": jnp.array([[1.0], [jnp.nan], [3.0]]), "codes": jnp.ones(3, int)}
    kept, weights = without_bad(messages, jnp.array([0.5, 0.25, 0.25]))
    np.testing.assert_allclose(weights, [2 / 3, 0, 1 / 3], rtol=1e-6)
    assert kept["x"].tolist() == [[1], [0], [3]]
    assert kept["codes"].tolist() == [1, 0, 1]

    weights = jnp.array([0.0, 1.0, 0.0])  # The others did not take part.
    assert without_bad(messages, weights)[1].tolist() == [0, 1, 0]


def test_a_residual_keeps_no_nan_that_a_compressor_leaves_out():
    def encode(tree, state, key=None):
        return tree[:1], state

    def decode(message):
        return jnp.pad(message, (0, 1))

    first = cc.transforms.compressor.Compressor(
        "first", lambda tree: (), encode, decode
    )
    compressor = error_feedback(first)
    state = compressor.init(jnp.zeros(2))

    message, state = compressor.encode(jnp.array([1.0, jnp.nan]), state)

    assert np.isnan(message).all()
    assert state.residual.tolist() == [0, 0]


def test_a_compressor_that_is_kept_finite_has_a_memory():
    assert keep_finite(quantize.int8()).has_memory


# Region 1 has no vote.
GRADIENTS = jnp.array([[1.0, -1.0], [jnp.nan, 1.0], [1.0, -1.0], [-1.0, 1.0]])


def test_a_bad_gradient_leaves_the_momentum_of_lion():
    state = lion.LionState(-10 * jnp.ones((4, 2)))

    _, new = jax.vmap(lion.send)(GRADIENTS, state)

    assert new.momentum[1].tolist() == [-10, -10]
    assert new.momentum[0].tolist() != [-10, -10]


def test_a_region_without_a_vote_is_not_counted():
    messages, _ = jax.vmap(lion.send)(GRADIENTS, jax.vmap(lion.init)(GRADIENTS))

    np.testing.assert_allclose(lion.combine(messages), [1 / 3, -1 / 3])
    assert lion.combine(messages, "majority").tolist() == [1, -1]


def test_a_vote_without_voters_is_nan():
    messages, _ = jax.vmap(lion.send)(GRADIENTS, jax.vmap(lion.init)(GRADIENTS))
    nobody = messages._replace(counted=jnp.zeros(4, jnp.uint8))

    assert np.isnan(lion.combine(nobody, "majority")).all()
