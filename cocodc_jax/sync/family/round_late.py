"""Methods that apply a round's mean one whole round late, and so hide all of its way.

At the end of round t the regions' progress leaves, the mean of round t - 1 is applied,
and every region begins round t + 1 from the result.

A momentum acts on what is a round old: Nesterov with DiLoCo's 0.7 and 0.9, one round
late, diverges on a quadratic. The defaults of outer learning rate and momentum here
are therefore lower, and ours, where the papers' are not known.
"""

from cocodc_jax.sync import merge, outers, schedule
from cocodc_jax.sync.family.nesterov import nesterov
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.rounds import RankedCompressors, ranked_rounds
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank, resize
from cocodc_jax.transforms.outer import co2 as co2_optimizer
from cocodc_jax.transforms.quantize import int4


def co2(
    sync_interval: int = 48,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.2,
    momentum_clip: float = 1.0,
    outer_placement: str = "divided",
) -> Method:
    """CO2 (arXiv 2401.16265): a staleness penalty, a clip that clips, divided state.

    m <- clip(beta m + Delta(t - 1) / Lambda, +-phi); x <- x - eta m. Lambda, the
    staleness gap, is from memory; see `transforms.co2`.

    Args:
      sync_interval: H, the round.
      outer_lr: eta.
      outer_momentum: beta, 0.2 to 0.6 with the model's size.
      momentum_clip: phi, the largest element of the momentum, in parameter units.
      outer_placement: "divided" over the devices of each region, or "host".
    """
    return Method(
        "co2",
        schedule.one_round_late(sync_interval),
        merge.replace(),
        co2_optimizer(outer_lr, outer_momentum, momentum_clip),
        needs_reference=True,
        outer_placement=outer_placement,
    )


def eager(
    sync_interval: int = 30, outer_lr: float = 0.4, outer_momentum: float = 0.5
) -> Method:
    """Eager updates (arXiv 2502.12996, from memory): late but for one's own part.

    Args:
      sync_interval: H, the round.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    return Method(
        "eager",
        schedule.one_round_late(sync_interval),
        merge.replace(),
        outers.eager(nesterov(outer_lr, outer_momentum)),
    )


def dilocox(
    sync_interval: int = 125,
    rank: int = 64,
    min_rank: int = 4,
    adaptive_rank: bool = True,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.5,
    outer_placement: str = "host",
) -> Method:
    """DiLoCoX (arXiv 2506.21263, from memory): low rank, int4, a rank that adapts.

    Each region sends both int4 factors of a rank-r approximation of its
    pseudo-gradient, with error feedback; r and the steps of a round follow the
    effective rank of the means, see `sync/rounds.py`.

    Args:
      sync_interval: H_1, the round at the first rank.
      rank: r_1, the first rank and the largest. Where a matrix is too small for it,
        it is sent whole; then a lower rank shortens rounds more than messages.
      min_rank: the smallest rank.
      adaptive_rank: whether the rank changes; otherwise it and the round stay.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      outer_placement: "host", or "divided" over the devices of each region.
    """
    rounds, ranked, reason = schedule.one_round_late(sync_interval), None, None
    if adaptive_rank:
        rounds = ranked_rounds(sync_interval, rank, min_rank)
        ranked = RankedCompressors(_low_rank_int4, _resize)
        reason = (
            "its rank follows the updates, which other compressors do not have; pass "
            "adaptive_rank=False to replace it"
        )
    return Method(
        "dilocox",
        rounds,
        merge.replace(),
        nesterov(outer_lr, outer_momentum),
        compressor=_low_rank_int4(rank),
        ranked_compressors=ranked,
        outer_placement=outer_placement,
        why_uncompressed=reason,
    )


def _low_rank_int4(rank: int) -> Compressor:
    return error_feedback(low_rank(rank, factors=int4()))


def _resize(state, tree, rank: int):
    """What error feedback has not sent yet stays; the factors change their shape."""
    return state._replace(inner=resize(state.inner, tree, rank))
