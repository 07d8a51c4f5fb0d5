r"""`sparseloco` (arXiv 2508.15706): 2-bit values of the top of each chunk, fed back.

Every H steps, blocking, the full model. In each region m, with error feedback $e^m$
from zero, the k largest of each 64 x 64 chunk are sent, 2 bits a value:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
e^m &\leftarrow \beta e^m + \theta^g - \theta^m \\
q^m &= \mathrm{stat2}(\mathrm{top}_k(e^m)), \qquad e^m \leftarrow e^m - q^m
\end{align*}
$$

Each entry j is averaged over the regions $S_j$ that sent it, 0 if none did. The outer
step has no momentum, as the error feedback is one:

$$
q_j = \frac{1}{|S_j|} \sum_{m \in S_j} q^m_j, \qquad
\theta^g \leftarrow \theta^g - \eta \, q, \qquad
\theta^m \leftarrow \theta^g
$$

stat2 (`transforms.statistical`) encodes around the mean of a tensor's sent values, and
decodes to the means of its bins. A chunk of fewer than 4096 entries, as of a vector,
sends its share of k (ours; the authors send k of it, or all).

With `sparse_mean="all"` $q = \frac{1}{M} \sum_m q^m$, as a digest of the paper writes
it: an entry that one of four regions sent moves a quarter as far. With `clip`, as
deployed, $q^m$ of each tensor is first multiplied by $\min(1, \mathrm{median}_n \lVert
q^n \rVert / \lVert q^m \rVert)$. A region that takes no part in a sync counts in
neither mean.

Source: SparseLoCo, arXiv 2508.15706; update, code and mean read from public code of the
authors' deployment.
Differs from the paper's code: k of smaller chunks, and chunks at a tensor's far edges
are padded with zeros, where the authors take smaller ones that divide it.
Defaults: published beta 0.95, k 128 (a sweep; 64 in a later deployment, with eta 0.4),
eta 1.0, H 15 to 30; here beta 0.95, k 128, eta 1.0, H 15.
Measured here: docs/results/methods.md; with even 2-bit levels, k 32 and a mean over all
in docs/results/archive/methods.md.
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import Compressed, Method
from cocodc_jax.sync.messages import MeanOver
from cocodc_jax.transforms import compression


def sparseloco(
    sync_interval: int = 15,
    outer_lr: float = 1.0,
    sparse_mean: MeanOver = "senders",
    compress: str = "ef:0.95+chunked:128+stat2",
    clip: bool = False,
) -> Method:
    """Build SparseLoCo (arXiv 2508.15706): 2-bit values of the top of each chunk.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: eta, learning rate of the outer step.
      sparse_mean: whom an entry is averaged over: senders, the regions that sent it, or
        all, where the others count as zero.
      compress: the compressor with its error feedback.
      clip: whether each tensor of a region's message is cut to the median norm of that
        tensor in all messages, as in the authors' deployment.
    """
    method = diloco(sync_interval, outer_lr, outer_momentum=0.0)
    message = Compressed(compression.parse(compress), sparse_mean, clip)
    return dataclasses.replace(method.with_sync(message=message), name="sparseloco")
