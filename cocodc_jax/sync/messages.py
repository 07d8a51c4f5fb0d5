"""What regions send of a fragment: as it is, compressed, of a rank, or by rings.

A message is a value. It tells how its parts are encoded and what of them is taken
together, gives its own size in bytes, and says itself why it cannot be compressed any
further or crosses regions in a compiled program only. How it crosses is no matter of
its own: that is the runtime's route.

- `AsIs`: pseudo-gradients, summed on their way.
- `Compressed`: encoded arrays, gathered from all regions and decoded on arrival; the
  mean is over all regions, or entry by entry over those that sent the entry.
- `Ranked`: the same, of a rank that the schedule sets for each message.
- `ByRings` (`rings.py`): summed by several rings at once.
- `MaskedCore` (`masked.py`): a core, and entries of each region's own.
- `SummedFactors` (`factors.py`): low-rank factors, summed one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.sync.averages import Average
from cocodc_jax.transforms.compressor import (
    Compressor,
    check_compressor,
    message_bytes,
)
from cocodc_jax.transforms.decoupled import average_duplicates
from cocodc_jax.transforms.numerics import widen
from cocodc_jax.transforms.sparsify import SparseCompressor

PyTree = Any

MEANS = ("senders", "all")


@dataclasses.dataclass(frozen=True)
class Message:
    """How a pseudo-gradient is sent; `AsIs` and its relatives.

    Attributes:
      average: what of it the mean over regions is taken of; that is what is sent.
    """

    average: Average = dataclasses.field(default=Average(), kw_only=True)

    @property
    def only_in_program(self) -> str | None:
        """Why it can cross regions in a compiled program only; None if it need not."""
        return None

    @property
    def only_weighted(self) -> str | None:
        """Why its mean can be a weighted one only, see `sync.robust`; None if not."""
        return None

    @property
    def is_ranked(self) -> bool:
        """Whether the schedule must set a rank for each message."""
        return False

    @property
    def is_numbered(self) -> bool:
        """Whether a region must know its number among those that it is bound to."""
        return False

    def compressor(self, rank: int = 0) -> Compressor | None:
        """Return the compressor of messages of `rank`; None sends them as they are."""
        del rank
        return None

    def compressed(self, compressor: Compressor) -> Message:
        """Return the message that `compressor` makes in place of this one's.

        Raises:
          ValueError: saying why there can be none.
        """
        self.average.check_compressor(compressor)
        return Compressed(compressor, average=self.average)

    def encoded(self, part: PyTree, rank: int = 0) -> PyTree:
        """Return the shapes of one region's message of a fragment like `part`."""
        compressor = self.compressor(rank)
        key = jax.eval_shape(lambda: jax.random.key(0))
        part = jax.eval_shape(self.average.before, part, key)
        if compressor is None:
            return part
        state = jax.eval_shape(compressor.init, part)
        return jax.eval_shape(compressor.encode, part, state, key)[0]

    def num_bytes(self, part: PyTree, num_regions: int, rank: int = 0) -> int:
        """Return the bytes that one of several regions sends for a sync.

        Args:
          part: shapes of the fragment.
          num_regions: M.
          rank: of the message, where the schedule sets one.
        """
        del num_regions
        return message_bytes(self.encoded(part, rank))

    def init(self, part: PyTree, rank: int = 0) -> PyTree:
        """Return what one region's compressor remembers before its first message."""
        compressor = self.compressor(rank)
        if compressor is None:
            return ()
        key = jax.random.key(0) if self.average.draws else None
        return compressor.init(self.average.before(part, key))

    def combine(self, messages: PyTree, weights: jax.Array, rank: int = 0) -> PyTree:
        """Return the mean of what gathered messages say; for encoded ones only.

        Args:
          messages: of all regions, leaves `[M, ...]`.
          weights: `[M]`, of sum 1; 0 is a region that did not take part.
          rank: of the messages, where the schedule sets one.
        """
        compressor = self.compressor(rank)
        assert compressor is not None
        return weighted_sum_of_decoded(messages, weights, compressor)

    def bind(self, num_regions: int) -> Message:
        """Return the message of one of so many regions."""
        del num_regions
        return self

    def of_regions(self, state: PyTree) -> PyTree:
        """Return the regions' first compressor states.

        Args:
          state: what `init` gave, the same for all, leaves `[R, ...]`.
        """
        return state

    def restored(self, state: PyTree, fresh: PyTree) -> PyTree:
        """Return what compressors remember of regions that begin anew, `[R, ...]`.

        Args:
          state: of the regions as they are.
          fresh: before the first message.
        """
        del state
        return fresh


