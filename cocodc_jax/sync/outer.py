"""Outer optimizers: one model for all regions, or one per region.

If regions are never made equal (NoLoCo, decoupled momentum), or correct the mean by
local information (eager updates), outer parameters and optimizer state are *regional*
(`RegionalOuter`). Such a model can also correct the inner gradients until the next sync
(ADMM). Its parts are pure functions of one region's fragment; programs map them over
regions. Pseudo-gradients are old minus new, everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.sync.averages import Average
from cocodc_jax.sync.axis import GATHERED, SUMMED, Axis
from cocodc_jax.sync.messages import mean_of_finite
from cocodc_jax.sync.regions import matchings
from cocodc_jax.transforms.compressor import Compressor, message_bytes
from cocodc_jax.transforms.error_feedback import check_no_feedback
from cocodc_jax.transforms.numerics import (
    check_choice,
    check_outer,
    check_transform,
    is_finite,
    is_number,
)

PyTree = Any

GROUPS = ("all", "pairs", "ring")
Placement = Literal["host", "divided"]
PLACEMENTS = get_args(Placement)


class StartFn(Protocol):
    """The `start` of a `SharedOuter`."""

    def __call__(self, params: PyTree, opt_state: PyTree, /) -> PyTree:
        """Return the point that regions receive and measure pseudo-gradients from.

        Args:
          params: the outer fragment, a flat dict from path to array; *replicated*.
          opt_state: state of its outer optimizer, after the last outer step.

        Returns:
          A fragment of the same shapes and dtypes.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SharedOuter:
    """An outer optimizer of parameters that all regions share.

    Attributes:
      optimizer: takes the mean pseudo-gradient as its gradient; one independent state
        per fragment.
      placement: "host" keeps its state in host memory, "divided" shards it over the
        devices of each region, as ZeRO does; see `engine/placement.py`.
      needs: the extra arguments of its `update`, see `sync.needs`.
      start: the point that regions receive, continue from, and measure
        pseudo-gradients from, see `StartFn`; None is the outer fragment itself.
    """

    optimizer: optax.GradientTransformation
    placement: str = "host"
    needs: frozenset[str] = frozenset()
    start: StartFn | None = None

    def __post_init__(self):
        made_by = "optax.sgd(0.7, 0.9, nesterov=True)"
        check_transform("optimizer", self.optimizer, made_by)
        check_choice("outer_placement", self.placement, PLACEMENTS)
        check_choice("needs", self.needs, (set(), {"stale_params"}))

    @property
    def only_in_program(self) -> str | None:
        """Why messages must cross inside a compiled program; None if they need not."""
        if self.placement == "divided":
            return "its outer state is divided over the inner mesh"
        return None

    def placed(self, placement: str) -> SharedOuter:
        """Return the same with its state placed elsewhere."""
        return dataclasses.replace(self, placement=placement)

    def check(self, sync: Any) -> None:
        """Refuse `stale_params` of regions that began at different times."""
        if sync.schedule.is_by_region and "stale_params" in self.needs:
            raise ValueError(
                "needs={'stale_params'} is of one outer model that all regions began "
                "from, but with asynchronous(...) each has its own; leave it out"
            )


class OuterInitFn(Protocol):
    """The `init` of a `RegionalOuter`."""

    def __call__(self, params: PyTree, compressor: Compressor, /) -> PyTree:
        """Return the state of one region's outer fragment.

        Args:
          params: the fragment, a flat dict from path to array, at least float32.
          compressor: of the messages; its memory is part of the state.
        """
        ...


class OuterSendFn(Protocol):
    """The `send` of a `RegionalOuter`."""

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
        /,
    ) -> tuple[PyTree, PyTree]:
        """Make one region's message of a fragment.

        Args:
          params: the region's outer fragment; *regional*.
          state: from `init` or the last call.
          local: the region's local fragment. Pseudo-gradients are old minus new,
            `params - local`.
          compressor: encodes the message.
          key: PRNG key of the region and the sync.

        Returns:
          The message, a result of `compressor.encode`, and the new state. Where the
          message is not finite, nothing of it may stay in the state.
        """
        ...


class OuterReceiveFn(Protocol):
    """The `receive` of a `RegionalOuter`."""

    def __call__(
        self, params: PyTree, state: PyTree, arrived: PyTree, num_regions: int, /
    ) -> tuple[PyTree, PyTree]:
        """Take the outer step of one region.

        Args:
          params: the region's outer fragment; *regional*.
          state: after its last `send`.
          arrived: mean of the decoded messages of the region's group that are finite.
            Its norm is recorded, or that of its `pseudo_gradient` if it is a named
            tuple with one.
          num_regions: M, of all groups.

        Returns:
          The new outer fragment, which the merge receives, and the new state.
        """
        ...


class OuterCorrectFn(Protocol):
    """The `correct` of a `RegionalOuter`, called at every inner step."""

    def __call__(
        self,
        gradient: PyTree,
        local: PyTree,
        params: PyTree,
        state: PyTree,
        num_regions: int,
        /,
    ) -> PyTree:
        """Return the gradient that the region's inner optimizer receives.

        Args:
          gradient: of the region's loss, one fragment.
          local: the region's local fragment.
          params: its outer fragment as of the last sync.
          state: of its outer optimizer as of the last sync.
          num_regions: M.
        """
        ...


