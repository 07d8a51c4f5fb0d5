"""Effects of a merge on an optimizer's state, and random state of each region."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.sync import inner_keys, inner_state

OLD = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
NEW = {"w": OLD["w"], "b": OLD["b"] + jnp.array([1.0, 2.0, -3.0])}
FREE = optax.contrib.schedule_free_sgd(0.1)


class Anchored(NamedTuple):
    """State of a user's optimizer, which pulls towards an anchor."""

    anchor: Any


def anchored():
    def update(updates, state, params=None):
        return jax.tree.map(lambda p, a: 0.1 * (a - p), params, state.anchor), state

    def init(params):
        return Anchored(jax.tree.map(jnp.copy, params))

    return optax.GradientTransformation(init, update)


def test_a_copy_moves_as_the_parameters_do():
    state = cc.merge_opt_state(FREE.init(OLD), OLD, NEW)
    np.testing.assert_array_equal(state.z["b"], NEW["b"])
    # Other leaves have the same bits.
    np.testing.assert_array_equal(state.z["w"], OLD["w"])
    # So do all sequences: x too.
    moved = optax.contrib.schedule_free_eval_params(state, NEW)
    np.testing.assert_allclose(moved["b"], NEW["b"], rtol=1e-6)


def test_regions_may_be_stacked():
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    optimizer = optax.flatten(optax.chain(optax.clip(1.0), FREE))
    states = [optimizer.init(OLD), optimizer.init(NEW)]
    pairs = [(OLD, NEW), (NEW, NEW)]
    one_by_one = [
        cc.merge_opt_state(state, *pair)
        for state, pair in zip(states, pairs, strict=True)
    ]

    both = cc.merge_opt_state(stack(*states), *(stack(*x) for x in zip(*pairs)))  # noqa: B905
    jax.tree.map(np.testing.assert_array_equal, both, stack(*one_by_one))