@dataclasses.dataclass(frozen=True)
class AsIs(Message):
    """Pseudo-gradients as they are; only their sum is wanted."""


@dataclasses.dataclass(frozen=True)
class Compressed(Message):
    """Encoded pseudo-gradients.

    Attributes:
      by: the compressor.
      mean_over: whom an entry is averaged over: "all", where one that a region did not
        send counts as zero, or "senders", the regions whose messages have it. Messages
        that do not tell which entries they carry, have all.
    """

    by: Compressor
    mean_over: str = "all"

    def __post_init__(self):
        """Check the compressor, and the name."""
        check_compressor("by", self.by)
        if self.mean_over not in MEANS:
            raise ValueError(
                f"sparse_mean={self.mean_over!r} is unknown; use one of {MEANS}"
            )

    @property
    def only_weighted(self) -> str | None:
        """Why its mean can be a weighted one only; None if not."""
        if self.by.is_sparse:
            return "a region's message does not have every entry"
        return None

    def compressor(self, rank: int = 0) -> Compressor:
        """Return the compressor, the same for every rank."""
        del rank
        return self.by

    def compressed(self, compressor: Compressor) -> Message:
        """Return the same by another compressor."""
        self.average.check_compressor(compressor)
        return dataclasses.replace(self, by=compressor)

    def combine(self, messages: PyTree, weights: jax.Array, rank: int = 0) -> PyTree:
        """Return the mean over all, or entry by entry over those that sent it."""
        if self.mean_over == "senders" and isinstance(self.by, SparseCompressor):
            return average_duplicates(messages, self.by, weights)
        return super().combine(messages, weights, rank)


@dataclasses.dataclass(frozen=True)
class Ranked(Message):
    """Encoded pseudo-gradients whose compressors differ in their rank alone.

    Attributes:
      of: `of(rank) -> Compressor`.
      resize: `resize(state, tree, rank) -> state`: of a state of `of(any rank)` one of
        `of(rank)`, for a `tree` of these shapes.
      first: the rank before the schedule has set one.
    """

    of: Callable[[int], Compressor]
    resize: Callable[[PyTree, PyTree, int], PyTree]
    first: int

    @property
    def is_ranked(self) -> bool:
        """Whether the schedule must set a rank for each message: yes."""
        return True

    def compressor(self, rank: int = 0) -> Compressor:
        """Return the compressor of `rank`; 0 is the first."""
        return self.of(rank or self.first)

    def compressed(self, compressor: Compressor) -> Message:
        """Refuse.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "its rank follows the updates, which other compressors do not have; pass "
            "adaptive_rank=False to replace it"
        )


def mean_of_decoded(messages: PyTree, compressor: Compressor) -> PyTree:
    """Return the mean over the leading axis of what `[M, ...]` messages decode to.

    Summed in at least float32, one message at a time: M decoded trees would take M
    times the memory.
    """
    num_messages = jax.tree.leaves(messages)[0].shape[0]
    weights = jnp.full(num_messages, 1 / num_messages)
    return weighted_sum_of_decoded(messages, weights, compressor)


def weighted_sum_of_decoded(
    messages: PyTree, weights: jax.Array, compressor: Compressor
) -> PyTree:
    """Return the sum of what messages decode to, with weights `[M]`."""

    def decoded(i):
        message = compressor.decode(jax.tree.map(lambda x: x[i], messages))
        return jax.tree.map(lambda x: weights[i] * widen(x), message)

    total = jax.lax.fori_loop(
        1,
        weights.shape[0],
        lambda i, total: jax.tree.map(jnp.add, total, decoded(i)),
        decoded(0),
    )
    dtypes = jax.eval_shape(compressor.decode, jax.tree.map(lambda x: x[0], messages))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, dtypes)
