"""`loscar` (arXiv 2605.20866): the region's own progress replayed on what arrives.

The schedule is Streaming DiLoCo's: fragment p of K starts at p H / K, then every H
steps (`schedules.staggered`), and is applied tau steps later. In each region m of M:

    t_p        staged = theta^m_p;  send Delta^m_p = theta^g_p - staged
    meanwhile  tau inner steps                              AdamW, state untouched
    t_p + tau  m_p <- mu m_p + mean_m Delta^m_p             `sync.outer.nesterov`
               theta^g_p <- theta^g_p - eta (mean_m Delta^m_p + mu m_p)
               theta^m_p <- theta^g_p + (theta^m_p - staged)

The last line is `merge.compensate(optax.identity())`: with g = (staged - theta^m) /
tau, theta^m <- theta^g - tau g. It is the compensation of `cocodc` with lambda = 0, and
`cocodc_paper` in all but rounding.

Source: LOSCAR-SGD, arXiv 2605.20866; the merge from a published summary. That it is
CoCoDC's replay is derived here.
Differs from the paper, of which this is the merge alone: there the outer step is a
plain mean (eta 1, no momentum), and what is exchanged is a random mask of the
coordinates that all regions share and draw anew each round. Here it is Nesterov and
fixed fragments.
Defaults: the published ones were not found; here streaming's eta 0.4, mu 0.9, H 100, K
4 and CoCoDC's tau 5.
Measured here: last loss 1.888 against streaming's 1.803, both at 40.3 MB sent by a
region (840k parameters, 480 steps, H 40, tau 5, 4 regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco

At tau/H 0.2 the replay ends at 2.241, mix(0.5) at 2.210 (50k parameters, six seeds), by
`python -m experiments.ablate_compensation`.
"""

from __future__ import annotations

import optax

from cocodc_jax.sync import merge
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import measured


def loscar(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
) -> Method:
    """Build LOSCAR-SGD's merge (arXiv 2605.20866): local progress replayed as it was.

    theta^m <- theta^g + (theta^m - staged); CoCoDC without compensation, on Streaming
    DiLoCo's schedule.

    Args:
      sync_interval: H, inner steps, a multiple of `num_fragments`.
      num_fragments: K.
      delay_steps: tau, inner steps from a start to its merge, or "auto".
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is H.
    """
    return Method(
        name="loscar",
        sync=Sync(
            schedule=measured.staggered(
                sync_interval, num_fragments, delay_steps, max_delay_steps
            ),
            outer=nesterov(outer_lr, outer_momentum),
            merge=merge.compensate(optax.identity()),
            fragment_strategy=fragment_strategy,
        ),
    )
