r"""`lt_admm` (arXiv 2501.13516, arXiv 2508.15509): local training in ADMM, no server.

Regions form a graph, a ring or the complete one. To minimize the sum of the regions'
losses subject to equal parameters along its edges, ADMM with a penalty r (the papers'
rho) keeps a vector $z^{mn}$ on either side of each edge. Let $N_m$ be the $n_m$
neighbors of region m. Every H steps, blocking, with C the compressor:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}\Big(\theta^m, \; g^m + r \, n_m \theta^m
- \sum_{n \in N_m} z^{mn}\Big) \qquad \text{H times} \\
q^m &= C(\theta^m - h^m), \qquad h^m \leftarrow h^m + q^m \\
z^{mn} &\leftarrow \tfrac{1}{2} \, (z^{mn} - z^{nm} + 2 r h^n)
\end{align*}
$$

$h^m$, the outer parameters here, is what all neighbors know of $\theta^m$. What C
leaves out stays in $\theta^m - h^m$ and is sent later. This is error feedback in
difference form, so the compressor needs none. Uncompressed, $h^m = \theta^m$: LT-ADMM.

**What is kept.** Region m can compute the $z^{nm}$ of its edges itself, so only $q^m$
travels, and only sums over neighbors enter. With $\bar h^m$ the mean of the neighbors'
$h^n$ and $l^m = \frac{1}{2} \sum_n (z^{mn} - z^{nm})$ the lines above are, exactly,

$$
\begin{align*}
g^m &\leftarrow g^m + r \, n_m \big(\theta^m - \tfrac{1}{2} (h^m + \bar h^m)\big) - l^m
\qquad \text{every step} \\
l^m &\leftarrow l^m + \tfrac{1}{2} \, r \, n_m (\bar h^m - h^m)
\end{align*}
$$

a spring to the middle between a region and its neighbors, and a dual variable that sums
to zero over the regions, whatever C does. The dual starts at 0, with
$z^{mn} = r \theta$.

**The sign of** $2 r h^n$. At a fixed point $z^{mn} + z^{nm} = 2 r h^n$ for both ends of
an edge, so all h are equal, and the gradients sum to zero over the regions. With a
minus, as the line is sometimes written, regions are driven away from that point; a test
shows both.

Source: Ren, Bastianello, Johansson, Parisini: LT-ADMM, arXiv 2501.13516; LT-ADMM-CC,
arXiv 2508.15509, whose compressed messages are from memory. Sign and first z are those
of a public implementation of LT-ADMM (not the authors'); the sums are derived here.
Differs from the paper: there the inner step is SGD; here it is the run's inner
optimizer. AdamW gets the corrected gradient as its gradient (clipped together), so the
fixed point is the same, but each number has another step length. There, parameters and
z are both sent compressed; here z is not sent. No variance reduction.
Defaults: published ones are of small convex problems; here H 30, r 0.01, ring, int8.
Measured here: docs/results/methods.md; several r in docs/results/archive/methods.md.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.sync import Compressed, Method, RegionalOuter, Sync, merge, schedules
from cocodc_jax.sync.outer import PyTree, pseudo_gradient
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import Compressor, zeroed
from cocodc_jax.transforms.numerics import check_choice, check_rate, is_finite

# The group of `RegionalOuter` for each graph.
GRAPHS = {"ring": "ring", "complete": "all"}


def lt_admm(
    sync_interval: int = 30,
    admm_penalty: float = 0.01,
    graph: Literal["ring", "complete"] = "ring",
    compress: str = "int8",
) -> Method:
    """Build LT-ADMM-CC (arXiv 2508.15509): local training inside ADMM, no server.

    Args:
      sync_interval: H, inner steps between exchanges.
      admm_penalty: r, how stiffly neighbors are tied together, in units of a
        gradient per parameter.
      graph: which regions are neighbors: ring, or complete for all.
      compress: how the change since the last message is sent; without error
        feedback, which the method has.
    """
    sync = Sync(
        schedule=schedules.staggered(sync_interval),
        outer=admm(admm_penalty, graph),
        merge=merge.keep(),
        message=Compressed(compression.parse(compress)),
    )
    return Method(name="lt_admm", sync=sync)


class AdmmState(NamedTuple):
    """State of `admm`, of one region's fragment."""

    compressor: PyTree
    told: PyTree  # q, what the message in flight decodes to.
    neighbours: PyTree  # Mean of the neighbors' h.
    dual: PyTree  # l, half the sum over the edges of the difference of both z.


def admm(penalty: float, graph: str) -> RegionalOuter:
    """Tie regions to their neighbours by ADMM; outer parameters are what was sent."""
    check_rate("admm_penalty", penalty)
    check_choice("graph", graph, tuple(GRAPHS))

    def degree(num_regions: int) -> int:
        return num_regions - 1 if graph == "complete" else min(num_regions - 1, 2)

    def init(params: PyTree, compressor: Compressor) -> AdmmState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdmmState(compressor.init(params), zeros, params, zeros)

    def send(
        params: PyTree,
        state: AdmmState,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
    ) -> tuple[PyTree, AdmmState]:
        change = jax.tree.map(jnp.negative, pseudo_gradient(params, local))

        # Neighbors add up the changes that they receive. If a change is not finite, the
        # region sends none, so that their sum stays equal to its own.
        finite = is_finite(change)
        message, new_memory = compressor.encode(
            zeroed(change, finite), state.compressor, key
        )
        memory = jax.tree.map(
            lambda x, old: jnp.where(finite, x, old), new_memory, state.compressor
        )
        decoded = compressor.decode(message)
        return message, state._replace(compressor=memory, told=decoded)

    def receive(
        params: PyTree, state: AdmmState, arrived: PyTree, num_regions: int
    ) -> tuple[PyTree, AdmmState]:
        def without_own(mean, sent):
            return (num_regions * mean - sent) / (num_regions - 1)

        if graph == "complete" and num_regions > 1:  # The mean is of all regions.
            arrived = jax.tree.map(without_own, arrived, state.told)

        params = jax.tree.map(jnp.add, params, state.told)
        neighbours = jax.tree.map(jnp.add, state.neighbours, arrived)
        rate = penalty * degree(num_regions) / 2
        dual = jax.tree.map(
            lambda dual, m, h: dual + rate * (m - h), state.dual, neighbours, params
        )
        return params, state._replace(neighbours=neighbours, dual=dual)

    def correct(
        gradient: PyTree,
        local: PyTree,
        params: PyTree,
        state: AdmmState,
        num_regions: int,
    ) -> PyTree:
        stiffness = penalty * degree(num_regions)

        def bend(g, x, h, m, dual):
            return g + stiffness * (x - (h + m) / 2) - dual

        return jax.tree.map(bend, gradient, local, params, state.neighbours, state.dual)

    return RegionalOuter(
        name="admm",
        init=init,
        send=send,
        receive=receive,
        group=GRAPHS[graph],
        correct=correct,
        has_feedback=True,
    )
