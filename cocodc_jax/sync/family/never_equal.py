"""Methods whose regions are never made equal, each with outer parameters of its own."""

from cocodc_jax.sync import merge, outers, schedule
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms import compression


def noloco(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pair_pull: float = 0.7,
    pair_seed: int = 0,
) -> Method:
    """NoLoCo (arXiv 2506.10911): random pairs, no all-reduce.

    Args:
      sync_interval: H.
      outer_lr: beta.
      outer_momentum: mu, in [0, 1).
      pair_pull: gamma, usually beta; stable if mu < gamma < sqrt(2 + mu^2) (from
        memory).
      pair_seed: of the pairs, the same on every region.
    """
    return Method(
        "noloco",
        schedule.staggered(sync_interval),
        merge.replace(),
        outers.noisy_pairs(outer_lr, outer_momentum, pair_pull, pair_seed),
    )


def diloco_demo(
    sync_interval: int = 128,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str = "dct:32",
) -> Method:
    """DiLoCo with decoupled momentum (arXiv 2510.03371).

    Args:
      sync_interval: H, 128 to 500.
      outer_lr: eta.
      outer_momentum: beta, 0.9 or 0.95.
      compress: what is taken out of the momentum; without error feedback, which the
        method is.
    """
    return Method(
        "diloco_demo",
        schedule.staggered(sync_interval),
        merge.replace(),
        outers.decoupled_momentum(outer_lr, outer_momentum),
        compressor=compression.parse(compress),
    )
