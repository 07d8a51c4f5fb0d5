"""Train one loss with one method: inner steps, and the syncs that are due after them.

`RegionProgram` holds the compiled functions; the run itself is the `TrainState` that
goes in and comes out. Nothing here waits for a device.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import AppliedSync, TrainState
from cocodc_jax.engine import transfer
from cocodc_jax.engine.crossing import Times
from cocodc_jax.engine.devices import Devices, LoweredProgram, Recorder
from cocodc_jax.engine.elastic_exchange import ElasticExchange
from cocodc_jax.engine.frozen import Trainable, copied, joined, split
from cocodc_jax.engine.mesh import methods_in_own_context
from cocodc_jax.engine.placement import shardings_of
from cocodc_jax.engine.segment import InnerSteps
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.assemble import (
    Parts,
    assemble,
    check_alive,
    check_like,
    checked,
)
from cocodc_jax.program.warm_start import Adopted, Adoption
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.base import Pending

PyTree = Any

NOTHING, AUTO = UserInputs(), Transport()


class Output(NamedTuple):
    """Results of `RegionProgram.advance`, still on their devices.

    Attributes:
      losses: float32, or wider if the loss is, `[T, R]`.
      aux: the loss function's aux, each `[T, R]`.
      syncs: the syncs that were applied after the last step.
      bytes_sent: bytes one region had sent by the end of each step, including events.
    """

    losses: jax.Array
    aux: dict[str, jax.Array]
    syncs: tuple[AppliedSync, ...]
    bytes_sent: tuple[int, ...]


@methods_in_own_context
class RegionProgram:
    """Compiled programs of one method for one model on one mesh.

    Example: see `train.run_steps`. All mutable state is in the `TrainState` that goes
    in and comes out. Region arrays are donated: do not use an old state again.

    Attributes:
      param_shapes: shapes and shardings of one region's parameters.
      trained: bools like them, None if all are trained.
      accumulation: gradients that the inner optimizer accumulates for an update.
      on_merge: what a merge does to its state, None if nothing.
      holds_copies: whether its state holds a copy of the parameters.
    """

    def __init__(
        self,
        loss_fn: AnyLossFn,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        method: Method | str,
        params: PyTree,
        regions: int | Regions,
        *,
        mesh: Mesh | None = None,
        fragments: Fragments | None = None,
        param_specs: PyTree | None = None,
        user_inputs: UserInputs = NOTHING,
        transport: Transport = AUTO,
        model_state: ModelState | None = None,
        local_regions: str = "auto",
        optimizer_memory: str = "device",
        trainable: Trainable = None,
    ):
        """Prepare the programs; nothing is compiled before the first call.

        Args:
          loss_fn: `(params, batch, key) -> (loss, aux)` of one region; aux is a dict of
            scalars. With a `model_state`, `(params, model_state, batch, key) -> (loss,
            (aux, new_model_state))`.
          optimizer: inner optimizer of every region. One that takes `value=` receives
            the region's loss, or the mean loss if regions exchange something at every
            step.
          method: from `cocodc_jax.methods`, or the name of one, with its defaults.
          params: one region's parameters, or their shapes.
          regions: M, or the speed of each region.
          mesh: inner mesh; by default as many regions in parallel as devices allow.
          fragments: how to cut the parameters; by default as the method does.
          param_specs: tree of `PartitionSpec`s over the mesh axes inside a region (Flax
            Linen: `nn.get_partition_spec(params)`); by default replicated.
          user_inputs: what only the user knows, for merges that need it, and `on_merge`
            for an optimizer that holds a copy of the parameters.
          transport: how messages cross regions.
          model_state: non-trained state, such as BatchNorm statistics, and whether
            regions average it.
          local_regions: how a device computes several regions: "batched", "in_turn", or
            "auto", the faster of both; see `LocalRegions.of`.
          optimizer_memory: "device", or "host" to keep the inner optimizer's state in
            host memory; see `engine/placement.py`.
          trainable: which parameters are trained: a tree of bools (or a prefix), a
            predicate on paths, "optimizer" for those that it updates, or None for all.

        Raises:
          ValueError: for an argument of the wrong type or value, or arguments that do
            not fit together.
        """
        model = loss_fn, optimizer, method, params, regions, mesh, fragments
        given = checked(*model, user_inputs, transport, model_state, trainable)
        self.regions, self.num_regions = given.regions, given.own.num
        self.mesh, self.method = given.mesh, given.method
        self.fragments = given.fragments
        self.model_state, self.trained = given.model_state, given.trained
        self.accumulation, self.on_merge = given.accumulation, given.on_merge
        self.holds_copies = given.holds_copies
        self._assemble = functools.partial(
            assemble, given, param_specs, local_regions, optimizer_memory
        )
        self._use(self._assemble(Devices()))

    def _use(self, parts: Parts) -> None:
        self._devices = parts.devices
        self.shardings, self.param_shapes = parts.shardings, parts.whole
        self.exchange, self._corrects = parts.exchange, parts.corrects
        self._first, self._batches, self._read = parts.first, parts.batches, parts.read
        self._steps, self._syncs = parts.steps, parts.syncs

    @functools.cached_property
    def bytes_per_step(self) -> int:
        """Bytes one region sends at every inner step, without syncs."""
        if self.method.per_step is None or self.num_regions == 1:
            return 0
        of_state = self.model_state.averaged_bytes if self.model_state else 0
        return self.method.per_step.num_bytes(self._first.shapes[0]) + of_state

    @property
    def elastic(self) -> ElasticExchange:
        """The exchange of an elastic region."""
        assert isinstance(self.exchange, ElasticExchange)
        return self.exchange

    def init(self, params: PyTree, key: jax.Array) -> TrainState:
        """Make the initial state; all regions and the outer model are equal.

        Args:
          params: one region's parameters.
          key: PRNG key of the implementation that was JAX's default when the program
            was made; each region derives its own.

        Raises:
          ValueError: if `params` has other shapes than the program's, or `key` is not
            one key of that implementation.
        """
        check_like(params, self.param_shapes)
        everywhere = NamedSharding(self.mesh, P())
        key_data = transfer.put(self._first.key_data(key), everywhere)
        params = transfer.put(params, shardings_of(self.param_shapes))
        return self.begin(params, key_data)

    def opt_state_of(self, params: PyTree) -> PyTree:
        """Return the inner optimizer's first state at all regions' parameters."""
        return self._first.opt_state_of(params)

    def begin(
        self, params: PyTree, key_data: jax.Array, schedule: Any = None
    ) -> TrainState:
        """Make an initial state of arrays on the mesh and a schedule's state."""
        params, frozen = split(params, self.trained)
        region, sync = self._first.make(params, key_data), None
        if self._syncs is not None:
            sync = self._syncs.init(params, region, schedule)
        return TrainState(region, sync, frozen=copied(frozen))

    def abstract(self, schedule: Any = None) -> TrainState:
        """Return shapes, dtypes and shardings of a state, for restoring a checkpoint.

        The `schedule`'s state lists what is in flight; None is the initial one, with
        nothing in flight.
        """
        region = self._first.abstract()
        _, frozen = split(self.param_shapes, self.trained)
        if self._syncs is None or self.method.sync is None:
            return TrainState(region, frozen=frozen)
        if schedule is None:
            schedule = self.method.sync.schedule
            schedule = schedule.landed(schedule.init())
        sync = self._syncs.abstract(schedule, region)
        return TrainState(region, sync, frozen=frozen)

    def list_programs(self, batches: PyTree) -> list[LoweredProgram]:
        """List the programs of the inner mesh that a run compiles; compiles nothing.

        The mesh may be of devices that do not exist here
        (`jax.experimental.topologies`). `batches` are shapes and dtypes of those of one
        scan, `[T, R, B, ...]`.
        """
        listing, recorder = self.recording()
        params, _ = split(self.param_shapes, self.trained)
        everywhere = NamedSharding(self.mesh, P())
        key_data = recorder.put(listing._first.shapes[1], everywhere)
        listing._first.make(params, key_data)
        state, num_steps = self.abstract(), jax.tree.leaves(batches)[0].shape[0]
        listing._inner_steps(state, *listing._batches.abstract(batches), num_steps)
        listing._read.mean(state.region.params)
        if self._syncs is not None:
            listing._list_syncs(state, batches, self._syncs.num_rounds)
        return [self._listed(each, num_steps) for each in recorder.found.values()]

    def recording(self) -> tuple[RegionProgram, Recorder]:
        """Return a copy that compiles and runs nothing, and what it would run."""
        recorder, listing = Recorder(), copy.copy(self)
        listing._use(self._assemble(recorder))
        return listing, recorder

    def _list_syncs(self, state: TrainState, batches: PyTree, rounds: int) -> None:
        """Follow the schedule until every fragment was sent and merged."""
        assert self.method.sync is not None
        interval = self.method.sync.schedule.sync_interval
        missing = set(range(len(self.fragments)))
        while missing or state.step < rounds * interval:
            n = self.steps_to_event(state) or 0
            of_steps = jax.tree.map(
                lambda x, n=n: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), batches
            )
            state, output = self.advance(state, of_steps)
            missing -= {each.fragment_id for each in output.syncs}

    def _listed(self, listed: LoweredProgram, num_steps: int) -> LoweredProgram:
        """Fill in the inner steps of a program, and what regions send at each."""
        if listed.name == "inner steps":
            sent_bytes = num_steps * self.bytes_per_step
            return listed._replace(num_steps=num_steps, sent_bytes=sent_bytes)
        if "inner steps" in listed.name:
            batches = jax.tree.leaves(listed.arguments[1])
            return listed._replace(num_steps=batches[0].shape[0])
        return listed

    @property
    def length_bucket(self) -> int | None:
        """Steps that batches are padded to a multiple of; None if they are not."""
        return self._batches.length_bucket

    def steps_to_event(self, state: TrainState) -> int | None:
        """Return the inner steps until the next event; None if there are no events."""
        if self.method.sync is None or state.sync is None:
            return None
        return self.method.sync.schedule.next_step(state.sync.schedule) - state.step

    def advance(
        self,
        state: TrainState,
        batches: PyTree,
        times: Times = (0.0, 0.0),
        on_steps: Callable[[int, jax.Array], None] = lambda step, losses: None,
    ) -> tuple[TrainState, Output]:
        """Run T inner steps, then the events that are due after them.

        Args:
          state: donated.
          batches: leaves `[T, R, B, ...]`, on the mesh or on the host; T at most
            `steps_to_event(state)`.
          times: measured seconds of an inner step and of a sync, 0 if not yet known;
            for measured schedules.
          on_steps: called with the step after the inner steps and their losses as soon
            as they are dispatched; the events may wait for other regions.

        Raises:
          ValueError: if T leads past the next event, the second axis of `batches` is
            not the regions, or `state` was donated before.
        """
        check_alive(state)
        num_steps = self._batches.num_steps(batches)
        limit = self.steps_to_event(state)
        if limit is not None and num_steps > limit:
            raise ValueError(
                f"{num_steps} steps lead past the next event, which is {limit} steps "
                "ahead; pass at most `steps_to_event(state)`"
            )
        batches, counted = self._batches.for_steps(batches)
        before, step = state.bytes_sent, state.step + num_steps
        state, outputs, merged = self._inner_steps(state, batches, counted, num_steps)
        if jax.tree.leaves(outputs)[0].shape[0] > num_steps:
            outputs = self._read.first(outputs, num_steps)
        losses, aux = outputs
        state = dataclasses.replace(state, step=step)
        on_steps(step, losses)
        syncs = ()
        if self._syncs is not None:
            state, syncs = self._syncs.run_events(
                state, batches, num_steps, times, merged
            )
        sent = [before + i * self.bytes_per_step for i in range(1, num_steps + 1)]
        sent[-1] += state.bytes_sent - before
        state = dataclasses.replace(state, bytes_sent=sent[-1])
        return state, Output(losses, aux, syncs, tuple(sent))

    def apply_events(
        self, state: TrainState, last_batch: PyTree = None, times: Times = (0.0, 0.0)
    ) -> tuple[TrainState, tuple[AppliedSync, ...]]:
        """Apply the events that are due after steps that the caller has done.

        Args:
          state: donated; its `step` and parameters are those after the steps.
          last_batch: the batch of the last step, leaves `[R, B, ...]`, for merges that
            need it.
          times: as of `advance`.
        """
        check_alive(state)
        if self._syncs is None:
            return state, ()
        batches = jax.tree.map(lambda x: x[None], last_batch)
        return self._syncs.run_events(state, batches, 1, times, {})

    def use_steps(self, steps: InnerSteps) -> None:
        """Take other inner steps than those of the loss and the optimizer.

        Args:
          steps: `run(region, batches, participating, num_steps, frozen) -> (region,
            (outputs, {}))`, of all regions, not jitted.
        """
        self._steps = self._devices.jit(
            steps.run,
            "inner steps",
            donate_argnums=0,
            out_shardings=(steps.region, steps.losses),
        )
        if self._syncs is not None:
            self._syncs.use_steps(steps)

    def run_segment(
        self, state: TrainState, batches: PyTree, num_steps: int
    ) -> tuple[TrainState, PyTree, tuple[AppliedSync, ...]]:
        """Run inner steps and events on batches in the form that the steps take.

        As `advance`, which places batches and counts bytes by step.
        """
        state, outputs, merged = self._inner_steps(state, batches, None, num_steps)
        state = dataclasses.replace(state, step=state.step + num_steps)
        if self._syncs is None:
            return state, outputs, ()
        state, syncs = self._syncs.run_events(
            state, batches, num_steps, (0.0, 0.0), merged
        )
        return state, outputs, syncs

    def _inner_steps(
        self, state: TrainState, batches: PyTree, counted: Any, num_steps: int
    ) -> tuple[TrainState, tuple, dict]:
        """Run inner steps, including the starts that share their program."""
        participating = None
        if not self.regions.are_even:
            room = len(jax.tree.leaves(batches)[0])
            participating = self.regions.participating(state.step, room)
        if self._syncs is not None and state.sync is not None:
            step = state.step + num_steps
            ran = self._syncs.run_segment(state, batches, participating, step)
            if ran is not None:
                return ran
        outer = (state.sync.outer,) if self._corrects and state.sync else ()
        region, outputs = self._steps(
            state.region, batches, participating, counted, state.frozen, *outer
        )
        return dataclasses.replace(state, region=region), outputs, {}

    def adopt(self, state: TrainState, of: RegionProgram) -> Adopted:
        """Continue from the state of another program of the same model.

        The other program is `of`; its `state` is donated. It may have another number of
        regions, mesh, schedule, method or optimizer. State that fits is kept, the rest
        is reported by name; see `warm_start` for the rules.

        Raises:
          ValueError: if `of` has other parameters.
        """
        check_alive(state)
        check_like(of.param_shapes, self.param_shapes)
        return Adoption(self, of).run(state)

    def land(self, state: TrainState) -> tuple[TrainState, tuple[Pending, ...]]:
        """Apply all fragments in flight now; return what could not be applied too."""
        check_alive(state)
        return self._syncs.land(state) if self._syncs else (state, ())

    def synchronize(self, state: TrainState) -> TrainState:
        """Pass all observations to the schedule, waiting for devices.

        Call it before a checkpoint: starts that wait for the next inner steps are sent.
        """
        check_alive(state)
        if self._syncs is None or state.sync is None:
            return state
        return self._syncs.synchronize(state)

    def finite_regions(self, state: TrainState) -> jax.Array:
        """Return whether all parameters of each region are finite, bool `[R]`."""
        check_alive(state)
        return self._read.are_finite(state.region.params)

    def restore_regions(self, state: TrainState, bad: np.ndarray) -> TrainState:
        """Restart the regions `bad`, bool `[R]`, from the outer parameters.

        Raises:
          ValueError: if the method has no robust mean (`exclude_above`).
        """
        if self._syncs is None or state.sync is None or not self.method.can_restore:
            raise ValueError(
                f"method={self.method.name!r} restores no region; pass exclude_above"
            )
        return self._syncs.restore(state, bad)

    def mean_params(self, state: TrainState) -> PyTree:
        """Return the mean of the regions' parameters, for evaluations.

        With `optax.contrib.schedule_free` these are y, at which gradients are taken,
        as are the outer parameters. For those to evaluate, x, see `docs/start`.
        """
        check_alive(state)
        return joined(self._read.mean(state.region.params), state.frozen)

    def mean_model_state(self, state: TrainState) -> PyTree:
        """Return the model's state for an evaluation, `()` if it has none.

        Floating-point leaves are means over regions, others the first region's.
        """
        check_alive(state)
        return self._read.mean_state(state.region.model_state)

    def region_drift(self, state: TrainState) -> jax.Array:
        """Return how far apart the regions are, see `region_state.region_drift`."""
        check_alive(state)
        return self._read.drift(state.region.params)

    def are_equal(self, params: PyTree, others: PyTree) -> bool:
        """Return whether one region's parameters equal others; waits for them."""
        return bool(self._read.are_equal(params, others))

    def outer_params(self, state: TrainState) -> PyTree:
        """Return the outer parameters on the mesh; the mean if they are regional.

        They are of the same kind as `mean_params`.
        """
        check_alive(state)
        if self._syncs is None:
            return self.mean_params(state)
        outer = self._syncs.outer_params(state, self._read.mean)
        return joined(outer, state.frozen)

    def copy_fragment(self, state: TrainState, fragment_id: int) -> PyTree:
        """Return a copy of the regions' current fragment, `[R, ...]`."""
        assert self._syncs is not None
        return self._syncs.copy[fragment_id](state.region.params)

    def compressors_of(self, state: TrainState, rank: int) -> PyTree:
        """Return the regions' compressor states, resized to messages of `rank`."""
        assert self._syncs is not None
        assert state.sync is not None
        return self._syncs.compressors_of(state.sync, rank)

    def outer_bytes(self, state: TrainState) -> int:
        """Return the bytes of state that a method adds to local training.

        Outer parameters and optimizer states, fragments in flight, and compressors, of
        all regions together; each array is counted once.
        """
        kept = (state.sync.arrays if state.sync else (), state.region.per_step)
        return sum(x.nbytes for x in jax.tree.leaves(kept))
