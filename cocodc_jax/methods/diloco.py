r"""`diloco` (arXiv 2311.08105): the full model every H steps, while all regions wait.

Each region m trains alone from the outer parameters for H steps:

$$
\theta^m \leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times}
$$

It sends its pseudo-gradient, old minus new. The mean arrives at once ($\tau = 0$), the
outer Nesterov optimizer steps, and every region continues from the result:

$$
\begin{align*}
\Delta &= \frac{1}{M} \sum_m (\theta^g - \theta^m) \\
v &\leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v) \\
\theta^m &\leftarrow \theta^g
\end{align*}
$$

The outer optimizer is `optax.sgd(eta, mu, nesterov=True)`. The inner optimizer's state
stays as it is.

With `router_interval`, the routers of a mixture of experts are a separate fragment,
with that interval and a separate momentum. They are few parameters, and decide in each
region which tokens an expert learns from.

Source: DiLoCo, Douillard et al., arXiv 2311.08105, algorithm 1; read from the authors'
later code. Derived here: with H = 1, eta = 1, mu = 0 and SGD inside it is
`data_parallel`; with eta = 1 and mu = 0 it is local SGD (federated averaging). A
`router_interval` of H is `diloco`.
Differs from the paper: nothing known. `router_interval` is ours: no paper or code with
such a rule was found (MaxText 0.2.5 syncs routers with everything else).
Defaults: published H 500, eta 0.7, mu 0.9, AdamW 4e-4 with weight decay 0.1, 1000 steps
of warm-up, cosine, clip 1.0, length 1024; H, eta and mu here are the same.
Measured here: docs/results/methods.md. The published eta and mu are poor in so short a
run: plain averaging (`multi_ring`) is ahead.
"""

import dataclasses

from cocodc_jax.sync import Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.cutting import ROUTERS
from cocodc_jax.transforms.numerics import check_at_least


def diloco(
    sync_interval: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    router_interval: int | None = None,
) -> Method:
    """Build DiLoCo (arXiv 2311.08105): the full model, blocking, every H steps.

    Args:
      sync_interval: H, inner steps between two syncs of a fragment.
      outer_lr: eta, learning rate of the outer optimizer.
      outer_momentum: mu, momentum of the outer optimizer, in [0, 1).
      router_interval: inner steps between two syncs of the routers of a mixture of
        experts; None is H.
    """
    sync = Sync(
        schedule=schedules.staggered(sync_interval),
        outer=nesterov(outer_lr, outer_momentum),
        merge=merge.replace(),
    )
    if router_interval is not None:
        check_at_least("router_interval", router_interval, 1)
        sync = dataclasses.replace(
            sync,
            schedule=schedules.periodic(sync_interval, router_interval),
            fragment_strategy=ROUTERS,
        )
    return Method(name="diloco", sync=sync)
