r"""`delayed_nesterov` (arXiv 2401.09135): regions come alone; the momentum waits for N.

Region m, whose step takes $s_m$ times the fastest one's, does $H_m = \max(1, \lfloor
H / s_m \rfloor)$ inner steps between two arrivals ("dynamic", so that all arrive about
equally often; H otherwise). When it arrives it sends its progress since its last
arrival, is answered at once, and continues from the answer. No region waits. With
$\theta^g_0$ the outer parameters that it started from, which other arrivals have
changed since,

$$
\Delta^m = \theta^g_0 - \theta^m
$$

Every arrival moves the outer parameters. Each N-th also updates the momentum, from the
N pseudo-gradients since:

$$
\begin{align*}
\text{arrivals } 1 \ldots N - 1: \qquad
\theta^g &\leftarrow \theta^g - \eta \, (c \, \mu v + \Delta^m / N) \\
\text{arrival } N: \qquad
v &\leftarrow \mu v + \frac{1}{N} \sum \Delta^m \\
\theta^g &\leftarrow \theta^g - \eta \, ((1 - c N + c) \, \mu v + \Delta^m / N) \\
\text{always}: \qquad \theta^m &\leftarrow \theta^g
\end{align*}
$$

c = 0 applies the momentum at the N-th arrival only, c = 1 / N evenly. With N = 1 it is
Nesterov at every arrival, where M arrivals that agree push the momentum M times.

Source: asynchronous local SGD, Liu et al., arXiv 2401.09135; read from the authors'
code, dynamic local updates too.
Differs from the paper: nothing known. Time is simulated in steps of the fastest region.
Defaults: published c 0; here H 50, N 4 (the regions), c 0 and DiLoCo's eta 0.7, mu 0.9.
Measured here: docs/results/methods.md (equally fast regions).
"""

from cocodc_jax.sync import Method, SharedOuter, Sync, merge, schedules
from cocodc_jax.transforms.numerics import check_at_least, check_number, check_outer
from cocodc_jax.transforms.outer import delayed_nesterov as delayed_nesterov_optimizer


def delayed_nesterov(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    arrivals_per_momentum: int = 4,
    momentum_spread: float = 0.0,
    dynamic_steps: bool = True,
) -> Method:
    """Build asynchronous local SGD with delayed Nesterov (arXiv 2401.09135).

    Args:
      sync_interval: H, inner steps of the fastest region between two of its arrivals.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: mu, in [0, 1).
      arrivals_per_momentum: N, arrivals between two changes of the delayed momentum,
        usually the number of regions.
      momentum_spread: share c of the delayed momentum that the other arrivals apply.
      dynamic_steps: whether slower regions, which come alone, do fewer steps between
        two arrivals.
    """
    check_outer(outer_lr, outer_momentum)
    check_at_least("arrivals_per_momentum", arrivals_per_momentum, 1)
    check_number("momentum_spread", momentum_spread)

    optimizer = delayed_nesterov_optimizer(
        outer_lr, outer_momentum, arrivals_per_momentum, momentum_spread
    )
    sync = Sync(
        schedule=schedules.asynchronous(sync_interval, dynamic_steps),
        outer=SharedOuter(optimizer),
        merge=merge.replace(),
    )
    return Method(name="delayed_nesterov", sync=sync)
