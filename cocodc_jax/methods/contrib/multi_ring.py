r"""`multi_ring` (arXiv 2401.01728): plain averaging, by several rings at once.

Every H steps, blocking, the full model. In each region m (in the source, a cluster of
equal peers):

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
\theta^g &\leftarrow \theta^g - \eta \, \frac{1}{M} \sum_m (\theta^g - \theta^m) \\
\theta^m &\leftarrow \theta^g
\end{align*}
$$

With eta = 1 that is the mean of the parameters. *How* the sum is made is the method
(`sync.summed.ByRings`): each of `num_rings` rings carries its share of the numbers.
Ring j goes from place i to place $i + s_j \bmod M$. The strides $s_j$ have no factor in
common with M, so each ring visits all regions, and different rings use different links.
A chunk passes around twice, once to be summed and once to be distributed, so a region
sends $2 (M - 1) / M$ of the model. Partial sums cannot be encoded while they cross, so
`compress` has no meaning.

Source: Ravnest, Menon et al., arXiv 2401.01728; from memory. The orders are ours.
Differs from the paper: its clusters, and the assignment of peers to them, are left out;
inside a region everything is synchronous.
Defaults: published ones unchecked; here H 30, two rings, eta 1.
Measured here: docs/results/methods.md; in so short a run plain averaging is enough.
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import ByRings, Method


def multi_ring(
    sync_interval: int = 30, num_rings: int = 2, outer_lr: float = 1.0
) -> Method:
    """Average regions, clusters of Ravnest (arXiv 2401.01728), by several rings.

    Args:
      sync_interval: H, inner steps between syncs.
      num_rings: rings that the regions average over at once, at least 1.
      outer_lr: eta, learning rate of the outer step.
    """
    method = diloco(sync_interval, outer_lr, outer_momentum=0.0)
    message = ByRings(num_rings)
    return dataclasses.replace(method.with_sync(message=message), name="multi_ring")
