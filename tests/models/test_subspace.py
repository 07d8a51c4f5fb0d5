"""A residual stream in a subspace: messages are lossless, and steps keep them so."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.models import (
    Subspace,
    confine,
    confined,
    make_loss_fn,
    make_pipelined_loss_fn,
    stage_bytes,
)
from tests.jaxprs import equations
from tests.models.pipelined import (
    BATCH,
    BFLOAT16,
    CONFIG,
    KEY,
    LENGTH,
    assert_close,
    draw,
    step,
    tokens,
)
from tests.numerics import assert_within_ulps

NARROW = Subspace(width=16, rank=3)
WRITERS = (("attention", "output"), ("mlp", "down"))


def outside(params, subspace=NARROW):
    """The longest part of a writing matrix's row that is not in the subspace."""
    u = subspace.basis.astype(np.float64)
    rows = [np.asarray(params["blocks"][a][b], np.float64) for a, b in WRITERS]
    return max(np.abs(w - w @ u @ u.T).max() for w in rows)


def fixed(params):
    u = NARROW.basis.astype(np.float64)
    table = np.asarray(params["embedding"], np.float64)
    return table - table @ u @ u.T


def projected(tree):
    """A gradient as the optimizer of a confined model sees it."""
    optimizer = confined(optax.identity(), NARROW)
    # Added to zeros, a projected matrix is its own step.
    return optimizer.update(
        tree, optimizer.init(tree), jax.tree.map(jnp.zeros_like, tree)
    )[0]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 7), st.integers(0, 5))
def test_encoded_activations_decode_to_rounding(rank, seed):
    subspace = Subspace(8, rank, seed)
    u = subspace.basis
    np.testing.assert_allclose(u.T @ u, np.eye(rank), atol=1e-6)

    rng = np.random.default_rng(seed)
    table = rng.normal(size=(5, 8)).astype(np.float32)
    ids = rng.integers(0, 5, (2, 3))
    written = rng.normal(size=(2, 3, rank)).astype(np.float32) @ u.T
    x = table[ids] + written
    coded = subspace.encode(jnp.asarray(x))

    assert coded.shape == (2, 3, rank)
    decoded = subspace.decode(coded, jnp.asarray(table), ids)
    np.testing.assert_allclose(decoded, x, atol=5e-6)


def test_a_token_and_a_direction_by_hand():
    subspace = Subspace(2, 1)
    # U = (3, 4) / 5, instead of a drawn one.
    subspace.__dict__["basis"] = np.array([[0.6], [0.8]], np.float32)
    table = jnp.array([[10.0, 0.0]])

    # P (10, 0) = 6 U = (3.6, 4.8), so fixed is (6.4, -4.8); a block then wrote 5 U.
    x = jnp.array([[[13.0, 4.0]]])
    coded = subspace.encode(x)
    np.testing.assert_allclose(coded, [[[11.0]]], rtol=1e-6)

    decoded = subspace.decode(coded, table, np.array([[0]]))
    np.testing.assert_allclose(decoded, x, rtol=1e-6)


@pytest.mark.slow
def test_the_whole_space_is_the_plain_pipeline():
    config = dataclasses.replace(CONFIG, num_layers=2)
    arguments = (draw(config), tokens(), KEY)

    def result(subspace):
        loss_fn = make_pipelined_loss_fn(config, 2, 2, subspace=subspace)
        return jax.device_get(jax.jit(step(loss_fn))(*arguments))

    with jax.set_mesh(make_mesh(1, stage=2)):
        (loss, aux), grads = result(Subspace(16, 16))
        (plain_loss, plain_aux), plain_grads = result(None)
    assert_within_ulps((loss, grads), (plain_loss, plain_grads))
    aux.pop("stage_bytes")
    assert aux == plain_aux
    optimizer = optax.adam(1e-2)
    assert confined(optimizer, Subspace(16, 16)) is optimizer


