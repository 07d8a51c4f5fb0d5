r"""`mla`: momentum look-ahead; regions that come alone start where the momentum leads.

Regions arrive alone (`schedules.asynchronous(H)`). Each sends its progress since its
last arrival, from the point $\theta^s$ that it received then, and is answered at once:

$$
\begin{align*}
\Delta^m &= \theta^s - \theta^m \\
G &= \rho \Delta^m, \qquad v \leftarrow \mu v + (1 - \mu) \, G \\
\theta^g &\leftarrow \theta^g - \eta \, (G + \mu v) \\
\theta^s &= \theta^g - \eta \mu v, \qquad \theta^m \leftarrow \theta^s
\end{align*}
$$

While a region trains, the others move $\theta^g$ on, mostly along v. So from the
look-ahead point the region trains near the point at which its progress will be applied.
`heloco` adds a correction of arriving pseudo-gradients, and is equal bit for bit if it
corrects none.

Source: asynchronous momentum look-ahead, on which HeLoCo (arXiv 2606.00271) is built,
and with which it is compared. Momentum and look-ahead are as in that paper's published
table.
Differs from the paper: unknown, as the method's own paper was not available.
Defaults: HeLoCo's published eta 0.7, mu 0.9, rho 1; here the same, H 50. With mu = 0 it
is `delayed_nesterov` with N = 1 and no momentum.
Measured here: docs/results/methods.md; too long a step for so short a run.
"""

from cocodc_jax.sync import Method, SharedOuter, Sync, merge, schedules
from cocodc_jax.transforms.numerics import check_outer, check_rate
from cocodc_jax.transforms.outer import look_ahead
from cocodc_jax.transforms.outer import mla as mla_optimizer


def mla(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    arrival_weight: float = 1.0,
    dynamic_steps: bool = True,
) -> Method:
    """Build asynchronous momentum look-ahead, which HeLoCo corrects.

    Args:
      sync_interval: H, inner steps of the fastest region between two of its arrivals.
      outer_lr: eta, learning rate of the outer step, positive.
      outer_momentum: mu, in [0, 1).
      arrival_weight: rho, weight of an arrival in the outer step, positive; 1 over the
        number of regions makes a round of arrivals weigh as one.
      dynamic_steps: whether slower regions do fewer steps between arrivals.
    """
    check_outer(outer_lr, outer_momentum)
    check_rate("arrival_weight", arrival_weight)
    optimizer = mla_optimizer(outer_lr, outer_momentum, arrival_weight)
    sync = Sync(
        schedule=schedules.asynchronous(sync_interval, dynamic_steps),
        outer=SharedOuter(optimizer, start=look_ahead(outer_lr, outer_momentum)),
        merge=merge.replace(),
    )
    return Method(name="mla", sync=sync)
