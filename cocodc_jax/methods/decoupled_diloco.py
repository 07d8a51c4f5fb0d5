"""`decoupled_diloco` (arXiv 2604.21428): from regions that answer in time, by tokens.

Fragment p of K starts at p H / K, then every H steps (`schedules.staggered`). Region
m's message takes a_m steps (`answer_steps`, given, so that a run can be repeated). With
Q the `quorum` and G the `grace_steps`,

    tau = min(a_(Q) + G, max_m a_m)                a_(Q) the Q-th smallest
    S   = the m with a_m <= tau                    `schedule.participating`
    w_m = tokens_m * tokens_m / steps_m            since the sync before; `Sync.weigh`

    t_p        send Delta^m_p = theta^g_p - theta^m_p, of each tensor
               n_m = ||Delta^m||  and  u_m = Delta^m / n_m    `RadialDirectional`
    t_p + tau  n = sum_S w_m n_m / sum_S w_m;  u = sum_S w_m u_m / sum_S w_m
               Delta = n u / ||u||                 of embeddings the weighted mean
               m_p <- mu m_p + Delta_p;  theta^g_p <- theta^g_p - eta (Delta_p + mu m_p)
               theta^m_p <- alpha theta^m_p + (1 - alpha) theta^g_p     `merge.mix`

Both means are linear, so messages are summed on their way. Where regions disagree a
plain mean (`averaging="mean"`) shortens the step; this does not. Regions that were late
take the result like all others. Fragments are of nearly equal size: tensors, largest
first, each to the smallest so far. With equal answers, plain means and strided blocks
it is `streaming_diloco`.

Source: Decoupled DiLoCo, arXiv 2604.21428; RDA, quorum, grace window and weights from a
published summary.
Differs from the paper: which regions are late is given, the same in every round; there
learners do not wait for one another either. How fragments are balanced, and that
regions mix (as in streaming), is ours.
Defaults: published H 24, 24 fragments, tau 2, Q 1; here the same, all answers taking
tau if `answer_steps` does not say, G 2 and streaming's eta 0.4, mu 0.9, alpha 0.5. A
model of fewer than K tensors is refused.
Measured here: last loss 1.748 against DiLoCo's 1.838, both 40.3 MB sent by a region;
with plain means and strided blocks 1.796 (840k parameters, 480 steps, H
40, 4 regions, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco
"""

from __future__ import annotations

import dataclasses

from cocodc_jax.sync import merge
from cocodc_jax.sync.averages import Average, RadialDirectional
from cocodc_jax.sync.messages import AsIs
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules.base import check_at_least
from cocodc_jax.sync.schedules.fixed import staggered

AVERAGES = {"rda": RadialDirectional(), "mean": Average()}


def decoupled_diloco(
    sync_interval: int = 24,
    num_fragments: int = 24,
    delay_steps: int = 2,
    answer_steps: str = "",
    quorum: int = 1,
    grace_steps: int = 2,
    averaging: str = "rda",
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "balanced_tensors",
) -> Method:
    """Build Decoupled DiLoCo (arXiv 2604.21428): quorum, grace window, RDA.

    A fragment is merged `grace_steps` after a quorum of regions has answered, or as
    soon as all have, from those that answered by then, each weighted by its tokens
    times its tokens per step. Regions that were late take the result like all others.
    How long each region's answer takes is given, so that a run can be repeated.

    Args:
      sync_interval: H, inner steps, a multiple of `num_fragments`.
      num_fragments: K, at most the tensors of the model (blocks, with another
        `fragment_strategy`).
      delay_steps: tau, inner steps that every region's message takes where
        `answer_steps` does not say.
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

    Raises:
      ValueError: if the quorum is not among the answers, a number is out of range, or
        `averaging` is unknown.
    """
    if averaging not in AVERAGES:
        raise ValueError(
            f"averaging={averaging!r} is unknown; use one of {tuple(AVERAGES)}"
        )
    delay_steps, participating, num_regions = _merged_at(
        answer_steps, delay_steps, quorum, grace_steps
    )
    rounds = staggered(sync_interval, num_fragments, delay_steps)
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
    """Return after how many steps a fragment is merged, from which of how many regions.

    None are all, and any number.
    """
    check_at_least("grace_steps", grace_steps, 0)
    check_at_least("quorum", quorum, 1)
    if not answer_steps:
        return delay_steps, None, None
    try:
        answers = [int(part) for part in answer_steps.split(",")]
    except ValueError:
        answers = [-1]
    if min(answers) < 0:
        raise ValueError(
            f"answer_steps={answer_steps!r} must be numbers of steps, at least 0, "
            "separated by commas, one for each region"
        )
    if not 1 <= quorum <= len(answers):
        raise ValueError(
            f"quorum={quorum} must be at least 1 and at most the {len(answers)} "
            "regions of answer_steps"
        )
    latest = min(sorted(answers)[quorum - 1] + grace_steps, max(answers))
    in_time = tuple(m for m, a in enumerate(answers) if a <= latest)
    return latest, in_time, len(answers)
