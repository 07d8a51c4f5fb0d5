"""Convert a running state of one program to the state of another.

The other program may have another number of regions, mesh, schedule, method or inner
optimizer; the model is the same. State that fits is kept, the rest is reported by name
(`Adopted`). The rules:

- The step and the bytes sent are kept. So are the outer parameters; if the old program
  had none, they are the mean of the regions'.
- Regional state (parameters, inner optimizer, keys, model state, compressor state) is
  kept per region if the number of regions is the same. Otherwise every region starts
  from the mean over all of them, and from the maximum of counters. Progress since their
  last sync is in that mean, and is sent with the next message. Keys are then derived
  from the first region's, and the entries of messages that each region owns
  (`sync.messages`) are assigned anew.
- An optimizer's state is kept if it has the same structure. Otherwise the new optimizer
  is initialized at the regions' parameters, but its learning rate schedules continue at
  the step: inside of an accumulation of k gradients, at 1 / k of it.
- The outer optimizer's state is kept if it has the same structure, and is cut anew if
  the fragments differ.
- An equal schedule keeps its state, and what is in flight stays in flight if it has the
  same shapes. Otherwise what is in flight is applied at once, as if it had arrived, by
  the program that sent it. If merges then lack something (the last batch), it is
  dropped: the regions still have their own progress. A new schedule starts after the
  step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import OuterState, RegionState, SyncState, TrainState
from cocodc_jax.engine import transfer
from cocodc_jax.engine.frozen import joined, split
from cocodc_jax.engine.placement import shardings_of
from cocodc_jax.engine.region_map import for_all_regions
from cocodc_jax.engine.sync_program import SyncProgram
from cocodc_jax.program.fit import (
    at_step,
    difference,
    inside,
    mean_over_all,
    recut,
)
from cocodc_jax.sync.inner_keys import fold_keys, has_keys, with_keys_of
from cocodc_jax.sync.outer import SharedOuter
from cocodc_jax.transforms.numerics import cast_like

PyTree = Any


class Adopted(NamedTuple):
    """The state that a program made from another program's."""

    state: TrainState  # Of the new program.
    kept: dict[str, str]  # What was kept, and how, by name.
    lost: dict[str, str]  # What was lost, and why, by name.


