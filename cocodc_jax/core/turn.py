"""The events after one region's inner step, inside a program; see `optimizer.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.core import sync as core
from cocodc_jax.core.axis import NamedAxis, same_in_all
from cocodc_jax.core.outer_models import Kept, Leaving, OuterModel, outer_model
from cocodc_jax.sync import inner_keys, inner_state, moments, needs
from cocodc_jax.sync.averages import rescaled, shares_of, sync_key
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.inner_state import OnMerge
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.needs import HALFWAY, STALE, UserInputs
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.sync.schedules import OneStepStale, Slotted, traced
from cocodc_jax.transforms.compressor import zeroed
from cocodc_jax.transforms.numerics import (
    cast_like,
    is_finite,
    vary_like,
    wide_dtype,
    widen,
)

PyTree = Any

# Fields of the state that have one entry per fragment; the last three are in flight.
OF_FRAGMENTS = ("outer", "opt_states", "memories", "means", "copies", "stale")


class Part(NamedTuple):
    """Carry of a fragment's loops: its entries of the state, and what a merge reports.

    `updates` are the leaves with part of it, `norm` is of a mean applied now, else 0.
    """

    outer: Fragment
    opt_states: PyTree
    memories: PyTree
    means: Any = ()
    copies: Any = ()
    stale: Any = ()
    updates: PyTree = ()
    norm: Any = 0.0
    correction_ratio: Any = 0.0

    @property
    def kept(self) -> Kept:
        """The state between syncs."""
        return Kept(self.outer, self.opt_states, self.memories)

    def with_kept(self, kept: Kept) -> Part:
        """Return a copy with another state between syncs."""
        return self._replace(
            outer=kept.outer, opt_states=kept.opt_state, memories=kept.memory
        )

    def with_flight_of(self, other: Part) -> Part:
        """Return a copy with the fields in flight of another."""
        return self._replace(means=other.means, copies=other.copies, stale=other.stale)


class Region(NamedTuple):
    """What events read of a region: after its inner step, parameters before it."""

    step: jax.Array
    params: PyTree
    updates: PyTree
    inner: PyTree


def region_key(step: jax.Array, axis_name: Any) -> jax.Array:
    """Make a region's key of a step."""
    key = jax.random.fold_in(jax.random.key(0), step)
    return jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def with_own_keys(inner: PyTree, is_first: jax.Array, axis_name: Any) -> PyTree:
    """Give a region random state of its own at the first update, by its index."""
    index = jax.lax.axis_index(axis_name)
    return inner_keys.fold_keys(inner, jnp.where(is_first, index, 0))


def exchange(
    per_step: PerStep, gradients: PyTree, kept: PyTree, key: jax.Array, axis_name: Any
) -> tuple[PyTree, PyTree]:
    """Exchange one region's gradient; return the combined one and the new state."""
    message, new_state = per_step.send(gradients, kept, jax.random.fold_in(key, 3))
    if per_step.receive is None:
        return mean_of_all(message, axis_name), new_state
    return per_step.receive(jax.lax.all_gather(message, axis_name)), new_state


def mean_of_all(tree: PyTree, axis_name: Any) -> PyTree:
    """Average over the axis, summed in at least float32."""
    return jax.tree.map(
        lambda x: jax.lax.pmean(widen(x), axis_name).astype(x.dtype), tree
    )


def first(sync: Sync, fragments: Fragments, params: PyTree) -> dict[str, Any]:
    """Return the fragments' part of a state before the first step.

    With a delay it has placeholders for what is in flight: zero messages.
    """
    model = outer_model(sync)
    names = sorted(sync.copies & set(needs.REGIONAL_COPIES))
    parts = []
    for k, outer in enumerate(core.outer_parts(fragments, params)):
        kept, mean = model.init(outer)
        part = Part(kept.outer, kept.opt_state, kept.memory)
        if sync.schedule.delay_steps:
            local = jax.tree.map(jnp.asarray, fragments.take(params, k))
            part = part._replace(
                means=_zeros_like(mean, outer),
                copies=dict.fromkeys(names, local),
                stale=outer if STALE in sync.copies else (),
            )
        parts.append(part)

    return _columns(parts) | {"times": traced.first_times(_slotted(sync))}


