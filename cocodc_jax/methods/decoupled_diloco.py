r"""`decoupled_diloco` (arXiv 2604.21428): from regions that answer in time, by tokens.

Fragment p of K starts at p H / K, then every H steps (`schedules.staggered`). Region
m's message takes $a_m$ steps (`answer_steps`, an argument, so that a run is
reproducible). With $a_{(Q)}$ the Q-th smallest, Q the `quorum` and G the `grace_steps`,
the sync waits for the regions of S, and weighs them by tokens and speed:

$$
\tau = \min(a_{(Q)} + G, \, \max_m a_m), \qquad
S = \{m : a_m \le \tau\}, \qquad
w_m = n_m \cdot \frac{n_m}{s_m}
$$

$n_m$ are the tokens and $s_m$ the steps of region m since the sync before. Each region
sends length and direction of every tensor's pseudo-gradient,
$\Delta^m = \theta^g - \theta^m_t$. The means recover a pseudo-gradient of the regions'
mean length (RDA, "radial-directional averaging"):

$$
r = \frac{\sum_{m \in S} w_m \lVert \Delta^m \rVert}{\sum_{m \in S} w_m}, \qquad
u = \frac{\sum_{m \in S} w_m \Delta^m / \lVert \Delta^m \rVert}{\sum_{m \in S} w_m},
\qquad \Delta = r \, \frac{u}{\lVert u \rVert}
$$

Embeddings use the plain weighted mean. Then, as in `streaming_diloco`,

$$
\begin{align*}
v &\leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v) \\
\theta^m_{t+\tau} &\leftarrow \alpha \, \theta^m_{t+\tau} + (1 - \alpha) \, \theta^g
\end{align*}
$$

Both means are linear, so messages can be summed while they cross. If regions disagree,
a plain mean (`averaging="mean"`) shortens the step; RDA does not. Late regions merge
the result like all others. Fragments are of nearly equal size: each tensor, largest
first, goes to the smallest fragment so far. With equal answers, plain means and strided
blocks the method is `streaming_diloco`.

Source: Decoupled DiLoCo, arXiv 2604.21428; RDA, quorum, grace window and weights from a
published summary.
Differs from the paper: which regions are late is an argument, the same in every round;
there learners do not wait for one another either. The balancing of fragments, and the
mixing (as in streaming), are ours.
Defaults: published H 24, 24 fragments, tau 2, Q 1; here the same, all answers taking
tau if `answer_steps` does not say, G 2 and streaming's eta 0.4, mu 0.9, alpha 0.5. A
model of fewer than K tensors is refused.
Measured here: docs/results/methods.md; with plain means and strided blocks 1.796.
"""

import dataclasses
from typing import Literal

from cocodc_jax.sync import AsIs, Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.averages import Average, RadialDirectional
from cocodc_jax.sync.cutting import Strategy
from cocodc_jax.transforms.numerics import check_at_least, check_choice

AVERAGES = {"rda": RadialDirectional(), "mean": Average()}


def decoupled_diloco(
    sync_interval: int = 24,
    num_fragments: int = 24,
    delay_steps: int = 2,
    answer_steps: str = "",
    quorum: int = 1,
    grace_steps: int = 2,
    averaging: Literal["rda", "mean"] = "rda",
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: Strategy = "balanced_tensors",
) -> Method:
    """Build Decoupled DiLoCo (arXiv 2604.21428): quorum, grace window, RDA.

    Args:
      sync_interval: H, inner steps, a multiple of `num_fragments`.
      num_fragments: K, at most the tensors of the model (blocks, with another
        `fragment_strategy`).
      delay_steps: tau, inner steps that every region's message takes if `answer_steps`
        is empty.
      answer_steps: inner steps each region's message takes, as "1,1,2,9", in the order
        of the regions, of which there must be as many; empty is `delay_steps` for
        every region.
      quorum: answers that a merge waits for, at least 1 and at most the regions.
      grace_steps: inner steps that it waits for more answers than the quorum.
      averaging: how the regions' pseudo-gradients become one: "rda" of each tensor the
        mean length along the mean direction, "mean" their weighted mean.
      mixing_alpha: weight on the local fragment when a mean arrives, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential", "balanced" or "balanced_tensors".
    """
    check_choice("averaging", averaging, tuple(AVERAGES))
    delay_steps, participating, num_regions = _merged_at(
        answer_steps, delay_steps, quorum, grace_steps
    )
    rounds = schedules.staggered(sync_interval, num_fragments, delay_steps)
    return Method(
        name="decoupled_diloco",
        sync=Sync(
            schedule=dataclasses.replace(rounds, participating=participating),
            outer=nesterov(outer_lr, outer_momentum),
            merge=merge.mix(mixing_alpha),
            message=AsIs(average=AVERAGES[averaging]),
            weigh=lambda steps, tokens: tokens * tokens / steps.clip(1),
            fragment_strategy=fragment_strategy,
        ),
        num_regions=num_regions,
        min_regions=quorum,
    )


def _merged_at(
    answer_steps: str, delay_steps: int, quorum: int, grace_steps: int
) -> tuple[int, tuple[int, ...] | None, int | None]:
    """Return the steps to a merge, the regions in it, and how many there must be."""
    check_at_least("grace_steps", grace_steps, 0)
    check_at_least("quorum", quorum, 1)
    check_at_least("delay_steps", delay_steps, 0)
    if not answer_steps:
        return delay_steps, None, None

    try:
        answers = [int(part) for part in answer_steps.split(",")]
    except (AttributeError, ValueError):
        answers = [-1]
    if min(answers) < 0:
        raise ValueError(
            f"answer_steps={answer_steps!r} must be numbers of steps, at least 0, "
            "separated by commas, one for each region"
        )

    if quorum > len(answers):
        raise ValueError(
            f"quorum={quorum} must be at least 1 and at most the {len(answers)} "
            "regions of answer_steps"
        )

    latest = min(sorted(answers)[quorum - 1] + grace_steps, max(answers))
    in_time = tuple(m for m, a in enumerate(answers) if a <= latest)
    return latest, in_time, len(answers)
