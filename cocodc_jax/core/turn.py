"""What is due after one inner step of one region, inside a program; see `optimizer.py`.

A fragment's part of a state goes through a loop of one round or none for what arrives
of it, and through one for what leaves. Predicates are equal in all regions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.core import reduce, regional
from cocodc_jax.core import sync as core
from cocodc_jax.sync import moments, needs
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.fragments import Fragment, Fragments
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.needs import HALFWAY, STAGED, STALE, Supplies
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.per_step import PerStep
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules import OneStepStale, traced
from cocodc_jax.transforms.compressor import Compressor, identity, message_bytes
from cocodc_jax.transforms.numerics import vary_like, wide_dtype, widen

PyTree = Any


class Flight(NamedTuple):
    """What is on its way of a fragment, or was last; `()` is nothing.

    Attributes:
      means: the mean pseudo-gradient that arrives, or what a regional outer model gets.
      copies: of the region's fragment, by name.
      stale: the outer fragment that it was measured from.
    """

    means: Any = ()
    copies: Any = ()
    stale: Any = ()


class Part(NamedTuple):
    """What a fragment's loops carry.

    Attributes:
      updates: the leaves that hold some of it.
      outer: its outer parameters.
      opt_states: of the outer optimizer.
      memories: of the region's compressor.
      flight: what is on its way.
      norm: of the mean that was applied now, 0 of none.
      correction_ratio: of its merge.
    """

    updates: PyTree
    outer: Fragment
    opt_states: PyTree
    memories: PyTree
    flight: Flight
    norm: jax.Array
    correction_ratio: jax.Array


def exchange(
    per_step: PerStep, gradients: PyTree, kept: PyTree, key: jax.Array, axis_name: Any
) -> tuple[PyTree, PyTree]:
    """Send one region's gradient; return what it makes of all, and what it keeps."""
    message, kept = per_step.send(gradients, kept, jax.random.fold_in(key, 3))
    if per_step.receive is None:
        return mean_of_all(message, axis_name), kept
    return per_step.receive(jax.lax.all_gather(message, axis_name)), kept


def mean_of_all(tree: PyTree, axis_name: Any) -> PyTree:
    """Average over the axis, summed in at least float32."""
    return jax.tree.map(
        lambda x: jax.lax.pmean(widen(x), axis_name).astype(x.dtype), tree
    )


def first(sync: Sync, fragments: Fragments, params: PyTree) -> dict[str, Any]:
    """Return what of a state is the fragments', before the first step.

    A delay has room for what is on its way: of a stale schedule messages of zero.
    """
    parts, copies = [], sorted(sync.copies & set(needs.REGIONAL_COPIES))
    for k, own in enumerate(core.outer_parts(fragments, params)):
        mean, memory, flight = own, (), Flight()
        if isinstance(sync.outer, RegionalOuter):
            opt_state = sync.outer.init(own, _compressor(sync))
            message = _message_shape(sync, own, opt_state)
            mean = jax.eval_shape(_compressor(sync).decode, message)
        else:
            opt_state = sync.outer.optimizer.init(own)
            memory = sync.message.init(own)
        if sync.schedule.delay_steps:
            part = jax.tree.map(jnp.asarray, fragments.take(params, k))
            flight = Flight(
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), mean),
                dict.fromkeys(copies, part),
                own if STALE in sync.copies else (),
            )
        parts.append((own, opt_state, memory, *flight))
    names = ("outer", "opt_states", "memories", *Flight._fields)
    columns = dict(zip(names, map(tuple, zip(*parts, strict=True)), strict=True))
    return columns | {"times": traced.first_times(sync.schedule)}


