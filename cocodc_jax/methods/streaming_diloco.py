"""`streaming_diloco` (arXiv 2501.18512): fragments one by one, while the steps go on.

The model is cut into K fragments of transformer blocks (`fragments.cut`; embedding,
norm and head belong to them too). Fragment p starts at step p H / K, then every H steps
(`schedules.staggered`). With t_p its start, in each region m of M:

    t_p        send Delta^m_p = theta^g_p - theta^m_p(t_p)      `Sync.message`
    meanwhile  tau inner steps of the whole model               AdamW, state untouched
    t_p + tau  Delta_p = (1/M) sum_m Delta^m_p
               m_p       <- mu m_p + Delta_p                    `sync.outer.nesterov`
               theta^g_p <- theta^g_p - eta (Delta_p + mu m_p)
               theta^m_p <- alpha theta^m_p + (1 - alpha) theta^g_p     `merge.mix`

theta^g_p is the fragment's last outer value, alike in all regions and never the mixed
one. alpha is the weight on *local*: 1 never synchronises, 0 throws away what was
learned during the overlap. What arrives at a step is merged before anything leaves.
`delay_steps="auto"` takes tau from what syncs last (`schedules.measured`, ours).

Source: Streaming DiLoCo, Douillard et al., arXiv 2501.18512, algorithm 2 and section
2.3; updates and mixing read from the authors' code, FP4 and tau from published tables.
Derived here: K = 1, tau = 0, alpha = 0 is `diloco`.
Differs from the paper: messages are float32 unless `compress="fp4"` (E3M0, as there;
the scale, the largest of each 256 values, is ours: theirs is not published).
Defaults: published eta 0.4, mu 0.9, alpha 0.5, H 30 or 100, tau 1 (up to 5
recommended); here H 100, K 4, tau 1 and the same eta, mu, alpha.
Measured here: last loss 1.803, DiLoCo's last after 424 of 480 steps, the same 40.3 MB
sent by a region, no stall (840k parameters, H 40, tau 5, 4 regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import measured


def streaming_diloco(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 1,
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
) -> Method:
    """Build Streaming DiLoCo (arXiv 2501.18512): fragments, overlap, mixing.

    Args:
      sync_interval: H, inner steps, a multiple of `num_fragments`.
      num_fragments: K, fragments the model is cut into.
      delay_steps: tau, inner steps between a sync's start and its merge; "auto"
        follows what syncs turn out to take, see `schedules.measured`.
      mixing_alpha: weight on the local fragment when a mean arrives, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: how units are dealt to fragments, "strided", "sequential" or
        "balanced".
      max_delay_steps: the longest delay that "auto" may choose; None is H.
    """
    return Method(
        name="streaming_diloco",
        sync=Sync(
            schedule=measured.staggered(
                sync_interval, num_fragments, delay_steps, max_delay_steps
            ),
            outer=nesterov(outer_lr, outer_momentum),
            merge=merge.mix(mixing_alpha),
            fragment_strategy=fragment_strategy,
        ),
    )
