r"""`diloco_demo` (arXiv 2510.03371): DiLoCo that shares the top of its momentum only.

Every H steps, blocking. Each region m has outer parameters $\theta^{g,m}$ and a
momentum $e^m$ of its own (`RegionalOuter`), which are never made equal. It sends the k
largest coefficients of each 64 x 64 chunk of the momentum's cosine transform:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
\Delta^m &= \theta^{g,m} - \theta^m \\
e^m &\leftarrow \beta e^m + \Delta^m \\
q^m &= \mathrm{top}_k(\mathrm{DCT}(e^m))
\end{align*}
$$

The mean over all M regions takes the place of what the region sent:

$$
\begin{align*}
e^m &\leftarrow e^m - \mathrm{IDCT}(q^m)
+ \mathrm{IDCT}\left(\frac{1}{M} \sum_n q^n\right) \\
\theta^{g,m} &\leftarrow \theta^{g,m} - \eta \, (\Delta^m + \beta e^m) \\
\theta^m &\leftarrow \theta^{g,m}
\end{align*}
$$

Source: DiLoCo with decoupled momentum, arXiv 2510.03371; read from the authors' code.
Differs from the paper's code: there each coefficient is averaged over those who sent
it. The mean over all M, as in the formula, is kept on purpose: over senders, a
coefficient that one region sends returns in full to all M and is in every region's top
in the next round. With random input of length 64, M = 4 and beta 0.95, the momentum's
length is 4e12 after 60 rounds, and 178 over all M (with M = 2 243 and 190), by
tests/methods/test_regional.py.
Defaults: published beta 0.95, k 32, chunk 64, H 128 to 500, eta 0.7 to 0.8; here beta
0.9 (not tuned here), k 32, H 128, eta 0.7.
Measured here: docs/results/methods.md. It was made for thousands of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.sync import Compressed, Method, RegionalOuter, Sync, merge, schedules
from cocodc_jax.sync.outer import PyTree, pseudo_gradient
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import Compressor, zeroed
from cocodc_jax.transforms.error_feedback import ErrorFeedbackState, error_feedback
from cocodc_jax.transforms.numerics import check_outer, is_finite


def diloco_demo(
    sync_interval: int = 128,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str = "dct:32",
) -> Method:
    """Build DiLoCo with decoupled momentum (arXiv 2510.03371).

    Args:
      sync_interval: H, inner steps between syncs, 128 to 500.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: beta, decay of the momentum, 0.9 or 0.95.
      compress: what is taken out of the momentum; without error feedback of its own.
    """
    sync = Sync(
        schedule=schedules.staggered(sync_interval),
        outer=decoupled_momentum(outer_lr, outer_momentum),
        merge=merge.replace(),
        message=Compressed(compression.parse(compress)),
    )
    return Method(name="diloco_demo", sync=sync)


class DecoupledState(NamedTuple):
    """State of `decoupled_momentum`."""

    feedback: ErrorFeedbackState  # Its residual is the momentum less what was sent.
    pseudo_gradient: PyTree  # Of the message that is on its way.


def decoupled_momentum(learning_rate: float, momentum: float) -> RegionalOuter:
    """Share only what stands out of the momentum; regions are never made equal."""
    check_outer(learning_rate, momentum)

    def feedback(compressor: Compressor) -> Compressor:
        return error_feedback(compressor, decay=momentum)

    def init(params: PyTree, compressor: Compressor) -> DecoupledState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DecoupledState(feedback(compressor).init(params), zeros)

    def send(
        params: PyTree,
        state: DecoupledState,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
    ) -> tuple[PyTree, DecoupledState]:
        gradient = pseudo_gradient(params, local)
        message, memory = feedback(compressor).encode(gradient, state.feedback, key)
        # Of a pseudo-gradient that is not finite nothing is sent, nor applied.
        gradient = zeroed(gradient, is_finite(message))
        return message, DecoupledState(memory, gradient)

    def receive(
        params: PyTree, state: DecoupledState, arrived: PyTree, num_regions: int
    ) -> tuple[PyTree, DecoupledState]:
        d = jax.tree.map(jnp.add, state.feedback.residual, arrived)
        step = lambda x, g, m: x - learning_rate * (g + momentum * m)  # noqa: E731
        params = jax.tree.map(step, params, state.pseudo_gradient, d)
        return params, state._replace(feedback=state.feedback._replace(residual=d))

    return RegionalOuter("decoupled_momentum", init, send, receive, has_feedback=True)
