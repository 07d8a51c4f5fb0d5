"""Ensembles of regions that were trained independently: mixtures, and a router.

With p_r(y | x) an expert's next-token distribution and w_r its weight, sum_r w_r = 1,

    mixture          p(y | x) = sum_r w_r p_r(y | x)
    mean of logits   p(y | x) ~ prod_r p_r(y | x)^(1 / R)

A router chooses w from the first tokens of a sequence, x_1 .. x_P:

    posterior        w_r ~ (prod_{t <= P} p_r(x_t | x_<t))^(1 / temperature)

The first P tokens are themselves predicted with equal weights. So every choice is a
distribution over full sequences, whose loss can be compared with any model's.

Sources, from memory: the posterior of experts is Bayes' rule with a uniform prior, as
in DEMix (Gururangan et al., arXiv 2108.05036). The best k of the weights are as in
c-BTM (Gururangan et al., arXiv 2303.14177).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.engine.mesh import REGION, batch_axes
from cocodc_jax.engine.region_map import (
    LocalRegions,
    PyTree,
    psum_over_regions,
    region_shard_map,
)
from cocodc_jax.transforms.numerics import widen

LogitsFn = Callable[[PyTree, jax.Array], jax.Array]


class Scores(NamedTuple):
    """Log-probabilities of the target tokens, nats, at least float32."""

    experts: jax.Array  # Of each expert alone, `[R, ..., L]`.
    mean_logits: jax.Array  # Of the experts' mean logits, `[..., L]`.


def make_score(
    logits_fn: LogitsFn, mesh: Mesh, num_regions: int
) -> Callable[[PyTree, Any], Scores]:
    """Compile `score(params, tokens) -> Scores`, every expert on its own devices.

    Parameters are `[R, ...]` on the mesh, tokens int32 `[E, B, L + 1]` on the host, B a
    multiple of the data axis; results are replicated. `logits_fn` is of one region,
    int32 `[B, L]` to float `[B, L, V]`. Between regions it sends one number per token
    and expert, and for the mean of the logits a sum of V numbers per token. Only one
    batch's logits exist at a time.
    """
    block = LocalRegions.of(mesh, num_regions)

    def log_softmax(params: PyTree, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(widen(logits_fn(params, tokens)))

    def of_batch(params: PyTree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Tokens must vary over regions like the parameters.
        varying_tokens = jax.lax.pcast(tokens, REGION, to="varying")
        log_probs = block.map(log_softmax, (0, None))(params, varying_tokens[:, :-1])
        experts = jax.vmap(_of_targets, (0, None))(log_probs, varying_tokens[:, 1:])
        # Means of log-probabilities and of logits differ by a constant per token.
        mean = psum_over_regions(log_probs.sum(0)) / num_regions
        return experts, _of_targets(jax.nn.log_softmax(mean), tokens[:, 1:])

    def of_place(params: PyTree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, mean = jax.lax.map(lambda batch: of_batch(params, batch), tokens)
        return jnp.moveaxis(experts, 1, 0), mean

    specs = P(REGION), P()
    mapped = region_shard_map(of_place, mesh, in_specs=specs, out_specs=specs)
    compiled = jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))
    where = NamedSharding(mesh, P(None, batch_axes(mesh)))

    def score(params: PyTree, tokens: Any) -> Scores:
        return Scores(*compiled(params, transfer.put(tokens, where)))

    return score


def mixture(log_probs: jax.Array, log_weights: jax.Array | None = None) -> jax.Array:
    """Log-probabilities of a mixture, log sum_r w_r p_r.

    >>> experts = jnp.log(jnp.array([[0.2, 0.4], [0.6, 0.4]]))  # R = 2, L = 2.
    >>> print(jnp.exp(mixture(experts)).round(6))
    [0.4 0.4]
    """
    if log_weights is None:
        return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(log_probs))
    return jax.nn.logsumexp(log_probs + log_weights[..., None], axis=0)


def routed(
    log_probs: jax.Array, log_weights: jax.Array, prefix_tokens: int
) -> jax.Array:
    """Log-probabilities of a mixture weighted after the prefix, equal within it."""
    before, after = jnp.split(log_probs, (prefix_tokens,), axis=-1)
    parts = (mixture(before), mixture(after, log_weights))
    return jnp.concatenate(parts, axis=-1)


def posterior(prefix_log_probs: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Log-weights by Bayes' rule, from how well each expert predicted the prefix."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive; 1 is Bayes")
    return jax.nn.log_softmax(prefix_log_probs.sum(-1) / temperature, axis=0)


def keep_top(log_weights: jax.Array, top_k: int) -> jax.Array:
    """Keep the largest `top_k` weights of each sequence, renormalized."""
    num_regions = len(log_weights)
    if not 1 <= top_k <= num_regions:
        rule = f"must be from 1 to the number of regions, {num_regions}"
        raise ValueError(f"top_k={top_k} {rule}")
    _, best = jax.lax.top_k(jnp.moveaxis(log_weights, 0, -1), top_k)
    is_kept = jax.nn.one_hot(best, num_regions, axis=0, dtype=bool).any(-1)
    return jax.nn.log_softmax(jnp.where(is_kept, log_weights, -jnp.inf), axis=0)


def passes_per_token(
    num_regions: int, top_k: int, prefix_tokens: int, length: int
) -> float:
    """Forward passes a token of `routed`: all experts read the prefix, k the rest."""
    rest = length - prefix_tokens
    return (num_regions * prefix_tokens + top_k * rest) / length


def _of_targets(log_probs_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Return the log-probability of each target, `[B, L]`."""
    chosen = jnp.take_along_axis(log_probs_BLV, targets_BL[..., None], axis=-1)
    return chosen[..., 0]
