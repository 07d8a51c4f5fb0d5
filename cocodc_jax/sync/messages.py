"""How regions send a fragment: uncompressed, compressed, low-rank, or by rings.

A message is a value. It defines how its parts are encoded and averaged, how they cross
regions (`way`, `leave`), and how many bytes it has. It also has the reason if it cannot
be compressed further, or must cross regions inside a compiled program. The exchange
carries it. Messages that are summed while they cross, `ByRings` and `SummedFactors`,
are in `summed.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, get_args

import jax
import jax.numpy as jnp

from cocodc_jax.sync.averages import Average
from cocodc_jax.sync.axis import GATHERED, SUMMED, Axis
from cocodc_jax.transforms.compressor import (
    Compressor,
    check_compressor,
    message_bytes,
    without_bad,
)
from cocodc_jax.transforms.decoupled import average_duplicates
from cocodc_jax.transforms.numerics import cast_like, check_choice, widen
from cocodc_jax.transforms.sparsify import SparseCompressor

PyTree = Any

MeanOver = Literal["senders", "all"]
MEANS = get_args(MeanOver)


@dataclasses.dataclass(frozen=True)
class Message:
    """How a pseudo-gradient is sent; base class of the messages.

    A new message overrides `compressor` if it is encoded, else `encoded` and
    `num_bytes` if its size is not that of the pseudo-gradient. Methods are pure and
    compute for one region, except `combine`.

    Attributes:
      average: the function of pseudo-gradients that is sent and averaged.
    """

    average: Average = dataclasses.field(default=Average(), kw_only=True)

    # Why it must cross regions inside a compiled program; None if it need not.
    only_in_program: ClassVar[str | None] = None
    # Why its mean must be a weighted one, see `sync.robust`; None if it need not.
    only_weighted: ClassVar[str | None] = None
    # Why it cannot be compressed; None if it can.
    why_uncompressed: ClassVar[str | None] = None
    # Whether the schedule must set a rank for each message.
    is_ranked: ClassVar[bool] = False

    def at(self, rank: int) -> Message:
        """Return the message that a sync sends, of a rank that its schedule sets.

        Rank 0 is that of a schedule that sets none.
        """
        return self

    def compressor(self) -> Compressor | None:
        """Return the compressor; None if messages are uncompressed."""
        return None

    @property
    def way(self) -> str:
        """How it crosses regions, see `sync.axis`."""
        return SUMMED if self.compressor() is None else GATHERED

    def leave(
        self, axis: Axis, sent: PyTree, memory: PyTree, weights: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Begin to send messages, unless they are gathered.

        Args:
          axis: the regions that the code holds.
          sent: their messages.
          memory: their compressors' states.
          weights: theirs in the mean.

        Returns:
          What crosses by `way`, and the new memory.
        """
        return axis.sum(sent, weights), memory

    def compressed(self, compressor: Compressor) -> Message:
        """Return the message that `compressor` makes in place of this one's."""
        if self.why_uncompressed:
            raise ValueError(self.why_uncompressed)
        self.average.check_compressor(compressor)
        return Compressed(compressor, average=self.average)

    def encoded(self, part: PyTree) -> PyTree:
        """Return the shapes of one region's message of a fragment like `part`."""
        compressor = self.compressor()
        key = jax.eval_shape(lambda: jax.random.key(0))
        averaged = jax.eval_shape(self.average.before, part, key)
        if compressor is None:
            return averaged

        memory = jax.eval_shape(compressor.init, averaged)
        message, _ = jax.eval_shape(compressor.encode, averaged, memory, key)
        return message

    def num_bytes(self, part: PyTree, num_regions: int) -> int:
        """Return the bytes that one of M regions sends for a sync of shapes `part`."""
        return message_bytes(self.encoded(part))

    def init(self, part: PyTree) -> PyTree:
        """Return one region's initial memory of its compressor.

        Args:
          part: one region's fragment, a flat dict from path to array.

        Returns:
          The memory, `()` of messages that are not compressed.
        """
        compressor = self.compressor()
        if compressor is None:
            return ()

        key = jax.random.key(0) if self.average.draws else None
        return compressor.init(self.average.before(part, key))

    def combine(self, messages: PyTree, weights: jax.Array) -> PyTree:
        """Return the mean of gathered, encoded messages.

        Args:
          messages: of all regions, leaves `[M, ...]`.
          weights: `[M]` of sum 1; 0 is a region that did not take part. If the
            compressor has a memory, messages that are not finite get weight 0 too.

        Returns:
          The decoded mean, in the dtypes that the compressor decodes to.
        """
        compressor = self.compressor()
        assert compressor is not None
        return weighted_sum_of_decoded(messages, weights, compressor)

    def resized(self, state: PyTree, part: PyTree) -> PyTree:
        """Return a state of another rank as one of this message, of shapes `part`."""
        return state

    def restored(self, state: PyTree, fresh: PyTree) -> PyTree:
        """Return the memory of a region that restarts.

        Args:
          state: its memory until now.
          fresh: what `init` returns.
        """
        return fresh


@dataclasses.dataclass(frozen=True)
class AsIs(Message):
    """Uncompressed pseudo-gradients, all-reduced: only their sum is needed."""


