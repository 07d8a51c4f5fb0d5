r"""`eager` (arXiv 2502.12996): one round late, but for a region's own part of the mean.

The mean of round t - 1 crosses during round t. Every region m has outer parameters
$\theta^{g,m}$ and a momentum of its own (`RegionalOuter`), as each corrects the mean by
its own newest progress:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
\Delta^m_t &= \theta^{g,m} - \theta^m \qquad \text{sent now} \\
\tilde\Delta^m &= \Delta_{t-1} + \frac{1}{M} \, (\Delta^m_t - \Delta^m_{t-1}), \qquad
\Delta_{t-1} = \frac{1}{M} \sum_n \Delta^n_{t-1} \\
v^m &\leftarrow \mu v^m + \tilde\Delta^m \\
\theta^{g,m} &\leftarrow \theta^{g,m} - \eta \, (\tilde\Delta^m + \mu v^m), \qquad
\theta^m \leftarrow \theta^{g,m}
\end{align*}
$$

The region replaces its own stale share of the mean by its fresh one. The message of the
round before the first is zero. A region's share is its decoded message (`newest`,
`arriving`), so with `compress` it adds only what was sent.

Source: eager updates, arXiv 2502.12996. "Current local plus a delayed mixture of all
others" from a published digest, which this is; written out from memory.
Differs from the paper: unknown; its defaults were not found.
Defaults: published unknown; here H 30, eta 0.4, mu 0.5, ours. With Nesterov's 0.7 and
0.9 one round late a quadratic diverges.
Measured here: docs/results/methods.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.sync import Method, RegionalOuter, Sync, merge, schedules
from cocodc_jax.sync.outer import PyTree, nesterov_sgd, pseudo_gradient
from cocodc_jax.transforms.compressor import Compressor, zeroed
from cocodc_jax.transforms.numerics import is_finite


def eager(
    sync_interval: int = 30, outer_lr: float = 0.4, outer_momentum: float = 0.5
) -> Method:
    """Build eager updates (arXiv 2502.12996, from memory): late but for one's own.

    Args:
      sync_interval: H, inner steps of a round.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    sync = Sync(
        schedule=schedules.one_step_stale(sync_interval),
        outer=eager_outer(nesterov_sgd(outer_lr, outer_momentum)),
        merge=merge.replace(),
    )
    return Method(name="eager", sync=sync)


class EagerState(NamedTuple):
    """State of `eager_outer`."""

    optimizer: PyTree
    compressor: PyTree
    newest: PyTree  # The region's own share of the mean on its way, decoded.
    arriving: PyTree  # Its own share of the mean before that.


def eager_outer(optimizer: optax.GradientTransformation) -> RegionalOuter:
    """Step one round late, with the region's own share of the mean up to date."""

    def init(params: PyTree, compressor: Compressor) -> EagerState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return EagerState(optimizer.init(params), compressor.init(params), zeros, zeros)

    def send(
        params: PyTree,
        state: EagerState,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
    ) -> tuple[PyTree, EagerState]:
        message, memory = compressor.encode(
            pseudo_gradient(params, local), state.compressor, key
        )
        # A message that is not finite is in no mean, so the region has no share.
        share = zeroed(compressor.decode(message), is_finite(message))
        return message, EagerState(state.optimizer, memory, share, state.newest)

    def receive(
        params: PyTree, state: EagerState, arrived: PyTree, num_regions: int
    ) -> tuple[PyTree, EagerState]:
        def corrected(mean: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
            return mean + (new - old) / num_regions

        fresh = jax.tree.map(corrected, arrived, state.newest, state.arriving)
        step, optimizer_state = optimizer.update(fresh, state.optimizer, params)
        new_params = optax.apply_updates(params, step)
        return new_params, state._replace(optimizer=optimizer_state)

    def land(state: EagerState) -> EagerState:
        nothing = jax.tree.map(jnp.zeros_like, state.newest)
        return state._replace(newest=nothing, arriving=state.newest)

    return RegionalOuter("eager", init, send, receive, land=land)
