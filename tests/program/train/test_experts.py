"""Ensembles of experts and their routers, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.engine.mesh import make_mesh, regional
from cocodc_jax.train import experts

REGIONS, BATCHES, BATCH, LENGTH, VOCAB, WIDTH = 4, 3, 2, 7, 11, 5


def logits_fn(params, tokens):
    """A causal model of one layer: the running mean of what was seen."""
    seen = jnp.cumsum(params["embedding"][tokens], axis=1)
    count = 1 + jnp.arange(tokens.shape[1], dtype=jnp.float32)
    return jnp.tanh(seen / count[None, :, None]) @ params["head"]


def make_params():
    rng = np.random.default_rng(1)
    return {
        "embedding": rng.normal(0, 2, (REGIONS, VOCAB, WIDTH)).astype(np.float32),
        "head": rng.normal(0, 1, (REGIONS, WIDTH, VOCAB)).astype(np.float32),
    }


def make_tokens():
    shape = (BATCHES, BATCH, LENGTH + 1)
    return np.random.default_rng(0).integers(0, VOCAB, shape).astype(np.int32)


def numpy_log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def numpy_logits(params, tokens):
    """`[R, E, B, L, V]` in float64, one sequence and position at a time."""
    out = np.zeros((len(params["head"]), BATCHES, BATCH, LENGTH, VOCAB))
    for r, e, b, t in np.ndindex(out.shape[:-1]):
        seen = params["embedding"][r][tokens[e, b, : t + 1]].astype(np.float64)
        out[r, e, b, t] = np.tanh(seen.mean(0)) @ params["head"][r]
    return out


def numpy_chosen(log_probs, tokens):
    next_tokens = np.broadcast_to(tokens[:, :, 1:], log_probs.shape[:-1])
    return np.take_along_axis(log_probs, next_tokens[..., None], -1)[..., 0]


def random_log_probs(seed, *shape):
    return np.log(np.random.default_rng(seed).uniform(0.01, 1, shape))


def random_weights(seed, *shape):
    drawn = np.random.default_rng(seed).uniform(0.01, 1, shape)
    return drawn / drawn.sum(0)


@pytest.mark.parametrize(("length", "data"), [(4, 1), (2, 1), (1, 1), (2, 2), (1, 2)])
def test_scores_are_of_each_expert_where_it_lives(length, data):
    params, tokens = make_params(), make_tokens()
    mesh = make_mesh(REGIONS, data, devices=jax.devices()[: length * data])
    assert mesh.shape["region"] == length
    placed = jax.device_put(params, regional(mesh))
    scores = experts.make_score(logits_fn, mesh, REGIONS)(placed, tokens)
    logits = numpy_logits(params, tokens)
    assert scores.experts.shape == (REGIONS, BATCHES, BATCH, LENGTH)
    assert scores.experts.is_fully_replicated
    # Float32 logits of some ten terms.
    for found, x in ((scores.experts, logits), (scores.mean_logits, logits.mean(0))):
        expected = numpy_chosen(numpy_log_softmax(x), tokens)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_scores_gather_a_number_a_token_and_sum_the_logits():
    mesh = make_mesh(REGIONS)
    score = experts.make_score(logits_fn, mesh, REGIONS)
    text = str(jax.make_jaxpr(score)(make_params(), make_tokens()))
    assert text.count("psum") == 1
    assert "all_gather" not in text


def test_mixture_is_the_log_of_the_mean_probability():
    """And a route is even within the prefix."""
    log_probs = random_log_probs(0, REGIONS, 3, LENGTH)
    weights = random_weights(1, REGIONS, 3)
    probs, mixture = np.exp(log_probs), jax.jit(experts.mixture)
    even, weighted = probs.mean(0), (weights[..., None] * probs).sum(0)
    routed = np.concatenate([even[:, :2], weighted[:, 2:]], axis=-1)
    for found, expected in (
        (mixture(log_probs), even),
        (mixture(log_probs, np.log(weights)), weighted),
        (experts.routed(log_probs, np.log(weights), 2), routed),
    ):
        np.testing.assert_allclose(found, np.log(expected), rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_posterior_is_bayes_rule(temperature):
    prefix = random_log_probs(4, REGIONS, 2, 3, 5)
    found = jax.jit(experts.posterior, static_argnums=1)(prefix, temperature)
    likelihood = np.exp(prefix).prod(-1) ** (1 / temperature)
    np.testing.assert_allclose(np.exp(found), likelihood / likelihood.sum(0), rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_best_weights_are_kept_and_sum_to_one(top_k):
    weights = random_weights(5, REGIONS, 6)
    keep = jax.jit(experts.keep_top, static_argnums=1)
    found = np.exp(keep(np.log(weights), top_k))
    least = np.sort(weights, axis=0)[-top_k]
    kept = np.where(weights >= least, weights, 0)
    np.testing.assert_allclose(found, kept / kept.sum(0), rtol=1e-5)


def test_ties_keep_as_many_as_were_asked_for():
    found = experts.keep_top(jnp.log(jnp.full((4, 1), 0.25)), 2)
    np.testing.assert_allclose(np.exp(found)[:, 0], [0.5, 0.5, 0, 0])


def test_passes_per_token():
    # 8 of 32 tokens by all four experts, 24 by two of them.
    assert experts.passes_per_token(4, 2, 8, 32) == 2.5
    assert experts.passes_per_token(4, 4, 8, 32) == 4


def test_numbers_that_cannot_be():
    for top_k in (0, 5):
        with pytest.raises(ValueError, match=f"top_k={top_k} must be from 1 to .* 4"):
            experts.keep_top(jnp.zeros((4, 2)), top_k)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature=.* must be positive"):
            experts.posterior(jnp.zeros((4, 2, 3)), temperature)
