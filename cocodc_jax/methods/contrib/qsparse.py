r"""`qsparse` (arXiv 1906.02367): the mean of sparse, quantized progress, with memory.

Every H steps, blocking, the full model. In each region m, with error feedback $e^m$
from zero, the message is first made sparse, then quantized by C:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
a^m &= e^m + \theta^g - \theta^m \\
q^m &= C(\mathrm{top}_k(a^m)), \qquad e^m \leftarrow a^m - q^m \\
\theta^g &\leftarrow \theta^g - \eta \, \frac{1}{M} \sum_m q^m, \qquad
\theta^m \leftarrow \theta^g
\end{align*}
$$

The memory holds what either of the two lost. With eta = 1 and no compression this is
local SGD (federated averaging), and `multi_ring` up to rounding.

Source: Qsparse-local-SGD, Basu et al., arXiv 1906.02367: the order of the two and the
error feedback are the paper's; numbers are from memory.
Differs from the paper: its inner optimizer is SGD (`--inner_optimizer=sgd`); its C is
stochastic and unbiased (QSGD) or a sign, here the nearest of 15 levels
(`error_feedback(top_k(0.1, int4(stochastic=True)))` and `ef+topk:0.1+sign` are those);
its regions may sync at different times, here all at once.
Defaults: published ones unchecked; here H 30, eta 1, `ef+topk:0.1+int4`.
Measured here: docs/results/methods.md.
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import Compressed, Method
from cocodc_jax.transforms import compression


def qsparse(
    sync_interval: int = 30, outer_lr: float = 1.0, compress: str = "ef+topk:0.1+int4"
) -> Method:
    """Build Qsparse-local-SGD (arXiv 1906.02367): sparsify, then quantize, and average.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: eta, learning rate of the outer step; 1 is the plain average.
      compress: the compressor with its error feedback.
    """
    method = diloco(sync_interval, outer_lr, outer_momentum=0.0)
    message = Compressed(compression.parse(compress))
    return dataclasses.replace(method.with_sync(message=message), name="qsparse")
