r"""`snoo` (arXiv 2510.15830): the outer Nesterov step with one region.

One region, M = 1. Every H steps the outer parameters, or slow weights, step towards the
fast ones:

$$
\begin{align*}
\theta &\leftarrow \mathrm{inner}(\theta, g) \qquad \text{H times} \\
\Delta &= \theta^g - \theta \\
v &\leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v) \\
\theta &\leftarrow \theta^g
\end{align*}
$$

It is `diloco` without a mean: what is left of DiLoCo with one region. Nothing is sent,
so `compress` has no meaning. With mu = 0 it is Lookahead with step eta.

Source: SNOO, arXiv 2510.15830, that it is outer Nesterov on one worker's
pseudo-gradients; from a summary. Derived here: equal to `diloco` with M = 1.
Differs from the paper: nothing known; numbers were not checked.
Defaults: published ones unchecked; here H 20 and DiLoCo's eta 0.7, mu 0.9.
Measured here: nothing yet; it takes one region and is left out of the comparison of all
methods in four.
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import Method


def snoo(
    sync_interval: int = 20, outer_lr: float = 0.7, outer_momentum: float = 0.9
) -> Method:
    """Build SNOO (arXiv 2510.15830): the outer Nesterov step with one region.

    Args:
      sync_interval: H, inner steps between outer ones.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    method = diloco(sync_interval, outer_lr, outer_momentum)
    return dataclasses.replace(method, name="snoo", num_regions=1)
