"""Regional outer optimizers: noisy pairs, decoupled momentum, eager updates.

Written for one region's fragment; `params` are its outer parameters, `local` its own,
and pseudo-gradients are old minus new, `params - local`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.transforms.error_feedback import ErrorFeedbackState, error_feedback
from cocodc_jax.transforms.numerics import check_unit_interval
from cocodc_jax.transforms.outer import group_heavy_ball

PyTree = Any


class PairState(NamedTuple):
    """State of `noisy_pairs`: of `group_heavy_ball`, and of the compressor."""

    optimizer: PyTree
    compressor: PyTree


def noisy_pairs(
    learning_rate: float, momentum: float, pull: float, seed: int
) -> RegionalOuter:
    """NoLoCo's outer step: a pair's mean in place of everyone's.

    Each of the two sends its slow weights phi and its pseudo-gradient g = phi - theta:

        v <- mu v + beta mean_pair(g) + gamma (phi - mean_pair(phi));   phi <- phi - v

    Source: NoLoCo, arXiv 2506.10911; algorithms.md section 8.

    Args:
      learning_rate: beta.
      momentum: mu, in [0, 1).
      pull: gamma, how strongly the two are drawn together.
      seed: of the pairs.
    """
    optimizer = group_heavy_ball(learning_rate, momentum, pull)

    def payload(params, local):
        return {"params": params, "pseudo_gradient": _difference(params, local)}

    def init(params, compressor):
        return PairState(
            optimizer.init(params), compressor.init(payload(params, params))
        )

    def send(params, state, local, compressor, key):
        message, kept = compressor.encode(payload(params, local), state.compressor, key)
        return message, state._replace(compressor=kept)

    def receive(params, state, arrived, num_regions):
        del num_regions
        step, kept = optimizer.update(
            arrived["pseudo_gradient"],
            state.optimizer,
            params,
            group_mean_params=arrived["params"],
        )
        return optax.apply_updates(params, step), state._replace(optimizer=kept)

    return RegionalOuter("noisy_pairs", init, send, receive, "pairs", seed)


class DecoupledState(NamedTuple):
    """State of `decoupled_momentum`.

    Attributes:
      feedback: residual (the momentum less what was sent) and the compressor's state.
      pseudo_gradient: of the message that is on its way.
    """

    feedback: ErrorFeedbackState
    pseudo_gradient: PyTree


def decoupled_momentum(learning_rate: float, momentum: float) -> RegionalOuter:
    """DiLoCo with decoupled momentum: only what stands out of the momentum is shared.

        g = theta_old - theta;   d <- beta d + g;   q = C(d);   r = d - q
        Q = mean q;   d <- r + Q;   theta <- theta_old - eta (g + beta d)

    Regions are never made equal.

    Source: arXiv 2510.03371; algorithms.md section 9.

    Args:
      learning_rate: eta.
      momentum: beta, in [0, 1).
    """
    check_unit_interval("outer_momentum", momentum)

    def feedback(compressor):
        return error_feedback(compressor, decay=momentum)

    def init(params, compressor):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DecoupledState(feedback(compressor).init(params), zeros)

    def send(params, state, local, compressor, key):
        gradient = _difference(params, local)
        message, kept = feedback(compressor).encode(gradient, state.feedback, key)
        return message, DecoupledState(kept, gradient)

    def receive(params, state, arrived, num_regions):
        del num_regions
        d = jax.tree.map(jnp.add, state.feedback.residual, arrived)
        params = jax.tree.map(
            lambda x, g, m: x - learning_rate * (g + momentum * m),
            params,
            state.pseudo_gradient,
            d,
        )
        return params, state._replace(feedback=state.feedback._replace(residual=d))

    return RegionalOuter("decoupled_momentum", init, send, receive)


class EagerState(NamedTuple):
    """State of `eager`.

    Attributes:
      optimizer: of the outer Nesterov.
      compressor: the compressor's.
      newest: the region's own share of the mean that is on its way, decoded.
      arriving: its own share of the mean before that.
    """

    optimizer: PyTree
    compressor: PyTree
    newest: PyTree
    arriving: PyTree


def eager(optimizer: optax.GradientTransformation) -> RegionalOuter:
    """One round late, but with the region's own share of the mean up to date.

        Delta~_m(t) = Delta(t - 1) + (Delta_m(t) - Delta_m(t - 1)) / M

    is given to the outer optimizer. Between two rounds the regions differ by what
    they alone know.

    Source: eager updates, arXiv 2502.12996 (from memory); algorithms.md section 10.

    Args:
      optimizer: the outer optimizer.
    """

    def init(params, compressor):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return EagerState(optimizer.init(params), compressor.init(params), zeros, zeros)

    def send(params, state, local, compressor, key):
        message, kept = compressor.encode(
            _difference(params, local), state.compressor, key
        )
        own = compressor.decode(message)
        return message, EagerState(state.optimizer, kept, own, state.newest)

    def receive(params, state, arrived, num_regions):
        fresh = jax.tree.map(
            lambda mean, new, old: mean + (new - old) / num_regions,
            arrived,
            state.newest,
            state.arriving,
        )
        step, kept = optimizer.update(fresh, state.optimizer, params)
        return optax.apply_updates(params, step), state._replace(optimizer=kept)

    return RegionalOuter("eager", init, send, receive)


def _difference(params: PyTree, local: PyTree) -> PyTree:
    """The pseudo-gradient, old minus new, in the outer dtype."""
    return jax.tree.map(lambda o, x: o - x.astype(o.dtype), params, local)
