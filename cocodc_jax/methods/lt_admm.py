"""`lt_admm` (arXiv 2501.13516, 2508.15509): local training inside ADMM, no server.

Regions stand on a graph, a ring or the complete one; N_i are region i's n_i neighbours.
To minimise the sum of all f_i subject to x_i = x_j along its edges, ADMM with a penalty
rho keeps a vector z_ij on either side of each edge. Every H steps, blocking:

    H times:  phi <- phi - gamma (g(phi) + rho n_i phi - sum_j z_ij)     from x_i
    x_i  <- phi                                                    `merge.keep`
    tell the neighbours q_i = C(x_i - h_i);  h_i <- h_i + q_i      `send`, `receive`
    z_ij <- (z_ij - z_ji + 2 rho h_j) / 2

h_i, the outer parameters here, is what all neighbours know of x_i. What C leaves out
stays in x_i - h_i and is sent later: error feedback in difference form, which needs no
residual of its own (another would count twice). Uncompressed, h_i = x_i: LT-ADMM.

**The sign of 2 rho h_j.** At rest z_ij + z_ji = 2 rho h_j for both ends of an edge, so
h_i = h_j = x; summed over regions, sum grad f_i + 2 rho |E| x - sum z = sum grad f_i =
0. With a minus, as the line is sometimes written, a point of rest is another one, sum
grad f_i + 4 rho |E| x = 0, and regions are driven away from it: the test has both.

**What is kept.** z_ji of an edge follows from what i itself knows, so nothing but q_i
travels; and only sums over the neighbours enter. With m_i the mean of their h_j and
l_i = sum_j (z_ij - z_ji) / 2, the lines above are, exactly,

    g <- g + rho n_i (phi - (h_i + m_i) / 2) - l_i            `correct`, every step
    l_i <- l_i + rho n_i (m_i - h_i) / 2                      `receive`

a spring to the middle between a region and its neighbours, and a dual variable that
sums to zero over the regions, whatever C does. It begins with z_ij = rho x, so at rest.

Source: Ren, Bastianello, Johansson, Parisini: LT-ADMM, arXiv 2501.13516; LT-ADMM-CC,
arXiv 2508.15509, whose compressed messages are from memory. Sign and first z are those
of a public implementation of LT-ADMM (not the authors'); the sums are derived here.
Differs from the paper: gamma times is the run's inner optimizer. With SGD it is the
line above. AdamW gets the corrected gradient as its gradient (clipped together), so a
step is zero where it was, but gamma is another for each number. There, x and z are both
sent compressed; here z is not sent. No variance reduction.
Defaults: published ones are of small convex problems; here H 30, rho 0.01, ring, int8.
Measured here: last loss 2.739 with 1.02 MB sent by a region (2.748 at rho 0.002, 2.768
at 0.05, 2.960 at 0.5), DiLoCo 2.724 with 4.00 MB, `apart` 2.767 (the smoke preset, H 8,
160 steps, 4 regions, one seed), by

    python -m experiments.train --preset=smoke --method=lt_admm --steps=160

and --warmup_steps=8 --sync_interval=8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import RegionalOuter, pseudo_gradient
from cocodc_jax.sync.schedules.fixed import staggered
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.numerics import check_rate

PyTree = Any

# Graph to the group of `RegionalOuter` that hears it.
GRAPHS = {"ring": "ring", "complete": "all"}


def lt_admm(
    sync_interval: int = 30,
    admm_penalty: float = 0.01,
    graph: str = "ring",
    compress: str = "int8",
) -> Method:
    """Build LT-ADMM-CC (arXiv 2508.15509): local training inside ADMM, no server.

    Args:
      sync_interval: H, inner steps between exchanges.
      admm_penalty: rho, how stiffly neighbours are tied together, in units of a
        gradient per parameter.
      graph: who are neighbours: ring, or complete for all of them.
      compress: how the change since the last message is sent; without error
        feedback, which the method has.
    """
    return Method(
        name="lt_admm",
        sync=Sync(
            schedule=staggered(sync_interval),
            outer=admm(admm_penalty, graph),
            merge=merge.keep(),
            message=Compressed(compression.parse(compress)),
        ),
    )


class AdmmState(NamedTuple):
    """State of `admm`, of one region's fragment.

    Attributes:
      compressor: the compressor's.
      told: q, what the message on its way decodes to.
      neighbours: m, mean of what the neighbours have sent.
      dual: l, half the sum over the edges of z_ij - z_ji.
    """

    compressor: PyTree
    told: PyTree
    neighbours: PyTree
    dual: PyTree


def admm(penalty: float, graph: str) -> RegionalOuter:
    """Tie regions to their neighbours by ADMM; the outer parameters are what was sent.

    Source: LT-ADMM, arXiv 2501.13516; see above.

    Args:
      penalty: rho, positive.
      graph: a key of `GRAPHS`.

    Raises:
      ValueError: if the penalty is not positive and finite, or no such graph is known.
    """
    check_rate("admm_penalty", penalty)
    if graph not in GRAPHS:
        raise ValueError(f"graph={graph!r} is unknown; use one of {tuple(GRAPHS)}")

    def degree(num_regions: int) -> int:
        return num_regions - 1 if graph == "complete" else min(num_regions - 1, 2)

    def init(params, compressor):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdmmState(compressor.init(params), zeros, params, zeros)

    def send(params, state, local, compressor, key):
        change = jax.tree.map(jnp.negative, pseudo_gradient(params, local))
        message, kept = compressor.encode(change, state.compressor, key)
        told = compressor.decode(message)
        return message, state._replace(compressor=kept, told=told)

    def receive(params, state, arrived, num_regions):
        if graph == "complete" and num_regions > 1:  # Of all, so take out one's own.
            arrived = jax.tree.map(
                lambda mean, own: (num_regions * mean - own) / (num_regions - 1),
                arrived,
                state.told,
            )
        params = jax.tree.map(jnp.add, params, state.told)
        neighbours = jax.tree.map(jnp.add, state.neighbours, arrived)
        rate = penalty * degree(num_regions) / 2
        dual = jax.tree.map(
            lambda dual, m, h: dual + rate * (m - h), state.dual, neighbours, params
        )
        return params, state._replace(neighbours=neighbours, dual=dual)

    def correct(gradient, local, params, state, num_regions):
        stiffness = penalty * degree(num_regions)
        return jax.tree.map(
            lambda g, x, h, m, dual: g + stiffness * (x - (h + m) / 2) - dual,
            gradient,
            local,
            params,
            state.neighbours,
            state.dual,
        )

    return RegionalOuter(
        "admm",
        init,
        send,
        receive,
        group=GRAPHS[graph],
        correct=correct,
        has_feedback=True,
    )