def _zeros_like(shapes: Any, fragment: Fragment) -> Any:
    """Return zeros of some shapes, sharded as the fragment's leaves of those are."""

    def zeros(keys: tuple[Any, ...], x: Any) -> jax.Array:
        path = getattr(keys[-1], "key", None) if keys else None
        leaf = fragment.get(path) if isinstance(path, str) else None
        if leaf is not None and (leaf.shape, leaf.dtype) == (x.shape, x.dtype):
            return jnp.zeros_like(leaf)
        return jnp.zeros(x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(zeros, shapes)


def num_bytes(sync: Sync, state: Any, num_regions: int) -> list[int]:
    """Return the bytes of one region's messages: by fragment, then by moment."""
    if num_regions == 1:
        return [0] * len(state.counts)

    model = outer_model(sync)
    sizes = [model.num_bytes(part, num_regions) for part in state.outer]
    for name in sync.moments.every if sync.moments else ():
        leaves = jax.tree.leaves(moments.take(state.inner, (name,)))
        sizes.append(sum(x.size * wide_dtype(x.dtype).itemsize for x in leaves))
    return sizes


@dataclasses.dataclass(frozen=True)
class Turn:
    """The events of one region's update, by a sync bound to M regions.

    `value_fn` is the loss of the last batch as a function of the parameters, `batch`
    that batch; None where no merge needs them.
    """

    sync: Sync
    fragments: Fragments
    user_inputs: UserInputs
    axis_name: Any
    num_regions: int
    value_fn: Callable | None
    batch: PyTree

    @property
    def schedule(self) -> Slotted:
        """The schedule of the syncs."""
        return _slotted(self.sync)

    @property
    def model(self) -> OuterModel:
        """The outer model, one for all regions or one for each."""
        return outer_model(self.sync)

    @property
    def axis(self) -> NamedAxis:
        """The axis of regions."""
        return NamedAxis(self.axis_name)

    def events(self, region: Region, state: Any) -> tuple[PyTree, Any]:
        """Apply the events that are due to the updates and a `SynchronizedState`.

        Its `inner` is empty before and the region's after.
        """
        is_due = traced.is_due(self.schedule, state.times, region.step)
        on_merge = self._on_merge(region.inner)
        is_carried = bool(self.sync.moments) or on_merge is not None
        inner = region.inner if is_carried else ()

        updates, new_inner, new_state = _if(
            is_due,
            functools.partial(self._events, on_merge),
            (region.updates, inner, state),
            self._read(region),
        )
        if not is_carried:
            new_inner = region.inner
        return updates, new_state._replace(inner=new_inner)

    def _on_merge(self, inner: PyTree) -> OnMerge | None:
        """Return what a merge does to the inner optimizer's state, None if nothing."""
        hook = self.user_inputs.on_merge
        if hook is None and not inner_state.is_moved(inner):
            return None
        return functools.partial(inner_state.merge_opt_state, on_merge=hook)

    def _read(self, region: Region, k: int | None = None) -> Region:
        """Return the parts of a region that are read, by fragment k if given.

        Updates are carried beside it: a second carry would be copied at every step.
        """
        rule_needs = self.sync.merge.needs
        if needs.wants_batch(rule_needs):
            return region

        params = region.params
        if k is not None:
            params = self.fragments.only(params, k)
        return region._replace(
            params=params,
            updates=(),
            inner=region.inner if needs.wants_state(rule_needs) else (),
        )

    def _events(
        self, on_merge: OnMerge | None, value: tuple, region: Region
    ) -> tuple[PyTree, PyTree, Any]:
        """Apply the events of a step to `(updates, inner, state)`, see `events`."""
        updates, inner, state = value
        region = region._replace(updates=updates)
        step = region.step
        times = state.times
        schedule = self.schedule
        delay_steps = schedule.delay_steps

        zero = jnp.zeros((), jnp.float32)
        norm, ratio = vary_like((zero, zero), (state.norm, state.correction_ratio))
        parts = [
            part._replace(norm=norm, correction_ratio=ratio) for part in _parts(state)
        ]

        def once(is_chosen: jax.Array, act: Callable) -> None:
            """Run `act(k, part, region)` for the fragments that are chosen."""
            nonlocal region
            for k, part in enumerate(parts):
                part = part._replace(updates=self.fragments.only(region.updates, k))
                act_on_k = functools.partial(act, k)
                parts[k] = _if(is_chosen[k], act_on_k, part, self._read(region, k))
                updates = self.fragments.over(region.updates, parts[k].updates)
                region = region._replace(updates=updates)

        def norms() -> jax.Array:
            norms = jnp.stack([part.norm for part in parts])
            return same_in_all(norms, self.axis_name)

        if schedule.looks_midway:
            once(traced.midway(schedule, times, step), self.look)

        if not delay_steps or isinstance(schedule, OneStepStale):
            # Without a delay a sync starts and ends at once; one round late, a start
            # and the end of the sync before are one event.
            started = self.leaving(times, region, parts)
            done = started
            once(done, self.both)
            times = traced.started(times, started, step, delay_steps)
            times = traced.applied(times, done, step, norms())
        else:
            done = traced.arriving(times, step)
            once(done, self.finish)
            times = traced.applied(times, done, step, norms())
            started = self.leaving(times, region, parts)
            once(started, self.start)
            times = traced.started(times, started, step, delay_steps)

        if on_merge is not None:
            old = optax.apply_updates(region.params, updates)
            new = optax.apply_updates(region.params, region.updates)
            inner = _if(done.any(), on_merge, inner, old, new)
        new_inner, of_moments = self.average_moments(inner, step, started)

        ratio = jnp.stack([part.correction_ratio for part in parts]).sum()
        sent = jnp.concatenate([started, *of_moments])
        new_state = state._replace(
            times=times,
            counts=state.counts + sent.astype(jnp.int32),
            norm=jnp.where(done.any(), norms().sum(), state.norm),
            correction_ratio=jnp.where(done.any(), ratio, state.correction_ratio),
            **_columns(parts),
        )
        return region.updates, new_inner, new_state

    def leaving(
        self, times: traced.Times, region: Region, parts: list[Part]
    ) -> jax.Array:
        """Return which fragments start, bool `[K]`; measure what the schedule needs."""

        def gaps(
            name: str, zeros: jax.Array, region: Region, parts: list[Part]
        ) -> jax.Array:
            del zeros  # The result if there is no slot.

            gap_of_fragment = []
            for k, part in enumerate(parts):
                local = self.local(k, part._replace(updates=region.updates), region)
                gap = core.gap(
                    name,
                    outer=self.model.received(part.kept),
                    local=jax.tree.map(lambda x: x[None], local),
                    num_regions=self.num_regions,
                    token_counts=self.user_inputs.token_counts,
                )
                gap_of_fragment.append(gap)

            total = jax.lax.psum(jnp.stack(gap_of_fragment), self.axis_name)
            return total.astype(jnp.float32)

        def observe(name: str) -> jax.Array:
            zeros = jnp.zeros(len(parts), jnp.float32)
            is_slot = traced.is_slot(self.schedule, region.step)
            measure = functools.partial(gaps, name)
            return _if(is_slot, measure, zeros, region, parts)

        sizes = self.fragments.num_params
        return traced.leaving(
            self.schedule,
            num_params=sizes,
            times=times,
            step=region.step,
            observe=observe,
        )

    def local(self, k: int, part: Part, region: Region) -> Fragment:
        """Return the region's local fragment with the updates so far."""
        params = self.fragments.take(region.params, k)
        updates = self.fragments.take(part.updates, k)
        return cast(Fragment, optax.apply_updates(params, updates))

    def key_data(self, region: Region) -> jax.Array:
        """Return the data of the region's key of this step."""
        return jax.random.key_data(region_key(region.step, self.axis_name))

    def look(self, k: int, part: Part, region: Region) -> Part:
        """Copy a fragment halfway through its delay."""
        copies = part.copies | {HALFWAY: self.local(k, part, region)}
        return part._replace(copies=copies)

    def both(self, k: int, part: Part, region: Region) -> Part:
        """Start a fragment, and finish the one that arrives in the same step."""
        new = self.start(k, part, region)
        if not self.schedule.delay_steps:  # The same, and nothing is on its way.
            return self.finish(k, new, region).with_flight_of(part)
        # Started a round ago; both see the region before either is applied.
        done = self.finish(k, new.with_flight_of(part), region)
        return done.with_flight_of(new)

    def start(self, k: int, part: Part, region: Region) -> Part:
        """Send a fragment; see `core.sync.start`."""
        local = self.local(k, part, region)
        leaving = Leaving(local, self.key_data(region), sync_key(k, region.step))
        mean, kept = self.model.start(self.axis, part.kept, leaving)

        names = sorted(self.sync.copies & set(needs.REGIONAL_COPIES))
        return part.with_kept(kept)._replace(
            means=mean,
            copies=dict.fromkeys(names, local),
            stale=part.outer if STALE in self.sync.copies else (),
        )

    def finish(self, k: int, part: Part, region: Region) -> Part:
        """Apply the mean in flight; see `core.sync.finish`."""
        local = self.local(k, part, region)
        seen = self.seen(k, part, region)
        done = self.model.finish(self.axis, part.kept, local, part.means, seen)

        old = self.fragments.take(region.params, k)
        change = jax.tree.map(lambda new, x: widen(new) - widen(x), done.merged, old)
        kept = Kept(done.outer, done.opt_state, done.memory)
        return part.with_kept(kept)._replace(
            updates=self.fragments.put(part.updates, k, change),
            norm=done.norm,
            correction_ratio=done.metrics.get(
                "correction_ratio", part.correction_ratio
            ),
        )

    def seen(self, k: int, part: Part, region: Region) -> needs.MergeContext:
        """Return the context of a merge, without the fields that its model fills in."""
        delay_steps = self.schedule.delay_steps
        rate = self.user_inputs.learning_rate
        if callable(rate):
            rate = cast(Callable, rate)(region.step - 1)

        stacked = jax.tree.map(lambda x: x[None], region.inner)
        of_regions = needs.regional(self.sync.merge.needs, stacked, self.user_inputs)
        of_region = jax.tree.map(lambda x: x[0], of_regions)

        copies = part.copies
        if part.stale:
            copies = copies | {STALE: part.stale}

        def whole(value: Fragment) -> PyTree:
            updates = self.fragments.over(region.updates, part.updates)
            params = optax.apply_updates(region.params, updates)
            return self.fragments.put(params, k, value)

        def loss_fn(params: PyTree, batch: PyTree, key: jax.Array):
            assert self.value_fn is not None
            return self.value_fn(params), {}

        return needs.MergeContext(
            local={},
            outer={},
            kept=copies,
            delay_steps=delay_steps,
            regional={name: self.fragments.take(x, k) for name, x in of_region.items()},
            learning_rate=None if rate is None else jnp.asarray(rate, float),
            batch=self.batch,
            key=core.merge_key(self.key_data(region)),
            whole=whole,
            loss_fn=loss_fn,
            user_inputs=self.user_inputs,
            sync_key=sync_key(k, region.step - delay_steps),
        )

    def average_moments(
        self, inner: PyTree, step: jax.Array, started: jax.Array
    ) -> tuple[PyTree, list[jax.Array]]:
        """Average Adam's moments with a sync, if due; return also which were sent."""
        if self.sync.moments is None:
            return inner, []

        def mean(value: PyTree) -> PyTree:
            """Average the moments of the regions where they are finite."""
            finite = is_finite(value)
            wide = jax.tree.map(widen, zeroed(value, finite))
            shares = shares_of(finite)
            sums, shares = jax.lax.pmean((wide, shares), self.axis_name)
            return cast_like(rescaled(sums, shares), value)

        round_number = step // self.schedule.sync_interval
        sent = []
        for name, every in self.sync.moments.every.items():
            is_due = started & (round_number % every == 0 if every else False)
            averaged = _if(is_due[0], mean, moments.take(inner, (name,)))
            inner = moments.put(inner, averaged)
            sent.append(is_due)
        return inner, sent


def _if(condition: jax.Array, apply: Callable, value: PyTree, *rest: PyTree) -> PyTree:
    """Return `apply(value, *rest)` if the condition holds, else `value`.

    The barrier keeps XLA from hoisting the loop-invariant body to every step.
    """

    def body(i: jax.Array, value: PyTree) -> PyTree:
        # One barrier per leaf: a joint one makes all of them vary over a mesh.
        arguments = jax.tree.map(
            lambda x: jax.lax.optimization_barrier((i, x))[1], (value, *rest)
        )
        return vary_like(apply(*arguments), value)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, value)


def _parts(state: Any) -> list[Part]:
    """Return the fragments' entries of a `SynchronizedState`."""
    columns = [getattr(state, name) for name in OF_FRAGMENTS]
    parts = []
    for entries in zip(*columns, strict=True):
        parts.append(Part(**dict(zip(OF_FRAGMENTS, entries, strict=True))))
    return parts


def _columns(parts: list[Part]) -> dict[str, tuple]:
    """Return the fields of a `SynchronizedState`, one entry per fragment."""
    return {name: tuple(getattr(part, name) for part in parts) for name in OF_FRAGMENTS}


def _slotted(sync: Sync) -> Slotted:
    assert isinstance(sync.schedule, Slotted)  # Others are refused before.
    return sync.schedule
