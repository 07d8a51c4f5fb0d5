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
    """A state converted from another program's."""

    state: TrainState  # Of the new program.
    kept: dict[str, str]  # What was kept, and how, by name.
    lost: dict[str, str]  # What was lost, and why, by name.


class Adoption:
    """One conversion: both programs, and what to report."""

    def __init__(self, program: SyncProgram, of: SyncProgram):
        self._new = program
        self._old = of
        self._num_new = program.regions.num
        self._num_old = of.regions.num
        self._is_same_schedule = program.method.schedule == of.method.schedule
        self._is_same_cut = program.fragments.slices == of.fragments.slices
        self._kept: dict[str, str] = {}
        self._lost: dict[str, str] = {}

    def run(self, state: TrainState) -> Adopted:
        """Convert a running state of the old program to the new one's."""
        state = self._old.synchronize(state)
        self._kept["step"] = "as it was"
        self._kept["bytes_sent"] = "as it was"
        flies = self._flies_on(state)
        state = self._without_flights(state, flies)
        schedule = self._schedule(state, flies)

        # A new state at the outer model, for everything that does not fit.
        shapes = self._new.param_shapes
        whole = transfer.move(self._old.outer_params(state), shardings_of(shapes))
        narrow = jax.jit(lambda tree: cast_like(tree, shapes))
        fresh = self._new.begin(narrow(whole), self._new_key(state), schedule)
        if self._num_new != self._num_old:
            self._lost["regions"] = (
                f"{self._num_old} are {self._num_new}: each begins at the mean of all"
            )

        region = self._with_trained(state)
        region = self._region(region, fresh.region, state.step)
        sync = None
        if fresh.sync is not None:
            trained, _ = split(whole, self._new.trained)
            sync = self._sync(state.sync, fresh.sync, trained, flies)
        elif state.sync is not None:
            self._lost["outer model"] = "the method has none"

        adopted = TrainState(
            region=region,
            sync=sync,
            step=state.step,
            bytes_sent=state.bytes_sent,
            frozen=fresh.frozen,
        )
        return Adopted(adopted, self._kept, self._lost)

    def _with_trained(self, state: TrainState) -> RegionState:
        """Return the regions with the parameters that the new program trains."""
        region = state.region
        if jax.tree.leaves(self._new.trained) == jax.tree.leaves(self._old.trained):
            return region

        self._lost["trainable"] = "others: what is frozen now is the outer model's"
        frozen = for_all_regions(state.frozen, self._num_old)
        params, _ = split(joined(region.params, frozen), self._new.trained)
        return region._replace(params=params)

    def _flies_on(self, state: TrainState) -> bool:
        """Return whether fragments can stay in flight, in an equal schedule."""
        sync = state.sync
        if sync is None or not self._is_same_schedule:
            return False

        like = self._new.abstract(sync.schedule).sync
        assert like is not None
        if self._num_new != self._num_old or not self._is_same_cut:
            return False
        # Compressor states have the rank of their messages.
        if sync.schedule.rank and difference(sync.compressors, like.compressors):
            return False
        return difference(sync.in_flight, like.in_flight) is None

    def _without_flights(self, state: TrainState, flies: bool) -> TrainState:
        if state.sync is None or not state.sync.in_flight:
            return state

        # Zero messages, of step 0, have no name.
        names = ", ".join(
            f"fragment {pending.fragment_id} of step {pending.start_step}"
            for pending in state.sync.schedule.in_flight
            if pending.start_step > 0
        )
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
        everywhere = NamedSharding(self._new.mesh, P())
        return transfer.put(jax.random.key_data(key), everywhere)

    def _region(self, old: RegionState, fresh: RegionState, step: int) -> RegionState:
        opt_state = self._regional("inner optimizer", old.opt_state, fresh.opt_state)
        if "inner optimizer" not in self._lost:
            opt_state = self._with_own_keys(opt_state, fresh.opt_state, step)
        elif self._new.holds_copies:
            params = self._regional("parameters", old.params, fresh.params)
            opt_state = self._new.opt_state_of(params)
        if "inner optimizer" in self._lost:
            opt_state = self._at_step(opt_state, step)

        if self._num_new == self._num_old:
            key = transfer.move(old.key, fresh.key.sharding)
            self._kept["keys"] = "of each region"
        else:
            key = fresh.key
            self._lost["keys"] = "drawn anew from the first region's"

        return RegionState(
            params=self._regional("parameters", old.params, fresh.params),
            opt_state=opt_state,
            key=key,
            per_step=self._regional("per_step", old.per_step, fresh.per_step),
            model_state=self._regional(
                "model_state", old.model_state, fresh.model_state
            ),
        )

    def _at_step(self, begun: PyTree, step: int) -> PyTree:
        """Return a new optimizer's state with its schedules at the step."""
        accumulation = self._new.accumulation
        steps_done = self._new.regions.steps_done(step)
        opt_state = at_step(begun, steps_done, accumulation)
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
        left = -step % every_k
        if left:
            self._lost["accumulation"] = (
                f"the first update has gradients of {left} steps, not {every_k}"
            )
        return opt_state

    def _with_own_keys(self, state: PyTree, fresh: PyTree, step: int) -> PyTree:
        """Derive the regions' random states from the first one's and the step."""
        if self._num_new == self._num_old or not has_keys(state):
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

        reason = difference(old, fresh, lead=1)
        if reason is not None:
            self._lost[name] = reason
            return fresh

        shardings = shardings_of(fresh)
        if self._num_new == self._num_old:
            self._kept[name] = "of each region"
            return transfer.move(old, shardings)

        self._kept[name] = f"the mean of {self._num_old} regions"
        loaded = transfer.to_device_memory(old)
        average = functools.partial(jax.tree.map, mean_over_all)
        mean = jax.jit(average, out_shardings=inside(loaded))(loaded)
        mean = transfer.move(mean, inside(fresh))
        spread = jax.jit(
            lambda tree: for_all_regions(tree, self._num_new), out_shardings=shardings
        )
        return spread(mean)

    def _sync(
        self, old: SyncState | None, fresh: SyncState, whole: PyTree, flies: bool
    ) -> SyncState:
        old_outer = old.outer if old else None
        outer = OuterState(
            params=self._outer_params(old_outer, fresh.outer.params, whole),
            opt_states=self._outer_states(old_outer, fresh.outer),
        )
        if old is None:
            return dataclasses.replace(fresh, outer=outer)

        flights = fresh.in_flight
        if flies:
            like = self._new.abstract(fresh.schedule).sync
            assert like is not None
            flights = transfer.move(old.in_flight, shardings_of(like.in_flight))

        memories = fresh.compressors
        if self._is_same_cut:
            memories = self._regional("compressors", old.compressors, memories)
        elif jax.tree.leaves(old.compressors):
            self._lost["compressors"] = "the model is cut into other fragments"

        anchors = fresh.stale_params
        if self._num_new == self._num_old:
            anchors = self._regional("stale_params", old.stale_params, anchors)
        elif old.stale_params:
            self._lost["stale_params"] = "regions measure from the outer parameters"

        return SyncState(
            outer=outer,
            schedule=fresh.schedule,
            compressors=memories,
            stale_params=anchors,
            in_flight=flights,
        )

    def _outer_params(
        self, old: OuterState | None, fresh: tuple, whole: PyTree
    ) -> tuple:
        shardings = shardings_of(fresh)
        if old and self._is_same_cut and difference(old.params, fresh) is None:
            self._kept["outer parameters"] = "as they were"
            return transfer.move(old.params, shardings)

        how = "the mean of the regions'" if old is None else "cut or spread anew"
        self._kept["outer parameters"] = how
        fragments = self._new.fragments
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)

        def spread(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            if x.ndim < len(like.shape):  # To every region.
                x = for_all_regions(x, self._num_new)
            return x.astype(like.dtype)

        def cut(whole: PyTree) -> tuple:
            parts = tuple(fragments.take(whole, k) for k in range(len(fragments)))
            return jax.tree.map(spread, parts, shapes)

        return transfer.move(jax.jit(cut)(whole), shardings)

    def _outer_states(self, old: OuterState | None, fresh: OuterState) -> tuple:
        if old is None or not jax.tree.leaves(old.opt_states):
            return fresh.opt_states

        shardings = shardings_of(fresh.opt_states)
        reason = difference(old.opt_states, fresh.opt_states)
        if self._is_same_cut and reason is None:
            self._kept["outer optimizer"] = "as it was"
            return transfer.move(old.opt_states, shardings)

        old_sync = self._old.method.sync
        is_shared = old_sync is not None and isinstance(old_sync.outer, SharedOuter)
        is_same_tree = self._old.fragments.treedef == self._new.fragments.treedef
        if self._is_same_cut or not is_shared or not is_same_tree:
            self._lost["outer optimizer"] = reason or "the model is cut otherwise"
            return fresh.opt_states

        states = old.opt_states
        if len(self._old.shardings.channels) > 1:  # Joined in one program.
            states = transfer.move(states, self._old.shardings.channels[0].host)
        states = transfer.to_device_memory(states)
        cut_states = recut(states, self._old.fragments, self._new.fragments)
        if cut_states is None:
            self._lost["outer optimizer"] = "its state is not one of fragments"
            return fresh.opt_states
        reason = difference(cut_states, fresh.opt_states)
        if reason is not None:
            self._lost["outer optimizer"] = reason
            return fresh.opt_states

        self._kept["outer optimizer"] = "cut anew"
        return transfer.move(cut_states, shardings)