class Adoption:
    """One conversion: both programs, and what to report."""

    def __init__(self, program: SyncProgram, of: SyncProgram):
        self._new, self._old = program, of
        self._num, self._was = program.regions.num, of.regions.num
        self._is_same_schedule = program.method.schedule == of.method.schedule
        self._is_same_cut = program.fragments.slices == of.fragments.slices
        self._kept: dict[str, str] = {}
        self._lost: dict[str, str] = {}

    def run(self, state: TrainState) -> Adopted:
        """Convert a running state of the old program to the new one's."""
        state = self._old.synchronize(state)
        self._kept["step"], self._kept["bytes_sent"] = "as it was", "as it was"
        flies = self._flies_on(state)
        state = self._without_flights(state, flies)
        schedule = self._schedule(state, flies)
        shapes = self._new.param_shapes
        whole = transfer.move(self._old.outer_params(state), shardings_of(shapes))
        narrow = jax.jit(lambda tree: cast_like(tree, shapes))
        fresh = self._new.begin(narrow(whole), self._new_key(state), schedule)
        if self._num != self._was:
            self._lost["regions"] = (
                f"{self._was} are {self._num}: each begins at the mean of all"
            )
        whole, _ = split(whole, self._new.trained)
        region = state.region
        if jax.tree.leaves(self._new.trained) != jax.tree.leaves(self._old.trained):
            self._lost["trainable"] = "others: what is frozen now is the outer model's"
            shared = for_all_regions(state.frozen, self._was)
            params = split(joined(region.params, shared), self._new.trained)[0]
            region = region._replace(params=params)
        region = self._region(region, fresh.region, state.step)
        sync = fresh.sync and self._sync(state.sync, fresh.sync, whole, flies)
        if sync is None and state.sync is not None:
            self._lost["outer model"] = "the method has none"
        adopted = TrainState(region, sync, state.step, state.bytes_sent, fresh.frozen)
        return Adopted(adopted, self._kept, self._lost)

    def _flies_on(self, state: TrainState) -> bool:
        """Return whether fragments in flight can stay so, in an equal schedule."""
        now = state.sync
        if now is None or not self._is_same_schedule:
            return False
        like = self._new.abstract(now.schedule).sync
        assert like is not None
        if self._num != self._was or not self._is_same_cut:
            return False
        # Compressor states have the rank of their messages.
        if now.schedule.rank and difference(now.compressors, like.compressors):
            return False
        return difference(now.in_flight, like.in_flight) is None

    def _without_flights(self, state: TrainState, flies: bool) -> TrainState:
        if state.sync is None or not state.sync.in_flight:
            return state
        # Zero messages, of step 0, have no name.
        ids = (p.sync_id for p in state.sync.schedule.in_flight if p.start_step > 0)
        names = ", ".join(f"fragment {k} of step {step}" for k, step in ids)
        if flies:
            self._kept["in flight"] = names
            return state
        state, dropped = self._old.land(state)
        if dropped:
            self._lost["in flight"] = (
                f"{names}: not applied, as the merge needs state that is not available"
            )
            self._lost["compressors"] = "they go with messages that were dropped"
        elif names:
            self._kept["in flight"] = f"{names}: applied at once"
        return self._old.synchronize(state)

    def _schedule(self, state: TrainState, flies: bool) -> Any:
        """Return the new schedule's state, None if it has none."""
        schedule = self._new.method.schedule
        if schedule is None:
            return None
        if state.sync is not None:
            always_flies = bool(schedule.init().in_flight)
            if self._is_same_schedule and (flies or not always_flies):
                self._kept["schedule"] = "where it was"
                return state.sync.schedule
            self._lost["schedule"] = f"it begins after step {state.step}"
        return schedule.begin_at(state.step)

    def _new_key(self, state: TrainState) -> jax.Array:
        """Derive a key for regions that have none."""
        data = jnp.asarray(transfer.whole(state.region.key)[0])
        key = jax.random.fold_in(jax.random.wrap_key_data(data), 4)
        where = NamedSharding(self._new.mesh, P())
        return transfer.put(jax.random.key_data(key), where)

    def _region(self, old: RegionState, fresh: RegionState, step: int) -> RegionState:
        opt_state = self._regional("inner optimizer", old.opt_state, fresh.opt_state)
        if "inner optimizer" not in self._lost:
            opt_state = self._with_own_keys(opt_state, fresh.opt_state, step)
        elif self._new.holds_copies:
            params = self._regional("parameters", old.params, fresh.params)
            opt_state = self._new.opt_state_of(params)
        if "inner optimizer" in self._lost:
            opt_state = self._at_step(opt_state, step)
        if self._num == self._was:
            key = transfer.move(old.key, fresh.key.sharding)
            self._kept["keys"] = "of each region"
        else:
            key = fresh.key
            self._lost["keys"] = "drawn anew from the first region's"
        return RegionState(
            self._regional("parameters", old.params, fresh.params),
            opt_state,
            key,
            self._regional("per_step", old.per_step, fresh.per_step),
            self._regional("model_state", old.model_state, fresh.model_state),
        )

    def _at_step(self, begun: PyTree, step: int) -> PyTree:
        """Return a new optimizer's state with its schedules at the step."""
        accumulation = self._new.accumulation
        done = self._new.regions.steps_done(step)
        opt_state = at_step(begun, done, accumulation)
        if opt_state is begun:
            return begun

        every_k = accumulation.steps
        if every_k is None:
            self._lost["learning rate"] = (
                f"its schedule begins again: {' and '.join(accumulation.names)} makes "
                "an update after a number of steps that is not known"
            )
            return opt_state
        self._kept["learning rate"] = "its schedule goes on"
        if left := -step % every_k:
            self._lost["accumulation"] = (
                f"the first update has gradients of {left} steps, not {every_k}"
            )
        return opt_state

    def _with_own_keys(self, state: PyTree, fresh: PyTree, step: int) -> PyTree:
        """Draw random state of other regions' anew, from the first one and the step."""
        if self._num == self._was or not has_keys(state):
            return state
        draw = jax.vmap(lambda x: fold_keys(x, step))
        return jax.jit(
            lambda state, fresh: with_keys_of(state, draw(fresh)),
            out_shardings=shardings_of(fresh),
        )(state, fresh)

    def _regional(self, name: str, old: PyTree, fresh: PyTree) -> PyTree:
        """Return `old`, leaves `[R, ...]`, for the new regions, if it fits."""
        if not jax.tree.leaves(old) or name in self._lost:
            return fresh
        why = difference(old, fresh, lead=1)
        if why is not None:
            self._lost[name] = why
            return fresh
        where = shardings_of(fresh)
        if self._num == self._was:
            self._kept[name] = "of each region"
            return transfer.move(old, where)
        self._kept[name] = f"the mean of {self._was} regions"
        old = transfer.out_of_host_memory(old)
        average = functools.partial(jax.tree.map, mean_over_all)
        mean = jax.jit(average, out_shardings=inside(old))(old)
        mean = transfer.move(mean, inside(fresh))
        return jax.jit(
            lambda tree: for_all_regions(tree, self._num), out_shardings=where
        )(mean)

    def _sync(
        self, old: SyncState | None, fresh: SyncState, whole: PyTree, flies: bool
    ) -> SyncState:
        before = old.outer if old else None
        outer = OuterState(
            self._outer_params(before, fresh.outer.params, whole),
            self._outer_states(before, fresh.outer),
        )
        if old is None:
            return dataclasses.replace(fresh, outer=outer)
        flights = fresh.in_flight
        if flies:
            like = self._new.abstract(fresh.schedule).sync
            assert like is not None
            flights = transfer.move(old.in_flight, shardings_of(like.in_flight))
        compressors = fresh.compressors
        if self._is_same_cut:
            compressors = self._regional("compressors", old.compressors, compressors)
        elif jax.tree.leaves(old.compressors):
            self._lost["compressors"] = "the model is cut into other fragments"
        stale = fresh.stale_params
        if self._num == self._was:
            stale = self._regional("stale_params", old.stale_params, stale)
        elif old.stale_params:
            self._lost["stale_params"] = "regions measure from the outer parameters"
        return SyncState(outer, fresh.schedule, compressors, stale, flights)

    def _outer_params(
        self, old: OuterState | None, fresh: tuple, whole: PyTree
    ) -> tuple:
        where = shardings_of(fresh)
        if old and self._is_same_cut and difference(old.params, fresh) is None:
            self._kept["outer parameters"] = "as they were"
            return transfer.move(old.params, where)
        how = "the mean of the regions'" if old is None else "cut or spread anew"
        self._kept["outer parameters"] = how
        fragments = self._new.fragments
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)

        def spread(x, to):  # To every region, if there is a region axis.
            x = x if x.ndim == to.ndim else for_all_regions(x, self._num)
            return x.astype(to.dtype)

        def cut(whole):
            parts = tuple(fragments.take(whole, k) for k in range(len(fragments)))
            return jax.tree.map(spread, parts, like)

        return transfer.move(jax.jit(cut)(whole), where)

    def _outer_states(self, old: OuterState | None, fresh: OuterState) -> tuple:
        if old is None or not jax.tree.leaves(old.opt_states):
            return fresh.opt_states
        why = difference(old.opt_states, fresh.opt_states)
        where = shardings_of(fresh.opt_states)
        if self._is_same_cut and why is None:
            self._kept["outer optimizer"] = "as it was"
            return transfer.move(old.opt_states, where)
        before, states = self._old.method.sync, old.opt_states
        is_shared = before is not None and isinstance(before.outer, SharedOuter)
        is_same_tree = self._old.fragments.treedef == self._new.fragments.treedef
        if self._is_same_cut or not is_shared or not is_same_tree:
            self._lost["outer optimizer"] = why or "the model is cut otherwise"
            return fresh.opt_states
        if len(self._old.shardings.channels) > 1:  # Joined in one program.
            states = transfer.move(states, self._old.shardings.channels[0].host)
        states = transfer.out_of_host_memory(states)
        cut = recut(states, self._old.fragments, self._new.fragments)
        if cut is None or (why := difference(cut, fresh.opt_states)):
            self._lost["outer optimizer"] = (
                "its state is not one of fragments" if cut is None else str(why)
            )
            return fresh.opt_states
        self._kept["outer optimizer"] = "cut anew"
        return transfer.move(cut, where)