@dataclasses.dataclass(frozen=True)
class Compressed(Message):
    """Encoded pseudo-gradients, gathered from all regions and decoded on arrival.

    Attributes:
      by: the compressor.
      mean_over: regions that an entry is averaged over: "all", where an entry that a
        region did not send counts as zero, or "senders", the regions whose messages
        have it; messages that are not sparse have all.
      clip: whether each tensor of a message is clipped to the median norm that it has
        in the regions' messages; of sparse messages only.
    """

    by: Compressor
    mean_over: str = "all"
    clip: bool = False

    def __post_init__(self):
        check_compressor("by", self.by)
        check_choice("sparse_mean", self.mean_over, MEANS)
        if self.clip and not isinstance(self.by, SparseCompressor):
            raise ValueError(
                f"clip=True has no meaning for compress={self.by.name!r}, whose "
                "messages are not sparse; pass robust_mean='clip'"
            )

        hides_entries = self.by.is_sparse and not isinstance(self.by, SparseCompressor)
        if self.mean_over == "senders" and hides_entries:
            raise ValueError(
                f"sparse_mean='senders' needs messages that tell which entries they "
                f"have, and those of compress={self.by.name!r} do not; pass 'all'"
            )

    @property
    def only_weighted(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why its mean must be a weighted one; None if it need not."""
        return (
            "a region's message does not have every entry"
            if self.by.is_sparse
            else None
        )

    def compressor(self) -> Compressor:
        """Return the compressor."""
        return self.by

    def compressed(self, compressor: Compressor) -> Message:
        """Return the same by another compressor."""
        self.average.check_compressor(compressor)
        return dataclasses.replace(self, by=compressor)

    def combine(self, messages: PyTree, weights: jax.Array) -> PyTree:
        """Return the mean over all, or entry by entry over those that sent it."""
        over_all = self.mean_over == "all"
        if self.clip or (not over_all and isinstance(self.by, SparseCompressor)):
            return average_duplicates(
                messages=messages,
                compressor=self.by,
                weights=weights,
                clip=self.clip,
                over_all=over_all,
            )
        return super().combine(messages, weights)


class ResizeFn(Protocol):
    """The `resize` of a `Ranked` message."""

    def __call__(self, memory: PyTree, tree: PyTree, rank: int, /) -> PyTree:
        """Return a compressor's memory for messages of another rank.

        Args:
          memory: of any rank, of one region.
          tree: what is encoded, or its shapes.
          rank: of the next message.

        Returns:
          A memory with the shapes of `of(rank).init(tree)`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Ranked(Message):
    """Encoded pseudo-gradients whose rank the schedule sets for each message.

    Attributes:
      of: `of(rank) -> Compressor`.
      resize: changes the rank of a compressor's memory; see `ResizeFn`.
      rank: of this message; in a method, the initial one.
    """

    of: Callable[[int], Compressor]
    resize: ResizeFn
    rank: int

    why_uncompressed = (
        "its rank follows the updates, which other compressors do not have; pass "
        "adaptive_rank=False to replace it"
    )
    is_ranked = True

    def at(self, rank: int) -> Ranked:
        """Return the message of a rank; 0 is this one."""
        return dataclasses.replace(self, rank=rank) if rank else self

    def compressor(self) -> Compressor:
        """Return the compressor of the message's rank."""
        return self.of(self.rank)

    def resized(self, state: PyTree, part: PyTree) -> PyTree:
        """Return a state of any rank as one of this; see `Message.resized`."""
        return self.resize(state, part, self.rank)


def mean_of_decoded(messages: PyTree, compressor: Compressor) -> PyTree:
    """Return the mean over the leading axis of decoded `[M, ...]` messages.

    Summed in at least float32, one message at a time: M decoded trees would take M
    times the memory.
    """
    return weighted_sum_of_decoded(messages, _equal_weights(messages), compressor)


def mean_of_finite(messages: PyTree, compressor: Compressor) -> PyTree:
    """Return the mean of those messages that are finite; see `mean_of_decoded`."""
    messages, weights = without_bad(messages, _equal_weights(messages))
    return weighted_sum_of_decoded(messages, weights, compressor)


def _equal_weights(messages: PyTree) -> jax.Array:
    num_messages = jax.tree.leaves(messages)[0].shape[0]
    return jnp.full(num_messages, 1 / num_messages)


def weighted_sum_of_decoded(
    messages: PyTree, weights: jax.Array, compressor: Compressor
) -> PyTree:
    """Return the sum of decoded messages, with weights `[M]`.

    If the compressor has a memory, messages that are not finite are left out.
    """
    if compressor.has_memory:
        messages, weights = without_bad(messages, weights)

    def weighted(i: int | jax.Array) -> PyTree:
        tree = compressor.decode(jax.tree.map(lambda x: x[i], messages))
        return jax.tree.map(lambda x: weights[i] * widen(x), tree)

    def add(i: jax.Array, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, weighted(i))

    total = jax.lax.fori_loop(1, weights.shape[0], add, weighted(0))
    first_message = jax.tree.map(lambda x: x[0], messages)
    return cast_like(total, jax.eval_shape(compressor.decode, first_message))
