r"""`loscar` (arXiv 2605.20866): a random share of the coordinates, progress replayed.

Every H steps a set S of coordinates is drawn, equal in all regions. At step t each
region m sends its pseudo-gradient of those coordinates, $\Delta^m_j = \theta^g_j -
\theta^m_{j,t}$. After $\tau$ more steps the mean replaces the region's stale values,
and its progress in between is kept:

$$
\begin{align*}
\theta^g_j &\leftarrow \frac{1}{M} \sum_m \theta^m_{j,t} & j \in S \\
\theta^m_{j,t+\tau} &\leftarrow \theta^g_j + (\theta^m_{j,t+\tau} - \theta^m_{j,t})
& j \in S
\end{align*}
$$

Other coordinates stay as they are, so a region's progress while the message crosses is
kept. The positions are known to all and are not sent. $\theta^g$ consists of the last
mean of each coordinate; evaluation uses the mean of the regions.

Source: LOSCAR-SGD, arXiv 2605.20866; mean, mask and merge from a published summary.
That the merge is CoCoDC's without a curvature is derived here; with Nesterov and
fragments in turn it is `streaming_diloco` with `merge_rule="replay"`.
Differs from the paper: S is as large a share of every tensor, there of the full model;
there regions may do unequal numbers of steps (`step_times`), and the inner steps are
plain SGD.
Defaults: the published ones were not found; here H 25, tau 5, a quarter of the
coordinates, so that each is averaged about once in 100 steps.
Measured here: docs/results/methods.md.
"""

from cocodc_jax.sync import AsIs, Method, SharedMask, Sync, merge, nesterov, schedules


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
    sync = Sync(
        schedule=schedules.staggered(
            sync_interval, 1, delay_steps, max_delay_steps=max_delay_steps
        ),
        outer=nesterov(1.0, 0.0),
        merge=merge.where_drawn(merge.replay(), mask),
        message=AsIs(average=mask),
    )
    return Method(name="loscar", sync=sync)
