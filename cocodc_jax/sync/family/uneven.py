"""Methods for regions of unequal speed: no round, or a round without the latecomers."""

import dataclasses

from cocodc_jax.sync import merge, schedule
from cocodc_jax.sync.arrivals import arrivals
from cocodc_jax.sync.family.nesterov import nesterov
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms.outer import delayed_nesterov as delayed_nesterov_optimizer
from cocodc_jax.transforms.outer import heloco as heloco_optimizer


def delayed_nesterov(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    arrivals_per_momentum: int = 4,
    momentum_spread: float = 0.0,
    dynamic_steps: bool = True,
) -> Method:
    """Asynchronous local SGD with delayed Nesterov (arXiv 2401.09135).

    Each region is answered when it comes; the momentum moves once in N arrivals.

    Args:
      sync_interval: H, steps of the fastest region between two of its arrivals.
      outer_lr: eta.
      outer_momentum: b, in [0, 1).
      arrivals_per_momentum: N, usually the number of regions.
      momentum_spread: c, share of the momentum that the other arrivals apply.
      dynamic_steps: whether slower regions do fewer steps between arrivals.
    """
    return Method(
        "delayed_nesterov",
        arrivals(sync_interval, dynamic_steps),
        merge.replace(),
        delayed_nesterov_optimizer(
            outer_lr, outer_momentum, arrivals_per_momentum, momentum_spread
        ),
        is_asynchronous=True,
    )


def heloco(
    sync_interval: int = 50,
    outer_lr: float = 0.2,
    outer_momentum: float = 0.5,
    keep_cosine: float = 0.0,
    shrink_cosine: float = -0.5,
    dynamic_steps: bool = True,
) -> Method:
    """HeLoCo (arXiv 2606.00271, from memory): late pseudo-gradients turned or shrunk.

    Every arrival is a whole outer step, corrected by its angle to the momentum; M of
    them make a round, so `outer_lr` is about DiLoCo's over M, and the momentum less.

    Args:
      sync_interval: H, steps of the fastest region between two of its arrivals.
      outer_lr: eta.
      outer_momentum: b, in [0, 1).
      keep_cosine: cosine to the momentum from which on a tensor is kept as it is.
      shrink_cosine: cosine below which it is shrunk.
      dynamic_steps: whether slower regions do fewer steps between arrivals.
    """
    return Method(
        "heloco",
        arrivals(sync_interval, dynamic_steps),
        merge.replace(),
        heloco_optimizer(outer_lr, outer_momentum, keep_cosine, shrink_cosine),
        is_asynchronous=True,
    )


def decoupled_diloco(
    sync_interval: int = 100,
    num_fragments: int = 4,
    answer_steps: str = "",
    quorum: int = 1,
    grace_steps: int = 2,
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
) -> Method:
    """Decoupled DiLoCo (arXiv 2604.21428): a quorum, a grace window, token weights.

    A fragment is merged `grace_steps` after a quorum of regions has answered, or as
    soon as all have, from those that answered by then, each weighted by its tokens
    times its tokens per step. Regions that were late take the result like all others.
    How long each region's answer takes is given, so that a run can be repeated.

    Args:
      sync_interval: H, a multiple of `num_fragments`.
      num_fragments: K.
      answer_steps: steps each region's message takes, as "1,1,2,9", ascending or not;
        empty is one step for every region.
      quorum: answers that are waited for, at least 1.
      grace_steps: steps waited for more answers after that.
      mixing_alpha: weight on the local fragment when a mean arrives, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".

    Raises:
      ValueError: if the quorum is not among the answers or a number is out of range.
    """
    delay_steps, taking_part = _merged_at(answer_steps, quorum, grace_steps)
    rounds = schedule.staggered(sync_interval, num_fragments, delay_steps)
    return Method(
        "decoupled_diloco",
        dataclasses.replace(rounds, taking_part=taking_part),
        merge.mix(mixing_alpha),
        nesterov(outer_lr, outer_momentum),
        fragment_strategy,
        weigh=lambda steps, tokens: tokens * tokens / steps.clip(1),
    )


def _merged_at(
    answer_steps: str, quorum: int, grace_steps: int
) -> tuple[int, tuple[int, ...] | None]:
    """After how many steps a fragment is merged, and from which regions."""
    if grace_steps < 0:
        raise ValueError(f"grace_steps={grace_steps} must be at least 0")
    if not answer_steps:
        if quorum < 1:
            raise ValueError(f"quorum={quorum} must be at least 1")
        return 1, None
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
    return latest, tuple(m for m, a in enumerate(answers) if a <= latest)
