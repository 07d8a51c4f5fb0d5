r"""`co2` (arXiv 2401.16265): one full round late, with a clipped momentum.

A mean crosses while the next H steps are done. Let $\theta^g_t$ be the outer parameters
that round t began with. In each region m:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad
\text{H times, from } \theta^g_t \\
\Delta^m_t &= \theta^g_t - \theta^m \qquad \text{sent now, used in the next round}
\end{align*}
$$

The outer step uses the mean of the round before, divided by the staleness gap
$\Lambda$, with a momentum whose entries are clipped to $[-\phi, \phi]$:

$$
\begin{align*}
v &\leftarrow \mathrm{clip}\left(\mu v
+ \frac{1}{\Lambda} \cdot \frac{1}{M} \sum_m \Delta^m_{t-1}, \; -\phi, \; \phi\right) \\
\theta^g_{t+1} &= \theta^g_t - \eta v, \qquad \theta^m \leftarrow \theta^g_{t+1}
\end{align*}
$$

$\Lambda$ is 1 (`staleness_gap="constant"`, the public code's). With "measured" it is

$$
\Lambda_t = \max\left(1, \; \frac{\lVert \theta^g_t - \theta^g_{t-1} \rVert}
{\text{mean of earlier moves}}\right)
$$

The message of the round before the first is zero. The outer state is divided over a
region's devices, as ZeRO does (`outer_placement`).

Source: CO2, Sun et al., arXiv 2401.16265. The rule with a gap of 1 is read from the
public code. That a staleness gap divides late means is from memory; the measured one is
ours, as no formula was found.
Differs from the paper's code: there the clip's result is dropped; here it clips.
Defaults: published mu 0.2 to 0.6 with the model's size, eta 1, phi 1, gap 1; here mu
0.2, eta 1, phi 1, gap 1, H 48.
Measured here: docs/results/methods.md; with the measured gap 2.274.
"""

from cocodc_jax.sync import Method, SharedOuter, Sync, merge, schedules
from cocodc_jax.sync.outer import Placement
from cocodc_jax.transforms.numerics import check_outer, check_positive
from cocodc_jax.transforms.outer import StalenessGap
from cocodc_jax.transforms.outer import co2 as co2_optimizer


def co2(
    sync_interval: int = 48,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.2,
    momentum_clip: float = 1.0,
    staleness_gap: StalenessGap = "constant",
    outer_placement: Placement = "divided",
) -> Method:
    """Build CO2 (arXiv 2401.16265): late means, clipped momentum, divided state.

    Args:
      sync_interval: H, inner steps of a round.
      outer_lr: eta, learning rate of the outer step.
      outer_momentum: mu, decay of the momentum, 0.2 to 0.6 with the model's size.
      momentum_clip: phi, largest element of the outer momentum, in parameter units.
      staleness_gap: Lambda, what a late mean is divided by: "constant" is 1, as in the
        public code, "measured" how far the parameters have moved since, in usual moves.
      outer_placement: "divided" over the devices of each region, or "host".
    """
    check_outer(outer_lr, outer_momentum)
    check_positive("momentum_clip", momentum_clip)

    is_measured = staleness_gap == "measured"
    sync = Sync(
        schedule=schedules.one_step_stale(sync_interval),
        outer=SharedOuter(
            co2_optimizer(outer_lr, outer_momentum, momentum_clip, staleness_gap),
            outer_placement,
            frozenset({"stale_params"} if is_measured else ()),
        ),
        merge=merge.replace(),
    )
    return Method(name="co2", sync=sync)
