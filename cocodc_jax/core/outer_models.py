"""Outer models in a transform: one for all regions, or one for each.

Every function computes for one region and one fragment. `outer_model` chooses the kind;
no other code of a transform depends on it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.core import sync as core
from cocodc_jax.core.axis import NamedAxis
from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.outer import RegionalOuter, SharedOuter
from cocodc_jax.sync.regions import Regions, matchings

PyTree = Any


class Kept(NamedTuple):
    """The state of a region's fragment between syncs."""

    outer: Fragment  # Outer parameters, at least float32.
    opt_state: PyTree  # Of the outer optimizer.
    memory: PyTree  # Of the compressor.


class Leaving(NamedTuple):
    """A region's fragment as its sync starts."""

    part: Fragment  # The local fragment.
    key_data: jax.Array  # Of the region's key of this step.
    sync_key: jax.Array  # Equal in all regions, see `averages.sync_key`.


class OuterModel(Protocol):
    """How fragments leave an outer model, and means arrive at it."""

    def init(self, outer: Fragment) -> tuple[Kept, PyTree]:
        """Return the state before the first step, and the shapes of a mean."""
        ...

    def num_bytes(self, outer: Fragment, num_regions: int) -> int:
        """Return the bytes of one region's message."""
        ...

    def received(self, kept: Kept) -> Fragment:
        """Return the outer fragment as regions receive it."""
        ...

    def start(
        self, axis: NamedAxis, kept: Kept, leaving: Leaving
    ) -> tuple[PyTree, Kept]:
        """Send a fragment; return the mean, and the new state."""
        ...

    def finish(
        self,
        axis: NamedAxis,
        kept: Kept,
        part: Fragment,
        mean: PyTree,
        seen: needs.MergeContext,
    ) -> core.Finished:
        """Apply a mean to the local fragment `part`; see `core.sync.finish`.

        `seen` is the context of the merge rule, whose `local` and `outer` are filled in
        here; its `kept` has the staged copy if the rule needs it or feeds back what it
        drops.
        """
        ...


def outer_model(sync: Sync) -> OuterModel:
    """Return the outer model of these syncs."""
    if isinstance(sync.outer, RegionalOuter):
        return _RegionalModel(sync, sync.outer)
    return _SharedModel(sync, sync.outer)


@dataclasses.dataclass(frozen=True)
class _SharedModel:
    """One outer model, equal in all regions."""

    sync: Sync
    outer: SharedOuter

    def init(self, outer: Fragment) -> tuple[Kept, PyTree]:
        memory = self.sync.message.init(outer)
        return Kept(outer, self.outer.optimizer.init(outer), memory), outer

    def num_bytes(self, outer: Fragment, num_regions: int) -> int:
        return self.sync.message.num_bytes(outer, num_regions)

    def received(self, kept: Kept) -> Fragment:
        if self.outer.start is None:
            return kept.outer
        return self.outer.start(kept.outer, kept.opt_state)

    def start(
        self, axis: NamedAxis, kept: Kept, leaving: Leaving
    ) -> tuple[PyTree, Kept]:
        crossing = _SharedCrossing(
            sync=self.sync,
            axis=axis,
            anchor=self.received(kept),
            kept=kept,
            leaving=leaving,
        )
        mean, _, memory = core.start(crossing)
        return mean, kept._replace(memory=memory)

    def finish(
        self,
        axis: NamedAxis,
        kept: Kept,
        part: Fragment,
        mean: PyTree,
        seen: needs.MergeContext,
    ) -> core.Finished:
        finishing = _SharedFinishing(model=self, part=part, mean=mean, seen=seen)
        return core.finish(finishing, kept.outer, kept.opt_state, kept.memory)


@dataclasses.dataclass(frozen=True)
class _SharedCrossing:
    """A `core.sync.Crossing` of one region."""

    sync: Sync
    axis: NamedAxis
    anchor: Fragment
    kept: Kept
    leaving: Leaving

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Weights `[M]` of the regions in the mean."""
        participating = getattr(self.sync.schedule, "participating", None)
        regions = Regions.alike(self.axis.num_regions)
        return regions.weights(0, 1, self.sync.weigh, participating)

    @property
    def drawn(self) -> jax.Array | None:
        """The sync's key, if its average draws."""
        return self.leaving.sync_key if self.sync.message.average.draws else None

    def leave(self) -> tuple[core.Left, PyTree]:
        region_weight = self.axis.held(jnp.asarray(self.weights, float))
        are_partial = bool((self.weights == 0).any())

        sent, memory = core.encode_all(
            sync=self.sync,
            axis=self.axis,
            part=self.leaving.part,
            anchor=self.anchor,
            memory=self.kept.memory,
            key_data=self.leaving.key_data,
            weights=region_weight,
            are_partial=are_partial,
            sync_key=self.drawn,
        )
        return core.leave(
            self.sync,
            self.axis,
            sent=sent,
            memory=memory,
            weights=region_weight,
            are_partial=are_partial,
        )

    def cross(self, left: core.Left) -> core.Left:
        return self.axis.cross(self.sync.message, left, self.weights)

    def arrive(self, crossed: core.Left) -> tuple[Fragment, core.Extras]:
        return core.arrive(self.sync, crossed, self.anchor, self.drawn)