def test_copies_may_be_masked_and_have_another_dtype():
    free = optax.contrib.schedule_free_sgd(0.1, state_dtype=jnp.bfloat16)
    optimizer = optax.masked(free, {"w": False, "b": True})
    state = cc.merge_opt_state(optimizer.init(OLD), OLD, NEW).inner_state
    assert state.z["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.z["b"].astype(float), NEW["b"])
    assert isinstance(state.z["w"], optax.MaskedNode)


def test_a_line_search_evaluates_again_after_a_merge():
    optimizer = optax.lbfgs()

    def loss(params):
        return jnp.sum(params["b"] ** 2)

    value_and_grad = optax.value_and_grad_from_state(loss)
    value, grad = value_and_grad(OLD, state=optimizer.init(OLD))
    _, state = optimizer.update(
        grad, optimizer.init(OLD), OLD, value=value, grad=grad, value_fn=loss
    )

    same = cc.merge_opt_state(state, OLD, OLD)
    jax.tree.map(np.testing.assert_array_equal, same, state)

    value, grad = value_and_grad(NEW, state=cc.merge_opt_state(state, OLD, NEW))
    assert value == loss(NEW)
    np.testing.assert_array_equal(grad["b"], 2 * NEW["b"])


def test_initial_points_stay():
    for optimizer in (optax.contrib.prodigy(), optax.contrib.dowg(), optax.lbfgs()):
        state = optimizer.init(OLD)
        merged = cc.merge_opt_state(state, OLD, OLD)
        jax.tree.map(np.testing.assert_array_equal, merged, state)


def test_a_hook_is_called_last_with_both():
    optimizer = optax.chain(anchored(), FREE)

    def on_merge(state, old, new):
        assert np.array_equal(state[1].z["b"], NEW["b"])  # Moved before.
        moved = jax.tree.map(lambda a, x, y: a + y - x, state[0].anchor, old, new)
        return (Anchored(moved), state[1])

    state = cc.merge_opt_state(optimizer.init(OLD), OLD, NEW, on_merge)
    np.testing.assert_array_equal(state[0].anchor["b"], NEW["b"])


@pytest.mark.parametrize(
    ("optimizer", "paths"),
    [
        (optax.adam(0.1), ()),
        (optax.chain(FREE, optax.contrib.dowg()), ()),
        (optax.flatten(FREE), ()),
        (anchored(), ("anchor/b", "anchor/w")),
        (optax.chain(optax.clip(1.0), optax.flatten(anchored())), ("1/anchor",)),
    ],
)
def test_copies_are_seen_in_the_traced_init(optimizer, paths):
    assert inner_state.find_copies(optimizer, OLD).unknown == paths


@pytest.mark.parametrize("form", ["program", "synchronized"])
def test_a_copy_without_a_rule_is_refused(form):
    with pytest.raises(ValueError, match=r"parameters at 'anchor/b'.*UserInputs\(on_m"):
        make(form, anchored())
    make(form, anchored(), cc.UserInputs(on_merge=lambda state, old, new: state))
    make(form, anchored(), method="apart")


def make(form, optimizer, user_inputs=None, method="diloco"):
    user_inputs = user_inputs or cc.UserInputs()
    if form == "program":
        loss = lambda params, batch, key: (jnp.sum(params["w"]), {})  # noqa: E731
        return cc.RegionProgram(
            loss, optimizer, method, OLD, 2, user_inputs=user_inputs
        )
    tx = cc.synchronized(optimizer, method, axis_name="region", user_inputs=user_inputs)
    return tx.init(OLD)


def test_a_copy_of_another_structure_is_refused_by_name():
    optimizer = optax.masked(optax.flatten(FREE), {"w": False, "b": True})
    with pytest.raises(ValueError, match="ScheduleFreeState.z is a copy of the param"):
        make("synchronized", optimizer)


# Optax 0.2.6 has no monitor.
MONITORS = []
if hasattr(optax, "monitor"):
    grows = "another structure after its first"
    MONITORS.append((optax.monitor({"x": lambda x: x}), grows))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.contrib.sophia(0.1), "needs obj_fn, the loss as a function"),
        (optax.lbfgs(), "needs grad and value_fn, but RegionProgram passes"),
        (
            optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
            "needs grad_fn",
        ),
        (
            optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0),
            "needs the gradient of each example",
        ),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "optax.lookahead trains a pair"),
        *MONITORS,
    ],
)
@pytest.mark.parametrize("method", ["diloco", "apart"])
def test_arguments_that_a_program_does_not_pass_are_named(method, optimizer, message):
    with pytest.raises(ValueError, match=message):
        make("program", optimizer, method=method)


# --- Random state ---


class Drawn(NamedTuple):
    """Random state in all its forms."""

    typed: Any
    rng_key: Any
    seed: Any
    count: Any


DRAWN = Drawn(
    jax.random.key(1), jax.random.PRNGKey(2), jnp.int32(3), jnp.zeros((), jnp.int32)
)


def plain(state):
    return jax.tree.map(np.asarray, state._replace(typed=jax.random.key_data(state[0])))


def test_random_state_differs_by_region_and_the_first_keeps_its_own():
    first, second, third = (plain(inner_keys.fold_keys(DRAWN, i)) for i in range(3))
    jax.tree.map(np.testing.assert_array_equal, first, plain(DRAWN))

    for name in ("typed", "rng_key", "seed"):
        values = [getattr(state, name) for state in (first, second, third)]
        assert len({x.tobytes() for x in values}) == 3
        assert len({(x.dtype, x.shape) for x in values}) == 1

    assert second.count == 0


def test_keys_are_found_in_a_state():
    assert inner_keys.has_keys(DRAWN)
    assert not inner_keys.has_keys(optax.adam(0.1).init(OLD))


def test_a_warning_names_a_leaf_that_may_be_a_raw_key():
    def init(params):
        return (jax.random.PRNGKey(0),)

    optimizer = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    with pytest.warns(UserWarning, match=r"uint32\[2\] at '\[0\]'.*jax.random.key"):
        make("synchronized", optimizer)
    make("synchronized", optimizer, method="data_parallel")  # Is equal there anyway.
