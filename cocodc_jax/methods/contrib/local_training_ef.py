"""`local_training_ef` (arXiv 1906.02367): the mean of compressed progress, with memory.

Every H steps, blocking, the whole model (`schedules.staggered(H)`). In each region m of
M, with e^m from zero:

    H times:  theta^m <- inner(theta^m, g^m)           AdamW
    e^m    <- e^m + theta^g - theta^m                  `error_feedback`; old minus new
    q^m     = C(e^m);   e^m <- e^m - q^m               `compress`
    theta^g <- theta^g - eta (1/M) sum_m q^m           `nesterov(eta, 0)`: no momentum
    theta^m <- theta^g                                 `merge.replace`

With eta = 1 and no compression this is local SGD (federated averaging), and
`multi_ring` but for roundings.

Source: Qsparse-local-SGD, Basu et al., arXiv 1906.02367; from memory.
Differs from the paper: C there sparsifies, then quantizes (`ef+topk:0.1+int8` is of
that form); here the default only sparsifies, to the largest tenth of each tensor. Its
inner optimizer is SGD. LT-ADMM-CC (arXiv 2501.13516 and its compressed successor),
local training inside ADMM with neighbours and duals, is another method that has a
similar name, and is not this one.
Defaults: published ones unchecked; here H 30, eta 1, `ef+topk:0.1`.
Measured here: last loss 1.912 with 5.96 MB sent by a region, DiLoCo 1.836 with 40.3 MB,
plain averaging (`multi_ring`) 1.764 with 60.4 MB (840k parameters, 480 steps, H 40, 4
regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules.fixed import staggered
from cocodc_jax.transforms import compression


def local_training_ef(
    sync_interval: int = 30,
    outer_lr: float = 1.0,
    compress: str = "ef+topk:0.1",
) -> Method:
    """Average compressed local progress, with memory.

    e <- e + Delta; q = C(e); e <- e - q; theta <- theta - eta mean q. With eta 1 and
    no compression this is local SGD (federated averaging).

    Source: Qsparse-local-SGD (Basu et al., arXiv 1906.02367), from memory.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: eta, learning rate of the outer step.
      compress: the compressor with its error feedback.
    """
    return Method(
        name="local_training_ef",
        sync=Sync(
            schedule=staggered(sync_interval),
            outer=nesterov(outer_lr, 0.0),
            merge=merge.replace(),
            message=Compressed(compression.parse(compress)),
        ),
    )
