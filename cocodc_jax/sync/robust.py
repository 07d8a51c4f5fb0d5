"""Robust means: which regions count if some send bad updates, and their weights.

A region measures the length l_m = ||Delta_m|| of its pseudo-gradient before encoding;
NaN means non-finite parameters or pseudo-gradient. The lengths of all regions are sent
with the messages, so that every region reaches the same verdict:

    left out, not finite:  l_m is NaN
    left out, an outlier:  l_m > exclude_above * median(l), over the finite ones
    weights:               those of the others, rescaled to sum 1

If no region is left, the mean is 0. A region that was left out is restored when the
sync is applied: parameters from the outer ones, a fresh inner optimizer, no residual.
If exclude_above is 2 or more, neither of two regions is ever an outlier, as their
median is their mean. If the median is 0, no region is. This protects from faults, not
from regions that report false lengths. A bad update can reach the model state before a
message: see `sync.model_state`.

The mean over the regions that count can be a robust one:

- "clip": sum_m w_m min(1, median(l) / l_m) Delta_m, norms clipped at their median.
  Adaptive robust clipping (Allouah et al., arXiv 2405.14432) also clips at one of the
  round's norms, which it chooses by the number of faulty regions; the median is ours.
  Sparse messages are clipped tensor by tensor instead, at the median norm that the
  tensor has in the regions' messages, as in deployments of SparseLoCo: see
  `messages.Compressed`.
- "trim:b": per entry the mean without the floor(b n) largest and smallest of n values
  (Yin et al., arXiv 1803.01498, Definition 2). Messages are gathered, and all are
  decoded at once: M times a fragment.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.sync.messages import Message
from cocodc_jax.transforms.compressor import zeroed
from cocodc_jax.transforms.numerics import (
    check_choice,
    down_to_median,
    is_finite,
    is_number,
    masked_median,
    widen,
)

PyTree = Any

COUNTED = 0
NOT_FINITE = 1
OUTLIER = 2
REASONS = {NOT_FINITE: "not finite", OUTLIER: "outlier"}
# Added to a verdict on a region that was restored for another sync since.
RESTORED = 4
# Name of the verdicts in `InFlight.kept`.
VERDICT = "verdict"
LENGTH_BYTES = 4
MEANS = ("weighted", "clip", "trim")


@dataclasses.dataclass(frozen=True)
class Robust:
    """How a mean over regions handles bad updates."""

    # A message longer than this many times the median over regions is left out;
    # infinity leaves out only messages that are not finite.
    exclude_above: float = math.inf
    mean: str = "weighted"  # One of `MEANS`.
    trim: float = 0.0  # b, share of the values dropped at either end, for "trim".

    def __post_init__(self):
        if not (is_number(self.exclude_above) and self.exclude_above > 1):
            raise ValueError(
                f"exclude_above={self.exclude_above!r} must be above 1, times the "
                "median length of the regions' messages"
            )
        check_choice("mean", self.mean, MEANS)
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim={self.trim} must be at least 0 and below 0.5")

    @classmethod
    def of(cls, exclude_above: float | None, robust_mean: str | None) -> Robust:
        """Parse the two arguments of methods."""
        above = math.inf if exclude_above is None else exclude_above
        if robust_mean is None:
            return cls(above)
        if robust_mean == "clip":
            return cls(above, "clip")

        name, _, share = str(robust_mean).partition(":")
        try:
            if name != "trim":
                raise ValueError

            trimmed = cls(mean="trim", trim=float(share))
        except ValueError:
            raise ValueError(
                f"robust_mean={robust_mean!r} must be 'clip', or 'trim:b' with b, the "
                "share dropped at either end, at least 0 and below 0.5"
            ) from None

        return dataclasses.replace(trimmed, exclude_above=above)

    def check(self, sync: Any) -> None:
        """Refuse syncs without a robust mean, or without others to compare with."""
        is_plain = self.mean == "weighted"
        compares = not is_plain or self.exclude_above < math.inf
        if sync.schedule.is_by_region and compares:
            raise ValueError("its regions come one by one")
        if is_plain:
            return

        if sync.message.only_weighted is not None:
            raise ValueError(sync.message.only_weighted)
        if not sync.message.average.is_linear:
            raise ValueError("what it takes the mean of are lengths and directions")
        if self.mean == "trim" and sync.weigh is not None:
            raise ValueError(
                "its regions are weighed, and a trimmed mean has no weights"
            )

    def judge(
        self, lengths: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return which regions are left out, and the weights of the others."""
        is_present = weights > 0
        finite = jnp.isfinite(lengths)
        median = masked_median(lengths, is_present & finite)
        is_far = (lengths > self.exclude_above * median) & (median > 0)
        verdict = jnp.where(finite, jnp.where(is_far, OUTLIER, COUNTED), NOT_FINITE)
        verdict = jnp.where(is_present, verdict, COUNTED).astype(jnp.int32)

        kept = jnp.where(verdict == COUNTED, weights, 0)
        total = kept.sum()
        kept = kept / jnp.where(total > 0, total, 1)

        weights = jnp.where((verdict == COUNTED).all(), weights, kept)
        if self.mean == "clip":
            scale = down_to_median(lengths, weights > 0)
            weights = weights * scale.astype(weights.dtype)
        return verdict, weights

    def combine(self, message: Message, messages: PyTree, weights: jax.Array) -> PyTree:
        """Return the mean of gathered messages; see `Message.combine`."""
        if self.mean != "trim":
            return message.combine(messages, weights)

        compressor = message.compressor()
        assert compressor is not None
        decoded = jax.vmap(compressor.decode)(messages)
        return jax.tree.map(lambda x: trimmed_mean(x, weights > 0, self.trim), decoded)


def length(params: PyTree, delta: PyTree) -> jax.Array:
    """Return one region's L2 norm of the message, NaN if anything is not finite."""
    finite = is_finite((params, delta))
    norm = optax.tree_utils.tree_norm(jax.tree.map(widen, delta))
    return jnp.where(finite & jnp.isfinite(norm), norm, jnp.nan)


def without(messages: PyTree, weights: jax.Array) -> PyTree:
    """Replace messages of weight 0 by zeros, as 0 times NaN is NaN.

    Messages `[M, ...]` have weights `[M]`, and a single one has a scalar.
    """
    return zeroed(messages, weights > 0)


def trimmed_mean(values: jax.Array, counted: jax.Array, trim: float) -> jax.Array:
    """Return the mean over `[M, ...]` without the largest and smallest, per entry."""
    num = counted.sum()
    shape = (-1, *(1,) * (values.ndim - 1))
    cut = jnp.floor(trim * num + 1e-6).astype(num.dtype)
    known = jnp.where(counted.reshape(shape), widen(values), jnp.inf)
    place = jnp.arange(len(values))
    inside = (place >= cut) & (place < num - cut)
    total = jnp.where(inside.reshape(shape), jnp.sort(known, axis=0), 0).sum(axis=0)
    return (total / jnp.maximum(inside.sum(), 1)).astype(values.dtype)


def left_out(verdict: np.ndarray) -> np.ndarray:
    """Return which regions a verdict restores, bool `[M]`."""
    return (verdict == NOT_FINITE) | (verdict == OUTLIER)


def reasons_of(verdict: np.ndarray) -> dict[int, str]:
    """Return why regions were left out, by region."""
    codes = enumerate((verdict % RESTORED).tolist())
    return {m: REASONS[code] for m, code in codes if code}