def num_bytes(sync: Sync, state: Any, num_regions: int) -> list[int]:
    """Return the bytes of one region's messages: of fragments, and of moments."""
    if isinstance(sync.outer, RegionalOuter):
        pairs = zip(state.outer, state.opt_states, strict=True)
        found = [message_bytes(_message_shape(sync, *pair)) for pair in pairs]
    else:
        found = [sync.message.num_bytes(part, num_regions) for part in state.outer]
    for name in (moments.FIRST, moments.SECOND) if sync.moments else ():
        leaves = jax.tree.leaves(moments.take(state.inner, (name,)))
        found.append(sum(x.size * wide_dtype(x.dtype).itemsize for x in leaves))
    return found


@dataclasses.dataclass(frozen=True)
class Turn:
    """One update of one region; see `synchronized`.

    Attributes:
      sync: bound to the regions.
      fragments: the cut of the parameters.
      supplies: of the user.
      axis_name: of the regions.
      num_regions: M.
      step: int32 scalar, that the inner step led to.
      key: the region's, of this step.
      params: before the inner step.
      value_fn: of the parameters, the loss of the last batch; None if nobody gave it.
    """

    sync: Sync
    fragments: Fragments
    supplies: Supplies
    axis_name: Any
    num_regions: int
    step: jax.Array
    key: jax.Array
    params: PyTree
    value_fn: Callable | None

    def events(self, updates: PyTree, state: Any) -> tuple[PyTree, Any]:
        """Do what is due.

        Args:
          updates: of the inner optimizer.
          state: a `SynchronizedState`, its inner state that after the step.

        Returns:
          The updates and the state after it.
        """
        sync, step, times = self.sync, self.step, state.times
        schedule, none = sync.schedule, jnp.zeros((), jnp.float32)
        flights = map(Flight, state.means, state.copies, state.stale)
        columns = (state.outer, state.opt_states, state.memories, flights)
        parts = [Part((), *own, none, none) for own in zip(*columns, strict=True)]

        def once(which: jax.Array, do: Callable, updates: PyTree) -> PyTree:
            for k, part in enumerate(parts):
                part = part._replace(updates=self.fragments.only(updates, k))
                act = functools.partial(do, k, state.inner, updates)
                parts[k] = _if(which[k], act, part)
                updates = self.fragments.over(updates, parts[k].updates)
            return updates

        def both(k, inner, updates, part):
            new = self.start(k, inner, updates, part)
            if schedule.delay_steps:  # What left a round ago arrives.
                done = self.finish(k, inner, updates, new, part.flight)
                return done._replace(flight=new.flight)
            done = self.finish(k, inner, updates, new, new.flight)
            return done._replace(flight=part.flight)

        def norms():
            return jnp.stack([part.norm for part in parts])

        if HALFWAY in sync.copies:
            once(traced.midway(schedule, times, step), self.look, updates)
        if not schedule.delay_steps or isinstance(schedule, OneStepStale):
            begun = done = self.leaving(times, updates, parts)
            updates = once(done, both, updates)
            times = traced.started(times, begun, step, schedule.delay_steps)
            times = traced.applied(times, done, step, norms())
        else:
            done = traced.arriving(times, step)
            updates = once(done, self.arrive, updates)
            times = traced.applied(times, done, step, norms())
            begun = self.leaving(times, updates, parts)
            once(begun, self.start, updates)
            times = traced.started(times, begun, step, schedule.delay_steps)
        inner, of_moments = self.average_moments(state.inner, begun)
        ratio = jnp.stack([part.correction_ratio for part in parts]).sum()
        sent = jnp.concatenate([begun, *of_moments])
        bytes_each = num_bytes(sync, state, self.num_regions)
        if self.num_regions == 1:
            bytes_each = [0] * len(bytes_each)
        outer, opt_states, memories, flights = zip(
            *(x[1:5] for x in parts), strict=True
        )
        means, copies, stale = zip(*flights, strict=True)
        return updates, state._replace(
            inner=inner,
            times=times,
            outer=outer,
            opt_states=opt_states,
            memories=memories,
            means=means,
            copies=copies,
            stale=stale,
            counts=state.counts + sent.astype(jnp.int32),
            message_bytes=jnp.array(bytes_each, jnp.float32),
            norm=jnp.where(done.any(), norms().sum(), state.norm),
            correction_ratio=jnp.where(done.any(), ratio, state.correction_ratio),
        )

    def leaving(self, times: traced.Times, updates: PyTree, parts: list[Part]):
        """Tell which fragment starts, bool `[K]`; measures what the schedule needs."""
        schedule = self.sync.schedule
        is_slot = traced.is_slot(schedule, self.step)

        def gaps(name: str, _: jax.Array) -> jax.Array:
            each = []
            for k, part in enumerate(parts):
                part = part._replace(updates=updates)
                own = jax.tree.map(lambda x: x[None], self.local(k, part))
                each.append(core.gap(name, self.given(part), own, self.num_regions))
            total = jax.lax.psum(jnp.stack(each), self.axis_name)
            return total.astype(jnp.float32)

        def observe(name: str) -> jax.Array:
            none = jnp.zeros(len(parts), jnp.float32)
            return _if(is_slot, functools.partial(gaps, name), none)

        sizes = self.fragments.num_params
        return traced.leaving(schedule, sizes, times, self.step, observe)

    def local(self, k: int, part: Part) -> Fragment:
        """Return the region's own fragment after what was done to it so far."""
        old, change = (self.fragments.take(x, k) for x in (self.params, part.updates))
        return optax.apply_updates(old, change)

    def given(self, part: Part) -> Fragment:
        """Return what regions are given of an outer fragment."""
        start = getattr(self.sync.outer, "start", None)
        return start(part.outer, part.opt_states) if start else part.outer

    def look(self, k: int, inner: PyTree, updates: PyTree, part: Part) -> Part:
        """Copy a fragment that is half of its delay old."""
        copies = part.flight.copies | {HALFWAY: self.local(k, part)}
        return part._replace(flight=part.flight._replace(copies=copies))

    def start(self, k: int, inner: PyTree, updates: PyTree, part: Part) -> Part:
        """Send a fragment; see `core.sync.start`."""
        sync, own = self.sync, self.local(k, part)
        key = sync_key(k, self.step)
        data = jax.random.key_data(self.key)
        if isinstance(sync.outer, RegionalOuter):
            compressor = _compressor(sync)
            message, opt_state = regional.send(
                sync.outer, compressor, own, part.outer, part.opt_states, data
            )
            draw = jax.random.fold_in(key, sync.outer.seed)
            mean_of = reduce.group_mean(sync.outer, compressor, self.axis_name, draw)
            mean, part = mean_of(message), part._replace(opt_states=opt_state)
        else:
            everyone = Regions.alike(self.num_regions)
            weights = everyone.weights(
                0, 1, sync.weigh, getattr(sync.schedule, "participating", None)
            )
            index, memory = jax.lax.axis_index(self.axis_name), part.memories
            if sync.message.is_numbered:
                memory = memory._replace(region=index)
            (mean, _), memory = core.start(
                sync,
                own,
                self.given(part),
                memory,
                data,
                reduce.weighted_mean(sync.message, self.axis_name, weights),
                key if sync.message.average.draws else None,
                jnp.asarray(weights)[index] if weights.min() == 0 else None,
            )
            part = part._replace(memories=memory)
        copies = dict.fromkeys(sorted(sync.copies & set(needs.REGIONAL_COPIES)), own)
        stale = part.outer if STALE in sync.copies else ()
        return part._replace(flight=Flight(mean, copies, stale))

    def arrive(self, k: int, inner: PyTree, updates: PyTree, part: Part) -> Part:
        """Take in what is on its way."""
        return self.finish(k, inner, updates, part, part.flight)

    def finish(
        self, k: int, inner: PyTree, updates: PyTree, part: Part, flight: Flight
    ) -> Part:
        """Take in a mean; see `core.sync.finish`."""
        sync, own = self.sync, self.local(k, part)
        staged = flight.copies.get(STAGED)
        seen = self.seen(k, inner, updates, part, flight)
        if isinstance(sync.outer, RegionalOuter):
            outer, opt_state, norm = regional.receive(
                sync.outer, part.outer, part.opt_states, flight.means, self.num_regions
            )
            norm = jnp.sqrt(jax.lax.pmean(norm**2, self.axis_name))
            merged, metrics = core.merge(sync, seen._replace(local=own, outer=outer))
            memory = part.memories
        else:
            merged, outer, opt_state, memory, norm, metrics = core.finish(
                sync,
                own,
                part.outer,
                part.opt_states,
                part.memories,
                core.Started(flight.means, staged),
                seen,
            )
        change = jax.tree.map(
            lambda new, old: widen(new) - widen(old),
            merged,
            self.fragments.take(self.params, k),
        )
        updates = self.fragments.put(part.updates, k, change)
        ratio = metrics.get("correction_ratio", part.correction_ratio)
        return Part(updates, outer, opt_state, memory, flight, norm, ratio)

    def seen(
        self, k: int, inner: PyTree, updates: PyTree, part: Part, flight: Flight
    ) -> needs.MergeContext:
        """Return what a merge may ask for, but for what `core.finish` fills in."""
        wanted, tau = self.sync.merge.needs, self.sync.schedule.delay_steps
        lead = jax.tree.map(lambda x: x[None], inner)
        found = needs.regional(wanted, lead, self.supplies)
        rate = self.supplies.learning_rate
        if callable(rate):
            rate = rate(self.step - 1)

        def whole(value: Fragment) -> PyTree:
            every = self.fragments.over(updates, part.updates)
            now = optax.apply_updates(self.params, every)
            return self.fragments.put(now, k, value)

        def loss_fn(params: PyTree, batch: PyTree, key: jax.Array):
            assert self.value_fn is not None
            return self.value_fn(params), {}

        kept = flight.copies | ({STALE: flight.stale} if flight.stale else {})
        return needs.MergeContext(
            local={},
            outer={},
            kept=kept,
            delay_steps=tau,
            regional={
                name: self.fragments.take(jax.tree.map(lambda x: x[0], tree), k)
                for name, tree in found.items()
            },
            learning_rate=None if rate is None else jnp.asarray(rate, float),
            batch=(),
            key=core.merge_key(jax.random.key_data(self.key)),
            whole=whole,
            loss_fn=loss_fn,
            supplies=self.supplies,
            sync_key=sync_key(k, self.step - tau),
        )

    def average_moments(
        self, inner: PyTree, begun: jax.Array
    ) -> tuple[PyTree, list[jax.Array]]:
        """Average the inner optimizer's moments with a sync, where they are due.

        Returns:
          Its state after it, and for each kind of moments whether they were sent.
        """
        if self.sync.moments is None:
            return inner, []
        number, sent = self.step // self.sync.schedule.sync_interval, []
        every = (self.sync.moments.first, self.sync.moments.second)
        for name, n in zip((moments.FIRST, moments.SECOND), every, strict=True):
            sent.append(begun & (number % n == 0 if n else False))
            mean = functools.partial(mean_of_all, axis_name=self.axis_name)
            found = moments.take(inner, (name,))
            inner = moments.put(inner, _if(sent[-1][0], mean, found))
        return inner, sent


def _if(condition: jax.Array, do: Callable, value: PyTree) -> PyTree:
    """Return `do(value)` where the condition holds, else `value` as it is."""
    return jax.lax.fori_loop(
        0, condition.astype(jnp.int32), lambda _, x: vary_like(do(x), x), value
    )


def _compressor(sync: Sync) -> Compressor:
    return sync.message.compressor() or identity()


def _message_shape(sync: Sync, own: Fragment, opt_state: PyTree) -> PyTree:
    """Return the shapes of a message to regional outer models."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    send = functools.partial(regional.send, sync.outer, _compressor(sync))
    return jax.eval_shape(send, own, own, opt_state, key)[0]
