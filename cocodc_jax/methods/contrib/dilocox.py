r"""`dilocox` (arXiv 2506.21263): low rank, int4, one round late, a rank that adapts.

Round t has $H_t$ steps, during which the message of round t - 1 crosses. In each region
m, with error feedback $e^m$ from zero, every matrix is approximated by two factors (one
power iteration from the last round's Q, as in PowerSGD), which are sent in int4:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad H_t \text{ times} \\
A &= \theta^g - \theta^m + e^m \\
P &= \mathrm{orthonormal}(A Q), \qquad Q \leftarrow A^\top P \\
q^m &= \mathrm{int4}(P) \, \mathrm{int4}(Q)^\top, \qquad e^m \leftarrow A - q^m
\end{align*}
$$

The outer Nesterov optimizer steps on the mean of round t - 1:

$$
\begin{align*}
\Delta &= \frac{1}{M} \sum_m q^m_{t-1}, \qquad v \leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v), \qquad
\theta^m \leftarrow \theta^g
\end{align*}
$$

The next rank follows the mean's effective rank $r'$, the exponential of the entropy of
its singular values: $r_{t+1}$ is the smallest of $r_1, r_1 / 2, \ldots,
r_{\mathrm{min}}$ that holds the mean of the last five $r'$. A smaller message is hidden
by a shorter round:

$$
H_{t+1} = \lceil H_1 \, r_{t+1} / r_1 \rceil
$$

A tensor that the factors would not shrink is sent in int4 itself; the layers of a stack
are factorized one by one. Each region's factors are gathered (`messages.Ranked`). With
`sum_factors` the order is PowerSGD's own (`sync.summed`), in float32:

$$
\begin{align*}
P &= \mathrm{orthonormal}\left(\frac{1}{M} \sum_m A^m Q\right), \qquad
Q \leftarrow \frac{1}{M} \sum_m (A^m)^\top P \\
\Delta &= P Q^\top, \qquad e^m \leftarrow A^m - P P^\top A^m
\end{align*}
$$

Source: DiLoCoX, arXiv 2506.21263; from memory throughout, except its abstract.
Halvings, their rounding up and the weights of tensors in r' are ours.
Differs from the paper: there AdamW's state and the outer momentum are both divided over
a region's pipeline stages; here the latter is with `outer_placement="divided"`.
Defaults: published H 125, r 64 (1.3B) or 2048 (107B); here H 125, r 64, r_min 4, and
eta 0.4, mu 0.5, ours (0.7 and 0.9 one round late diverge on a quadratic). At 0.13M
parameters mu 0 ended 0.13 nats lower than mu 0.5 (docs/results/claims.md).
Measured here: docs/results/methods.md (r 16).
"""

from cocodc_jax.sync import Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.messages import Compressed, Message, Ranked
from cocodc_jax.sync.outer import Placement
from cocodc_jax.sync.summed import SummedFactors
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank, resize
from cocodc_jax.transforms.numerics import check_at_least
from cocodc_jax.transforms.quantize import int4


def dilocox(
    sync_interval: int = 125,
    rank: int = 64,
    min_rank: int = 4,
    adaptive_rank: bool = True,
    sum_factors: bool = False,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.5,
    outer_placement: Placement = "host",
) -> Method:
    """Build DiLoCoX (arXiv 2506.21263, from memory): low rank that adapts, int4.

    Args:
      sync_interval: H_1, inner steps of a round at the first rank.
      rank: r_1, rank of the factors in the first rounds, and the largest. A matrix
        too small for it goes unfactored; a lower rank then shortens rounds the most.
      min_rank: r_min, the least that an adaptive rank becomes.
      adaptive_rank: whether rank and interval follow the effective rank of the means.
      sum_factors: all-reduce the first factors, then the second, as PowerSGD does, in
        float32; otherwise each region's own are gathered in int4.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      outer_placement: "host", or "divided" over the devices of each region.
    """
    check_at_least("min_rank", min_rank, 1)

    schedule: schedules.Schedule = schedules.one_step_stale(sync_interval)
    message: Message = Compressed(_low_rank_int4(rank))
    if adaptive_rank:
        schedule = schedules.ranked_rounds(sync_interval, rank, min_rank)
        message = Ranked(_low_rank_int4, _resize, rank)
    if sum_factors:
        message = SummedFactors(rank, adaptive_rank)

    sync = Sync(
        schedule=schedule,
        outer=nesterov(outer_lr, outer_momentum).placed(outer_placement),
        merge=merge.replace(),
        message=message,
    )
    return Method(name="dilocox", sync=sync)


def _low_rank_int4(rank: int) -> Compressor:
    return error_feedback(low_rank(rank, factors=int4()))


def _resize(state, tree, rank: int):
    """Keep what error feedback has not sent yet; change the factors' shape."""
    return state._replace(inner=resize(state.inner, tree, rank))
