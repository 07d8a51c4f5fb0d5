"""`loscar` (arXiv 2605.20866): a random share of the coordinates, progress replayed.

Every H steps (`schedules.staggered(H)`, one fragment) a set S of coordinates is drawn,
the same in every region (`averages.SharedMask`; the key is of the round), and applied
tau steps later. In each region m of M:

    t          staged = theta^m;  send staged_j, j in S         `AsIs`; as Delta^m_j
    meanwhile  tau inner steps                                  AdamW, state untouched
    t + tau    theta^g_j = (1/M) sum_m staged^m_j               eta 1, no momentum
               theta^m_j <- theta^g_j + (theta^m_j - staged_j)  j in S, `merge.replay`
               theta^m_j stays                                  others, `where_drawn`

So a region takes its own stale share out of itself and puts the mean in; nothing that
it did on the way is lost. What travels is Delta^m = theta^g - staged of the
coordinates in S, old minus new; the positions are known. theta^g is made of the last
mean of each coordinate: what is evaluated is the mean of the regions.

Source: LOSCAR-SGD, arXiv 2605.20866; mean, mask and merge from a published summary.
That the merge is CoCoDC's without a curvature is derived here; with Nesterov and
fragments in turn it is `streaming_diloco` with `merge_rule="replay"`.
Differs from the paper: S is as large a share of every tensor, there of the whole model;
there regions may do unequal numbers of steps (`step_times`), and the inner steps are
plain SGD.
Defaults: the published ones were not found; here H 25, tau 5, a quarter of the
coordinates, so that each is averaged about once in 100 steps.
Measured here: last loss 1.845 with 10.1 MB sent by a region, DiLoCo 1.838 with 40.3 MB
(840k parameters, 480 steps, H 40, 4 regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

from cocodc_jax.sync import merge
from cocodc_jax.sync.averages import SharedMask
from cocodc_jax.sync.messages import AsIs
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import measured


def loscar(
    sync_interval: int = 25,
    delay_steps: int | str = 5,
    mask_density: float = 0.25,
    mask_seed: int = 0,
    max_delay_steps: int | None = None,
) -> Method:
    """Build LOSCAR-SGD (arXiv 2605.20866): plain means of random coordinates, replayed.

    Args:
      sync_interval: H, inner steps between two syncs.
      delay_steps: tau, inner steps from a start to its merge, or "auto".
      mask_density: share of each tensor's coordinates that a sync averages, in (0, 1].
      mask_seed: seed of the draw of coordinates, the same on every region.
      max_delay_steps: the longest that "auto" may choose; None is H.
    """
    mask = SharedMask(mask_density, mask_seed)
    return Method(
        name="loscar",
        sync=Sync(
            schedule=measured.staggered(sync_interval, 1, delay_steps, max_delay_steps),
            outer=nesterov(1.0, 0.0),
            merge=merge.where_drawn(merge.replay(), mask),
            message=AsIs(average=mask),
        ),
    )
