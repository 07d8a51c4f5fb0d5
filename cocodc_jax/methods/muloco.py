"""`muloco` (arXiv 2505.23725): DiLoCo around Muon, 2-bit messages, error feedback.

Every H steps, blocking, the whole model (`schedules.staggered(H)`). In each region m:

    H times:  theta^m <- Muon(theta^m, g^m)            `Inner("muon")`, per matrix W:
              B <- beta B + G;  W <- W - lr s UV'      UV' the polar factor of G +
                                                       beta B, by Newton-Schulz
    e^m <- e^m + theta^g - theta^m                     `error_feedback`, e^m from zero
    q^m  = 2 bits a value of e^m;  e^m <- e^m - q^m    `int2`: +-1, +-1/3 of the largest
    Delta = (1/M) sum_m q^m                            of each 256 values
    m       <- mu m + Delta                            `sync.outer.nesterov`
    theta^g <- theta^g - eta (Delta + mu m);  theta^m <- theta^g

Embedding, head, norms and vectors take Adam (with Nesterov's moment) inside.

Source: MuLoCo, arXiv 2505.23725; update and numbers read from the authors' code.
Differs from the paper's code: there the feedback decays by 0.9, norm scales are sent
whole, 2 bits are the mean of a value's bin (four bins from a tensor's mean and 6 sigma
/ 4; even levels err by 0.60 of a Gaussian's length, bins by 0.42), Muon has momentum
0.9 without Nesterov and s = sqrt(out / in), and Adam b2 0.99. Here the feedback keeps
all, everything is sent in 2 bits, momentum is 0.95 with Nesterov, s = 0.2 sqrt(max(in,
out)) (the size of an Adam step), and b2 the run's.
Defaults: published H 30, eta 0.9 and mu 0.8 with 8 regions (0.6 and 0.7 with one; 0.7
and 0.6 in a later version); here H 30, eta 0.7, mu 0.9, DiLoCo's.
Measured here: last loss 1.741, DiLoCo's last (1.836) after 342 of 480 steps, 2.67 MB
sent by a region, DiLoCo 40.3 MB; how much of it is Muon alone was not separated (840k
parameters, H 40, 4 regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.method import Inner, Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules.fixed import staggered
from cocodc_jax.transforms import compression


def muloco(
    sync_interval: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str = "ef+int2",
) -> Method:
    """Build MuLoCo (arXiv 2505.23725): DiLoCo around Muon, 2-bit messages.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      compress: the compressor with its error feedback.
    """
    return Method(
        name="muloco",
        sync=Sync(
            schedule=staggered(sync_interval),
            outer=nesterov(outer_lr, outer_momentum),
            merge=merge.replace(),
            message=Compressed(compression.parse(compress)),
        ),
        inner=Inner("muon"),
    )