class TestPipeline:
    """Four stages, two microbatches; the plain model with the same parameters."""

    @staticmethod
    @functools.cache
    def programs():
        optimizer = confined(optax.adamw(1e-2, weight_decay=0.1), NARROW)
        pipelined = make_pipelined_loss_fn(CONFIG, 4, 2, subspace=NARROW)

        @jax.jit
        def apply(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        losses = (jax.jit(step(pipelined)), jax.jit(step(make_loss_fn(CONFIG))))
        return *losses, optimizer.init, apply

    @staticmethod
    def start():
        return jax.device_get(confine(draw(CONFIG), NARROW))

    def test_loss_and_gradient_are_the_plain_models(self):
        pipelined, plain, _, _ = self.programs()
        params = self.start()
        (expected, aux), grads = plain(params, tokens(), KEY)
        with jax.set_mesh(make_mesh(1, stage=4)):
            (loss, seen), actual = pipelined(params, tokens(), KEY)

        assert_close(loss, expected)
        assert_close(projected(actual), projected(grads))
        assert_close(seen["accuracy"], aux["accuracy"])

        free = {name: actual["blocks"]["mlp"][name] for name in ("gate", "up")}
        assert_close(free, {name: grads["blocks"]["mlp"][name] for name in free})
        assert seen["stage_bytes"] == stage_bytes(CONFIG, 4, BATCH, LENGTH, NARROW)

    def test_real_steps_stay_lossless(self):
        pipelined, plain, init, apply = self.programs()
        start = self.start()
        results = []

        for program in (pipelined, plain):
            params = start
            state = init(start)
            with jax.set_mesh(make_mesh(1, stage=4)):
                for way in (1, -1, 1, -1, 1):
                    _, grads = program(params, tokens()[::way], KEY)
                    params, state = apply(jax.device_get(grads), state, params)
                results.append(jax.device_get(params))

        params, expected = results
        assert_close(params, expected, rtol=2e-3, atol=2e-5)
        for moved in results:
            assert outside(moved) < 1e-6
            np.testing.assert_allclose(fixed(moved), fixed(start), atol=1e-6)
            assert np.abs(moved["embedding"] - start["embedding"]).max() > 1e-2

        (loss, _), _ = plain(params, tokens(), KEY)
        with jax.set_mesh(make_mesh(1, stage=4)):
            (sent_loss, _), _ = pipelined(params, tokens(), KEY)
        assert_close(sent_loss, loss)
        assert loss < plain(start, tokens(), KEY)[0][0]


@pytest.mark.parametrize("subspace", [None, NARROW])
@pytest.mark.parametrize("config", [CONFIG, BFLOAT16])
def test_bytes_are_those_of_the_messages(config, subspace):
    stages = 4
    microbatches = 2
    with jax.set_mesh(make_mesh(1, stage=stages)):
        program = step(
            make_pipelined_loss_fn(config, stages, microbatches, subspace=subspace)
        )
        jaxpr = jax.make_jaxpr(program)(draw(config), tokens(), KEY)

    def num_bytes(primitive):
        return sum(
            x.aval.size * x.aval.dtype.itemsize
            for e in equations(jaxpr.jaxpr)
            if e.primitive.name == primitive
            for x in e.invars
        )

    # Every stage but one sends a microbatch of each kind, M times that is one. Of
    # sharded messages the last stage's part stays: the others' S parts are S - 1.
    ahead = num_bytes("ppermute") * microbatches * (stages - 1)
    shared = num_bytes("all_to_all") * (stages - 1) // stages
    total = stage_bytes(config, stages, BATCH, LENGTH, subspace)
    assert total == ahead + shared

    if subspace is None:
        narrow = stage_bytes(config, stages, BATCH, LENGTH, NARROW)
        a_position = 16 * jnp.dtype(config.compute_dtype).itemsize
        ids = total * 4 / (2 * a_position + 4)
        assert (narrow - 2 * ids) / (total - ids) == pytest.approx(3 / 16)


def test_confined_steps_against_numpy():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: rng.normal(size=x.shape), draw(CONFIG))
        u = NARROW.basis.astype(np.float64)
        optimizer = confined(optax.sgd(0.1, momentum=0.9), NARROW)

        names = {"output": True, "down": True, "embedding": False}
        ref = {
            jax.tree_util.keystr(path): [x.copy(), 0 * x, path[-1].key]
            for path, x in jax.tree_util.tree_leaves_with_path(params)
        }

        state = optimizer.init(params)
        for _ in range(4):
            grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)

            for path, g in jax.tree_util.tree_leaves_with_path(grads):
                w, m, name = ref[jax.tree_util.keystr(path)]
                g = g @ u @ u.T if name in names else g
                m = 0.9 * m + g
                w = w - 0.1 * (m @ u @ u.T if name in names else m)
                if names.get(name):
                    # Those of before, when the first step began outside.
                    w = w @ u @ u.T
                ref[jax.tree_util.keystr(path)] = [w, m, name]

        for path, w in jax.tree_util.tree_leaves_with_path(params):
            # U is orthonormal to float32's rounding only, which both have.
            expected = ref[jax.tree_util.keystr(path)][0]
            np.testing.assert_allclose(w, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rank", [0, 17])
def test_a_rank_that_the_width_does_not_have_is_refused(rank):
    message = f"stage_subspace={rank} must be .* at most the model's width=16"
    with pytest.raises(ValueError, match=message):
        Subspace(16, rank)


def test_an_update_without_parameters_is_refused():
    optimizer = confined(optax.sgd(1.0), NARROW)
    with pytest.raises(ValueError, match=re.escape("params=None")):
        optimizer.update({}, optimizer.init({}))
