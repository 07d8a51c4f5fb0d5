"""Methods whose regions all send and take at the same steps, by one outer model."""

import dataclasses

import optax

from cocodc_jax.sync import merge, paced, schedule
from cocodc_jax.sync.family.nesterov import nesterov
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.rings import Rings
from cocodc_jax.transforms import compression


def diloco(
    sync_interval: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9
) -> Method:
    """DiLoCo (arXiv 2311.08105, algorithm 1): the whole model, blocking, every H steps.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    return Method(
        "diloco",
        schedule.staggered(sync_interval),
        merge.replace(),
        nesterov(outer_lr, outer_momentum),
    )


def streaming_diloco(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 1,
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
) -> Method:
    """Streaming DiLoCo (arXiv 2501.18512, algorithm 2): fragments, overlap, mixing.

    Args:
      sync_interval: H, a multiple of `num_fragments`.
      num_fragments: K.
      delay_steps: tau, inner steps between a sync's start and its application; "auto"
        is what syncs turn out to take, see `paced`.
      mixing_alpha: weight on the local fragment, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is H.
    """
    return Method(
        "streaming_diloco",
        paced.staggered(sync_interval, num_fragments, delay_steps, max_delay_steps),
        merge.mix(mixing_alpha),
        nesterov(outer_lr, outer_momentum),
        fragment_strategy,
    )


def loscar(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: str = "strided",
    max_delay_steps: int | None = None,
) -> Method:
    """LOSCAR-SGD's merge (arXiv 2605.20866): the local progress replayed, uncorrected.

    theta^m <- theta^g + (theta^m - staged); CoCoDC without compensation, on Streaming
    DiLoCo's schedule.

    Args:
      sync_interval: H, a multiple of `num_fragments`.
      num_fragments: K.
      delay_steps: tau, or "auto".
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is H.
    """
    return Method(
        "loscar",
        paced.staggered(sync_interval, num_fragments, delay_steps, max_delay_steps),
        merge.compensate(optax.identity()),
        nesterov(outer_lr, outer_momentum),
        fragment_strategy,
    )


def sparseloco(
    sync_interval: int = 15,
    outer_lr: float = 1.0,
    compress: str = "ef:0.95+chunked:32+int2:32",
) -> Method:
    """SparseLoCo (arXiv 2508.15706): 2-bit values of the top of each chunk.

    e <- b e + Delta; q = 2-bit of the top-k of each 64 x 64 chunk of e;
    e <- e - q; theta <- theta - eta mean q. No outer momentum: the error feedback
    is one. Defaults: b 0.95, k 32, eta 1, H 15 to 30.

    Args:
      sync_interval: H.
      outer_lr: eta.
      compress: the compressor with its error feedback.
    """
    return dataclasses.replace(
        diloco(sync_interval, outer_lr, outer_momentum=0.0),
        name="sparseloco",
        compressor=compression.parse(compress),
    )


def muloco(
    sync_interval: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    compress: str = "ef+int2",
) -> Method:
    """MuLoCo (arXiv 2505.23725): DiLoCo around Muon, 2-bit deltas, error feedback.

    Args:
      sync_interval: H.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      compress: the compressor with its error feedback.
    """
    return dataclasses.replace(
        diloco(sync_interval, outer_lr, outer_momentum),
        name="muloco",
        compressor=compression.parse(compress),
        inner_optimizer="muon",
    )


def multi_ring(
    sync_interval: int = 30, num_rings: int = 2, outer_lr: float = 1.0
) -> Method:
    """Ravnest (arXiv 2401.01728): regions are clusters, averaged by several rings.

    theta <- theta - eta mean(theta - theta^m), which with eta 1 is the mean of the
    parameters. Each ring carries its share of the model in its own order.

    Args:
      sync_interval: H.
      num_rings: how many rings at once, at least 1.
      outer_lr: eta.
    """
    return dataclasses.replace(
        diloco(sync_interval, outer_lr, outer_momentum=0.0),
        name="multi_ring",
        rings=Rings(num_rings),
        why_uncompressed="its rings pass on partial sums, which cannot be summed while "
        "they are encoded",
    )


def local_training_ef(
    sync_interval: int = 30,
    outer_lr: float = 1.0,
    compress: str = "ef+topk:0.1",
) -> Method:
    """Compressed local training: the mean of compressed local progress, with memory.

    e <- e + Delta; q = C(e); e <- e - q; theta <- theta - eta mean q. With eta 1 and
    no compression this is local SGD (federated averaging).

    Source: Qsparse-local-SGD (Basu et al., arXiv 1906.02367), from memory.

    Args:
      sync_interval: H.
      outer_lr: eta.
      compress: the compressor with its error feedback.
    """
    return dataclasses.replace(
        diloco(sync_interval, outer_lr, outer_momentum=0.0),
        name="local_training_ef",
        compressor=compression.parse(compress),
    )


def snoo(
    sync_interval: int = 20, outer_lr: float = 0.7, outer_momentum: float = 0.9
) -> Method:
    """SNOO (arXiv 2510.15830): the outer Nesterov step with one region.

    Args:
      sync_interval: H.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
    """
    return dataclasses.replace(
        diloco(sync_interval, outer_lr, outer_momentum),
        name="snoo",
        num_regions=1,
        why_uncompressed="a region alone sends nothing",
    )


def apart() -> Method:
    """Regions that never exchange anything: experts, merged when they are done.

    What is evaluated is the average of their parameters; `experiments.merge_experts`
    makes an ensemble with a router of them.
    """
    return Method(
        "apart",
        None,
        merge.replace(),
        optax.identity(),
        why_uncompressed="nothing is sent",
    )
