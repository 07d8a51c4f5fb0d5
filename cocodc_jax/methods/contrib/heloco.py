"""`heloco` (arXiv 2606.00271): late pseudo-gradients kept, turned or shrunk.

Regions come alone (`schedules.asynchronous(H)`): each sends what it did since it last
came, Delta = theta^g(then) - theta^m, old minus new, and is answered at once. Per
tensor, with m the outer momentum, c the cosine of Delta and m, w the unit part of Delta
across m, t = ||Delta|| (u m / ||m|| + sqrt(1 - u^2) w), in `transforms.heloco`:

    c >= u         Delta^ = Delta                               u `keep_cosine`
    l <= c < u     Delta^ = t                                   l `shrink_cosine`
    c < l          Delta^ = a t + (1 - a) Delta / 2             a = (1 + c) / (1 + l)
    m <- b m + Delta^;   theta^g <- theta^g - eta (Delta^ + b m);   theta^m <- theta^g

Source: HeLoCo, arXiv 2606.00271. This rule was made from one line about the paper (the
cosine decides: keep, turn or shrink); from memory, ours in between.
Differs from the paper, whose rule is published as a table. With v = m / ||m|| and conf
= ||Delta|| / (||Delta|| + kappa ||m|| + eps) it is there

    c >= c_ok      Delta^ = Delta
    0 <= c < c_ok  Delta^ = ||Delta|| unit((1 - r) Delta / ||Delta|| + r v)
                            r = min(k_d (1 - c) conf, 1)
    c < 0          Delta^ = Delta - min(k_s (-c) conf, beta_max) c ||Delta|| v
    G = rho Delta^;  m <- mu m + (1 - mu) G;  theta^g <- theta^g - eta (G + mu m)

and regions start from the look-ahead point theta^g - eta mu m, not from theta^g.
Defaults: published c_ok 0.2, k_s 0.5, k_d 1, kappa 3, beta_max 0.5, eta 0.7, mu 0.9;
here u 0, l -0.5, eta 0.2, b 0.5: M arrivals make a round, so eta is about DiLoCo's over
M.
Measured here: last loss 1.908 against DiLoCo's 1.836 and delayed Nesterov's 2.128, all
40.3 MB a region (840k parameters, 480 steps, H 40, 4 even regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import SharedOuter
from cocodc_jax.sync.schedules.asynchronous import asynchronous
from cocodc_jax.transforms.outer import heloco as heloco_optimizer


def heloco(
    sync_interval: int = 50,
    outer_lr: float = 0.2,
    outer_momentum: float = 0.5,
    keep_cosine: float = 0.0,
    shrink_cosine: float = -0.5,
    dynamic_steps: bool = True,
) -> Method:
    """Build HeLoCo (arXiv 2606.00271, from memory): late means turned or shrunk.

    Every arrival is a whole outer step, corrected by its angle to the momentum; M of
    them make a round, so `outer_lr` is about DiLoCo's over M, and the momentum less.

    Args:
      sync_interval: H, inner steps of the fastest region between two of its arrivals.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: b, in [0, 1).
      keep_cosine: cosine to the outer momentum from which on a late tensor is kept as
        it is.
      shrink_cosine: cosine to the outer momentum below which a late tensor is shrunk.
      dynamic_steps: whether slower regions do fewer steps between arrivals.
    """
    optimizer = heloco_optimizer(outer_lr, outer_momentum, keep_cosine, shrink_cosine)
    return Method(
        name="heloco",
        sync=Sync(
            schedule=asynchronous(sync_interval, dynamic_steps),
            outer=SharedOuter(optimizer),
            merge=merge.replace(),
        ),
    )
