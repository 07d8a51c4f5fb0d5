r"""`masked_core` (from memory): each region owns a mask of the weights, all a core.

Every H steps, blocking, the full model. Region m owns a fixed random share $\Omega_m$
of the entries, so that each entry j has $n_j$ owners. It sends a low-rank core $c^m$
of its pseudo-gradient, and the rest of its own entries:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
\Delta^m &= \theta^g - \theta^m \\
c^m &= \mathrm{lowrank}_r(\Delta^m) \\
r^m_j &= \Delta^m_j - c^m_j \qquad j \in \Omega_m
\end{align*}
$$

Cores are averaged over all regions, the rest over an entry's owners:

$$
\Delta_j = \frac{1}{M} \sum_m c^m_j + \frac{1}{n_j} \sum_{m : \, j \in \Omega_m} r^m_j,
\qquad \theta^g \leftarrow \theta^g - \eta \Delta, \qquad \theta^m \leftarrow \theta^g
$$

What a region learned outside its mask and the core is dropped at a sync, as if it had
not been trained. With `mask_density` 1 / M each entry has one owner; with 1 every
region owns all entries, and it is plain averaging, whatever the core.

Source: partially masked networks with a low-rank core, in DiLoCoX's (arXiv 2506.21263)
list of related work; from memory, and not even whose they are is certain.
Differs from the paper: there a region trains its mask and the core alone, here all of
its weights until the next sync; how masks are drawn, and that an entry is averaged over
its owners, is ours.
Defaults: published ones unknown; here H 30, density 0.25, rank 8, eta 1, no momentum.
Measured here: docs/results/methods.md; docs/results/archive/methods.md (smoke).
"""

from cocodc_jax.sync import Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.messages import MaskedCore
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.numerics import check_share


def masked_core(
    sync_interval: int = 30,
    mask_density: float = 0.25,
    rank: int = 8,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    mask_seed: int = 0,
) -> Method:
    """Build masks of the regions' own with a low-rank core (from memory).

    Args:
      sync_interval: H, inner steps between syncs.
      mask_density: share of the weights that a region owns, in (0, 1].
      rank: of the core; `compress` puts another in its place.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: its Nesterov momentum, in [0, 1).
      mask_seed: of which weights a region owns, the same on every region.
    """
    check_share("mask_density", mask_density)
    core = compression.parse(f"lowrank:{rank}")
    return Method(
        name="masked_core",
        sync=Sync(
            schedule=schedules.staggered(sync_interval),
            outer=nesterov(outer_lr, outer_momentum),
            merge=merge.replace(),
            message=MaskedCore(core, mask_density, mask_seed),
        ),
    )