@dataclasses.dataclass(frozen=True)
class _SharedFinishing:
    """A `core.sync.Finishing` of one region."""

    model: _SharedModel
    part: Fragment
    mean: PyTree
    seen: needs.MergeContext

    def remember(self, memory: PyTree) -> PyTree:
        rule = self.model.sync.merge
        if not rule.has_feedback:
            return memory
        staged = self.seen.kept[needs.STAGED]

        assert staged is not None
        return core.remember(rule.feedback_weight, self.part, staged, memory)

    def step(
        self, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        return core.outer_step(
            optimizer=self.model.outer.optimizer,
            params=outer,
            opt_state=opt_state,
            mean_pseudo_gradient=self.mean,
            stale_params=self.seen.kept.get(needs.STALE),
            token_counts=self.seen.user_inputs.token_counts,
        )

    def hand_out(self, outer: Fragment, opt_state: PyTree) -> Fragment:
        return self.model.received(Kept(outer, opt_state, ()))

    def merge(self, received: Fragment) -> tuple[Fragment, dict[str, jax.Array]]:
        seen = self.seen._replace(local=self.part, outer=received)
        return core.merge(self.model.sync, seen)


@dataclasses.dataclass(frozen=True)
class _RegionalModel:
    """An outer model for each region."""

    sync: Sync
    outer: RegionalOuter

    def init(self, outer: Fragment) -> tuple[Kept, PyTree]:
        compressor = core.regional_compressor(self.sync)
        kept = Kept(outer, self.outer.init(outer, compressor), ())

        def decoded(part: Fragment, state: PyTree, key: jax.Array) -> PyTree:
            message, _ = self.outer.send(part, state, part, compressor, key)
            return compressor.decode(message)

        # Without shardings: here mesh axes may be Explicit.
        part, state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (outer, kept.opt_state)
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        return kept, jax.eval_shape(decoded, part, state, key)

    def num_bytes(self, outer: Fragment, num_regions: int) -> int:
        return self.outer.num_bytes(outer, core.regional_compressor(self.sync))

    def received(self, kept: Kept) -> Fragment:
        return kept.outer

    def start(
        self, axis: NamedAxis, kept: Kept, leaving: Leaving
    ) -> tuple[PyTree, Kept]:
        crossing = _RegionalCrossing(model=self, axis=axis, kept=kept, leaving=leaving)
        mean, _, opt_state = core.start(crossing)
        return mean, kept._replace(opt_state=opt_state)

    def finish(
        self,
        axis: NamedAxis,
        kept: Kept,
        part: Fragment,
        mean: PyTree,
        seen: needs.MergeContext,
    ) -> core.Finished:
        finishing = _RegionalFinishing(
            model=self, axis=axis, part=part, mean=mean, seen=seen
        )
        return core.finish(finishing, kept.outer, kept.opt_state, kept.memory)


@dataclasses.dataclass(frozen=True)
class _RegionalCrossing:
    """A `core.sync.Crossing` of one region, whose memory is the outer state."""

    model: _RegionalModel
    axis: NamedAxis
    kept: Kept
    leaving: Leaving

    def leave(self) -> tuple[core.Left, PyTree]:
        draw_key = jax.random.fold_in(self.leaving.sync_key, self.model.outer.seed)
        num_matchings = len(matchings(self.axis.num_regions))

        sent, opt_state = core.leave_regional(
            sync=self.model.sync,
            axis=self.axis,
            part=self.leaving.part,
            params=self.kept.outer,
            state=self.kept.opt_state,
            key_data=self.leaving.key_data,
            row=jax.random.randint(draw_key, (), 0, num_matchings),
        )
        return core.Left(sent), opt_state

    def cross(self, left: core.Left) -> core.Left:
        return self.axis.cross(self.model.outer, left)

    def arrive(self, crossed: core.Left) -> tuple[PyTree, core.Extras]:
        compressor = core.regional_compressor(self.model.sync)
        return self.model.outer.arrive(crossed.sent, compressor), {}


@dataclasses.dataclass(frozen=True)
class _RegionalFinishing:
    """A `core.sync.Finishing` of one region."""

    model: _RegionalModel
    axis: NamedAxis
    part: Fragment
    mean: PyTree
    seen: needs.MergeContext

    def remember(self, memory: PyTree) -> PyTree:
        return memory

    def step(
        self, outer: Fragment, opt_state: PyTree
    ) -> tuple[Fragment, PyTree, jax.Array]:
        new_outer, new_opt_state, norm = core.receive(
            self.model.outer,
            params=outer,
            state=opt_state,
            arrived=self.mean,
            num_regions=self.axis.num_regions,
        )
        mean_norm = jnp.sqrt(jax.lax.pmean(norm**2, self.axis.name))
        return new_outer, new_opt_state, mean_norm

    def hand_out(self, outer: Fragment, opt_state: PyTree) -> Fragment:
        return outer

    def merge(self, received: Fragment) -> tuple[Fragment, dict[str, jax.Array]]:
        seen = self.seen._replace(local=self.part, outer=received)
        return core.merge(self.model.sync, seen)
