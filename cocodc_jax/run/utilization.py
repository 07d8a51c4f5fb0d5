"""Model FLOPs utilization (MFU): a run's own operations over its devices' peak.

With f the model's operations per token (`models.flops_per_token`, PaLM's convention,
arXiv 2204.02311, appendix B: forward and backward, without recomputation), P the sum of
the devices' peaks and x the tokens per second,

    MFU = f x / P = x / (P / f)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cocodc_jax import models
from cocodc_jax.chips import peak_flops


def peak_tokens_per_second(
    model: models.TransformerConfig,
    sequence_length: int,
    devices: Iterable[Any],
) -> float | None:
    """Return the tokens per second at which MFU is 1."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        return None
    return sum(known) / models.flops_per_token(model, sequence_length)


def mfu(tokens_per_second: float | None, peak: float | None) -> float | None:
    """Return the utilization, None if the rate or `peak_tokens_per_second` is unknown.

    >>> mfu(200.0, 500.0), mfu(200.0, None)
    (0.4, None)
    """
    if tokens_per_second is None or peak is None:
        return None
    return tokens_per_second / peak
