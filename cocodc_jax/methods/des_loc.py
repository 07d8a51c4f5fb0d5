r"""`des_loc` (arXiv 2505.22549): Adam's moments averaged too, each at its own rhythm.

Every H steps, blocking, the full model. Region m trains with Adam, whose first and
second moments are $u^m$ and $s^m$, and the parameters are averaged:

$$
\begin{align*}
\theta^m, u^m, s^m &\leftarrow \mathrm{AdamW}(\theta^m, u^m, s^m, g^m)
\qquad \text{H times} \\
\Delta &= \frac{1}{M} \sum_m (\theta^g - \theta^m) \\
v &\leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v), \qquad
\theta^m \leftarrow \theta^g
\end{align*}
$$

The moments are averaged more rarely, at every third and every sixth sync:

$$
u^m \leftarrow \frac{1}{M} \sum_n u^n \;\; \text{(every 3rd)}, \qquad
s^m \leftarrow \frac{1}{M} \sum_n s^n \;\; \text{(every 6th)}
$$

With eta 1 and mu 0, the defaults, this is the plain mean. Parameters, first and second
moments have different half-lives, and slowly changing values need not be sent often. On
average a sync carries 1 + 1/3 + 1/6 = 1.5 times the parameters. Averaging all of them
every time (Local Adam) carries 3 times. Moments are sent in at least float32, whatever
`compress` does to the parameters. Adam's count is not sent, nor is the state of other
optimizers (of Muon's tree, only Adam's part is).

Source: DES-LOC, Iacob, Sani, Safaryan et al., arXiv 2505.22549; rules and the factors
of 3 and 6 from published digests.
Derived here: `sync_moments=0,0` is `diloco` with eta 1 and mu 0; with the same data
everywhere it is one region's AdamW.
Differs from the paper: nothing known.
Defaults: published H 32 to 256, K_u 3 H, K_v 6 H; here H 30 and the same factors.
Measured here: docs/results/methods.md; docs/results/archive/methods.md (smoke).
"""

import dataclasses

from cocodc_jax.methods.diloco import diloco
from cocodc_jax.sync import Method, Moments


def des_loc(
    sync_interval: int = 30,
    sync_moments: str = "3,6",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> Method:
    """Build DES-LOC (arXiv 2505.22549): moments averaged more rarely than parameters.

    Args:
      sync_interval: H, inner steps between syncs of the parameters.
      sync_moments: every so many syncs the inner optimizer's first moments are averaged
        too, and every so many the second, as 3,6; 0 is never.
      outer_lr: eta, learning rate of the outer step; 1 is the mean.
      outer_momentum: mu, its Nesterov momentum, in [0, 1).
    """
    method = diloco(sync_interval, outer_lr, outer_momentum)
    method = method.with_sync(moments=Moments.parse(sync_moments))
    return dataclasses.replace(method, name="des_loc")