class OuterLandFn(Protocol):
    """The `land` of a `RegionalOuter`."""

    def __call__(self, state: PyTree, /) -> PyTree:
        """Return the state for applying the last mean in flight.

        It is called where no message is sent in between, as at the end of a run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RegionalOuter:
    """An outer optimizer of regional parameters; its functions compute for one region.

    Attributes:
      name: for records and error messages.
      init: returns the state of a fragment; see `OuterInitFn`.
      send: makes a message; see `OuterSendFn`.
      receive: takes an outer step; see `OuterReceiveFn`.
      group: regions whose messages are averaged: "all", "pairs" (itself and a partner,
        drawn anew for every sync) or "ring" (the previous and the next region, without
        its own).
      seed: of the draw of pairs, equal in every region.
      correct: changes the gradient of every inner step; None is no change.
      land: changes the state before the last mean in flight is applied and no other
        is sent; None is no change.
      has_feedback: whether compressors' errors are sent later without error feedback.
      why_uncompressed: why its messages cannot be compressed; None if they can.
    """

    name: str
    init: OuterInitFn
    send: OuterSendFn
    receive: OuterReceiveFn
    group: str = "all"
    seed: int = 0
    correct: OuterCorrectFn | None = None
    land: OuterLandFn | None = None
    has_feedback: bool = False
    why_uncompressed: str | None = None

    needs = frozenset()
    start = None
    only_in_program = "each region has outer parameters of its own"

    def __post_init__(self):
        check_choice("group", self.group, GROUPS)

    @property
    def way(self) -> str:
        """How its messages cross regions, see `sync.axis`."""
        return GATHERED if self.group == "all" else SUMMED

    def leave(
        self, axis: Axis, message: PyTree, compressor: Compressor, row: jax.Array
    ) -> PyTree:
        """Begin to send messages: average those of each region's small group.

        `row`, an int32 scalar equal in all regions, selects the row of `matchings` that
        pairs them. Returns what crosses by `way`.
        """
        mean = axis.map(functools.partial(mean_of_two, compressor))
        if self.group == "pairs":
            partners = matchings(axis.num_regions)
            return mean(message, axis.partner(message, row, partners))
        if self.group == "ring":
            return mean(*(axis.neighbour(message, by) for by in (-1, 1)))
        return message

    def arrive(self, crossed: PyTree, compressor: Compressor) -> PyTree:
        """Return the mean of the messages of a region's group that are finite."""
        if self.group == "all":
            return mean_of_finite(crossed, compressor)
        return crossed

    def num_bytes(self, part: PyTree, compressor: Compressor) -> int:
        """Return the bytes of one region's message of a fragment of shapes `part`."""

        def make_message(part: PyTree) -> PyTree:
            state = self.init(part, compressor)
            key = jax.random.key(0)
            message, _ = self.send(part, state, part, compressor, key)
            return message

        return message_bytes(jax.eval_shape(make_message, part))

    def placed(self, placement: str) -> RegionalOuter:
        """Refuse any placement but "host", the default."""
        if placement == "host":
            return self
        raise ValueError("it has no one outer model to divide")

    def check(self, sync: Any) -> None:
        """Refuse parts of a `method.Sync` that need a shared outer model."""
        compressor = sync.message.compressor()
        if compressor is not None and self.why_uncompressed:
            raise ValueError(self.why_uncompressed)

        if compressor is not None and self.has_feedback:
            check_no_feedback(compressor)
        if sync.has_weights or sync.merge.has_feedback:
            raise ValueError(
                "it has outer parameters in every region, and can neither weigh "
                "regions, nor take in some of them alone, nor remember what merges drop"
            )
        if sync.message.only_in_program:
            raise ValueError(
                f"{type(sync.message).__name__} sums pseudo-gradients on their way, "
                "for one outer model, but it has outer parameters in every region"
            )

        mean_over = getattr(sync.message, "mean_over", "all")
        if mean_over != "all" or getattr(sync.message, "clip", False):
            raise ValueError("it takes plain means: use sparse_mean='all', clip=False")
        if sync.message.average != Average():
            raise ValueError(
                f"{type(sync.message.average).__name__} makes one pseudo-gradient of "
                "all, but it has outer parameters in every region"
            )
        if sync.robust is not None:
            raise ValueError(
                "it has outer parameters in every region, and none to restore one from"
            )


Outer = SharedOuter | RegionalOuter


def nesterov(
    outer_lr: float | jax.Array, outer_momentum: float | jax.Array
) -> SharedOuter:
    """Make outer Nesterov: m <- mu m + Delta; theta^g <- theta^g - eta (Delta + mu m).

    Equal to `optax.sgd(eta, mu, nesterov=True)`; read from the authors' code. eta is
    positive and finite, mu in [0, 1); arrays are not checked.
    """
    return SharedOuter(nesterov_sgd(outer_lr, outer_momentum))


def nesterov_sgd(
    outer_lr: float | jax.Array, outer_momentum: float | jax.Array
) -> optax.GradientTransformation:
    """Return the Optax optimizer that `nesterov` uses."""
    check_outer(outer_lr, outer_momentum)
    # A traced momentum of 0 keeps a trace too.
    has_trace = not is_number(outer_momentum) or outer_momentum > 0
    momentum = outer_momentum if has_trace else None
    return optax.sgd(outer_lr, momentum, nesterov=bool(has_trace))


def pseudo_gradient(params: PyTree, local: PyTree) -> PyTree:
    """Return `params - local`, old minus new, in the outer dtype."""
    return jax.tree.map(lambda o, x: o - x.astype(o.dtype), params, local)


def mean_of_two(compressor: Compressor, one: PyTree, other: PyTree) -> PyTree:
    """Return the mean of two decoded messages, or the one that is finite."""
    one_decoded = compressor.decode(one)
    other_decoded = compressor.decode(other)
    one_finite = is_finite(one)
    other_finite = is_finite(other)

    def mean(x: jax.Array, y: jax.Array) -> jax.Array:
        first = jnp.where(one_finite, x, y)
        second = jnp.where(other_finite, y, x)
        return (first + second) / 2

    return jax.tree.map(mean, one_decoded, other_decoded)
