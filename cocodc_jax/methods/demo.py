r"""`demo` (arXiv 2411.19870): the top of the momentum's cosine transform, every step.

At every inner step each region m adds its gradient to a momentum $e^m$, from zero, and
sends the k largest coefficients of each 64 x 64 chunk's cosine transform. What is sent
is taken out of the momentum:

$$
\begin{align*}
e^m &\leftarrow \beta e^m + g^m \\
q^m &= \mathrm{top}_k(\mathrm{DCT}(e^m)) \\
e^m &\leftarrow e^m - \mathrm{IDCT}(q^m)
\end{align*}
$$

Every coefficient j is averaged over the regions $S_j$ that sent it, and all regions
step by the sign of the result, with weight decay w:

$$
\begin{align*}
q_j &= \frac{1}{|S_j|} \sum_{m \in S_j} q^m_j \\
\theta &\leftarrow \theta - \gamma \, (\mathrm{sign}(\mathrm{IDCT}(q)) + w \, \theta)
\end{align*}
$$

Parameters stay equal in all regions, momenta do not. The sign has no length, so the
learning rate is not AdamW's but `sign_lr_fraction` of it. A mean over senders is safe
here, as only its sign is used. Messages that do not show which values they contain are
averaged over all regions.

Source: DeMo, Peng et al., arXiv 2411.19870; read from the authors' code.
Differs from the paper: there the momentum adds the gradient times the learning rate,
which is left out here: it matters only while it changes, as the step is a sign.
Defaults: published beta 0.999, chunk 64, k 32 of 4096; here the same.
Measured here: docs/results/methods.md. It was made for thousands of steps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync import Inner, Method, PerStep
from cocodc_jax.sync.messages import mean_of_decoded
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.decoupled import average_duplicates
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.numerics import check_unit_interval
from cocodc_jax.transforms.sparsify import SparseCompressor

PyTree = Any


def demo(momentum_decay: float = 0.999, compress: str = "dct:32") -> Method:
    """Build DeMo (arXiv 2411.19870): share the top of the momentum at every step.

    Args:
      momentum_decay: decay beta of the momentum that is taken from, in [0, 1).
      compress: what is taken out of the momentum; without error feedback of its own.
    """
    return Method(
        name="demo",
        per_step=decoupled_momentum(momentum_decay, compression.parse(compress)),
        inner=Inner("sgd", steps_by_sign=True),
    )


def decoupled_momentum(decay: float, compressor: Compressor) -> PerStep:
    """Build e <- beta e + g; q = C(e); e <- e - q; the sign of the mean of all q."""
    check_unit_interval("momentum_decay", decay)
    with_memory = error_feedback(compressor, decay)
    has_positions = isinstance(compressor, SparseCompressor)
    combine = average_duplicates if has_positions else mean_of_decoded

    def sign_of_mean(messages: PyTree) -> PyTree:
        return jax.tree.map(jnp.sign, combine(messages, with_memory))

    return PerStep(
        name="decoupled_momentum",
        init=with_memory.init,
        send=with_memory.encode,
        receive=sign_of_mean,
        compressed_by=lambda other: decoupled_momentum(decay, other),
    )
