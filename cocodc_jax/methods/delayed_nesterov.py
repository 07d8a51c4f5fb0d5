"""`delayed_nesterov` (arXiv 2401.09135): regions come alone; the momentum waits for N.

Region m, whose step takes s_m of the fastest one's, does H_m = max(1, floor(H / s_m))
inner steps between two arrivals ("dynamic", so that all come about equally often; H
otherwise; `schedules.asynchronous`). When it comes it sends what it has done since it
last came, is answered at once, and goes on from there; nobody waits for anybody:

    g = theta^g(then) - theta^m                        old minus new; theta^g has moved
    arrival 1 .. N - 1 of a buffer                     since "then", by other arrivals
        theta^g <- theta^g - eta (c b m + g / N)
    arrival N
        m       <- b m + (sum of the N g's) / N
        theta^g <- theta^g - eta ((1 - c N + c) b m + g / N)
    theta^m <- theta^g                                 `merge.replace`

In code: b `outer_momentum`, N `arrivals_per_momentum`, c `momentum_spread`, and
`transforms.outer.delayed_nesterov`. c = 0 applies the momentum whole at the N-th
arrival, c = 1 / N evenly. With N = 1 it is Nesterov at every arrival, where M arrivals
that agree push the momentum M times.

Source: asynchronous local SGD, Liu et al., arXiv 2401.09135; read from the authors'
code, dynamic local updates too.
Differs from the paper: nothing known. Time is simulated in steps of the fastest region.
Defaults: published c 0; here H 50, N 4 (the regions), c 0 and DiLoCo's eta 0.7, b 0.9.
Measured here: last loss 2.133 against DiLoCo's 1.838, both 40.3 MB sent by a region; no
stall (840k parameters, 480 steps, H 40, 4 equally fast regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import SharedOuter
from cocodc_jax.sync.schedules.asynchronous import asynchronous
from cocodc_jax.transforms.numerics import (
    check_count,
    check_finite,
    check_rate,
    check_unit_interval,
)
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

    Each region is answered when it comes; the momentum moves once in N arrivals.

    Args:
      sync_interval: H, inner steps of the fastest region between two of its arrivals.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: b, in [0, 1).
      arrivals_per_momentum: N, arrivals between two changes of the delayed momentum,
        usually the number of regions.
      momentum_spread: share c of the delayed momentum that the other arrivals apply.
      dynamic_steps: whether slower regions, which come alone, do fewer steps between
        two arrivals.
    """
    check_rate("outer_lr", outer_lr)
    check_unit_interval("outer_momentum", outer_momentum)
    check_count("arrivals_per_momentum", arrivals_per_momentum)
    check_finite("momentum_spread", momentum_spread)
    optimizer = delayed_nesterov_optimizer(
        outer_lr, outer_momentum, arrivals_per_momentum, momentum_spread
    )
    return Method(
        name="delayed_nesterov",
        sync=Sync(
            schedule=asynchronous(sync_interval, dynamic_steps),
            outer=SharedOuter(optimizer),
            merge=merge.replace(),
        ),
    )
