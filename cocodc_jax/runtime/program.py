"""One method around one loss: inner steps, and the syncs that are due after them.

`RegionProgram` holds what is compiled; the run itself is the `TrainState` that goes
in and comes out. Nothing here waits for a device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import inner, merging, transfer
from cocodc_jax.runtime.crossing import ALL_REDUCES
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.mesh import DATA, REGION, make_mesh, regional, wants_one_piece
from cocodc_jax.runtime.places import over_places
from cocodc_jax.runtime.sources import Sources
from cocodc_jax.runtime.state import OuterState, RegionState, TrainState
from cocodc_jax.runtime.syncs import Sync, SyncPrograms, Times
from cocodc_jax.sync.events import ScheduleState
from cocodc_jax.sync.fragments import Fragments, cut
from cocodc_jax.sync.methods import Method
from cocodc_jax.sync.regional import RegionalOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.compressor import message_bytes

PyTree = Any

# Shape of a PRNG key's data.
_KEY_DATA = jax.ShapeDtypeStruct((2,), jnp.uint32)
# Steps in one scan at most: their batches are all on the device at once.
MAX_SCAN_STEPS = 100


class Output(NamedTuple):
    """What `RegionProgram.advance` did, still on its devices.

    Attributes:
      losses: float32 `[T, R]`.
      aux: the loss function's aux, each `[T, R]`.
      syncs: the syncs applied after the last step.
    """

    losses: jax.Array
    aux: dict[str, jax.Array]
    syncs: tuple[Sync, ...]


class RegionProgram:
    """Compiled programs of one method for one model on one mesh.

    Example: see `run`. Everything mutable is in the `TrainState` that goes in and
    comes out; region arrays are donated, so an old state must not be used again.
    """

    def __init__(
        self,
        loss_fn: inner.LossFn,
        optimizer: optax.GradientTransformation,
        method: Method,
        params: PyTree,
        num_regions: int,
        *,
        mesh: Mesh | None = None,
        fragments: Fragments | None = None,
        learning_rate: float | Callable[[int], Any] | None = None,
        second_moment: Callable[[PyTree], PyTree] | None = None,
        outputs: tuple[Callable, Callable] | None = None,
        param_specs: PyTree | None = None,
        regions: Regions | None = None,
        exchange: str = "auto",
        all_reduce: str = "direct",
        outer_lanes: int = 1,
    ):
        """Prepares the programs; nothing is compiled before the first call.

        Args:
          loss_fn: `(params, batch, key) -> (loss, aux)` of one region; aux is a dict
            of scalars.
          optimizer: the inner optimizer, the same for every region.
          method: from `cocodc_jax.methods`.
          params: one region's parameters, or their shapes.
          num_regions: M.
          mesh: the inner mesh; by default as many regions side by side as devices
            allow.
          fragments: how to cut the parameters; by default as the method says.
          learning_rate: of the inner optimizer, a constant or a schedule of the step,
            for merges that need it.
          second_moment: takes the regional inner optimizer state to a tree like the
            parameters, for merges that need it; see `adam_second_moment`.
          outputs: the loss in two parts, `model(params, batch) -> outputs` and
            `loss(outputs, batch) -> scalar`, for merges by Gauss-Newton products.
          param_specs: for each parameter, a `PartitionSpec` over the mesh's axes
            inside a region; replicated by default.
          regions: how fast each region is; alike by default.
          exchange: "program" averages messages in a program of the inner mesh, "outer"
            on the outer mesh, beside the inner steps; "auto" is the latter where
            there are several processes and the method allows it.
          all_reduce: how messages cross between processes, where this package
            chooses: "direct" or "ring", see `crossing.py`.
          outer_lanes: outer meshes side by side; fragment k crosses on number
            k mod outer_lanes, so that as many can be on their way at once.

        Raises:
          ValueError: if the mesh does not divide the regions, the parameters do not
            cut into the method's fragments, the merge needs what is not given, the
            method cannot be had with these regions, or not with so many lanes.
        """
        self.mesh = make_mesh(num_regions) if mesh is None else mesh
        if num_regions % self.mesh.shape[REGION]:
            raise ValueError(
                f"num_regions={num_regions} is not a multiple of the mesh's region "
                f"axis, {self.mesh.shape[REGION]}"
            )
        self.num_regions = num_regions
        self.regions = Regions.alike(num_regions) if regions is None else regions
        self.method = method = method.for_regions(self.regions, num_regions)
        method.check_lanes(outer_lanes, exchange, jax.process_count())
        self.fragments = fragments or cut(
            params, method.num_fragments, method.fragment_strategy
        )
        if len(self.fragments) != method.num_fragments:
            raise ValueError(
                f"fragments has {len(self.fragments)} entries, but method="
                f"{method.name!r} was made for num_fragments={method.num_fragments}"
            )
        if all_reduce not in ALL_REDUCES:
            raise ValueError(
                f"all_reduce={all_reduce!r} is unknown; use one of {ALL_REDUCES}"
            )
        self._optimizer = optimizer
        shapes = jax.eval_shape(lambda x: x, params)
        self.layout = Layout.of(
            self.mesh, self.fragments, optimizer, shapes, param_specs, outer_lanes
        )
        self._abstract_params = shapes
        # Every program is wrapped in one jit that lives as long as this object.
        self._new_region = jax.jit(self._make_region, out_shardings=self._where(shapes))
        steps = inner.make_steps(
            loss_fn,
            optimizer,
            self.mesh,
            num_regions,
            method.step_exchange,
            method.compressor,
            all_reduce,
        )
        # Losses are whole inside each region: every process reads those of its own.
        of_steps = NamedSharding(self.mesh, P(None, REGION))
        self._steps = jax.jit(
            steps, donate_argnums=0, out_shardings=(self._where(shapes), of_steps)
        )
        self._mean = jax.jit(
            over_places(
                functools.partial(
                    inner.mean_over_regions, in_one_piece=wants_one_piece(self.mesh)
                ),
                self.mesh,
                in_specs=P(REGION),
                out_specs=P(),
            )
        )
        # Small enough for every process to have, whoever's regions they are.
        everywhere = NamedSharding(self.mesh, P())
        self._finite = jax.jit(inner.are_finite, out_shardings=everywhere)
        self._spread = jax.jit(merging.spread, out_shardings=everywhere)
        self._join = jax.jit(self.fragments.join)
        self._syncs = method.schedule and SyncPrograms(
            method,
            self.mesh,
            self.fragments,
            self.layout,
            self.regions,
            shapes,
            Sources(loss_fn, learning_rate, second_moment, outputs),
            method.crosses_outside(exchange, jax.process_count()),
            all_reduce,
        )

    @functools.cached_property
    def bytes_per_step(self) -> int:
        """Bytes one region sends at every inner step, besides syncs."""
        exchange, compressor = self.method.step_exchange, self.method.compressor
        if exchange is None or self.num_regions == 1:
            return 0
        params = self._abstract_params
        message, _ = jax.eval_shape(
            lambda g, key: exchange.send(
                g, exchange.init(g, compressor), compressor, key
            ),
            params,
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        return message_bytes(message)

    def _where(self, shapes: PyTree) -> RegionState:
        """Shardings of a `RegionState`."""
        state = jax.eval_shape(self._make_region, shapes, _KEY_DATA)
        # What is sent at every step is kept whole on each of a region's devices.
        sender = jax.tree.map(lambda _: regional(self.mesh), state.sender)
        return self.layout.region._replace(sender=sender)

    def init(self, params: PyTree, key: jax.Array) -> TrainState:
        """The state before the first step: all regions and the outer model alike.

        Args:
          params: one region's parameters.
          key: PRNG key; each region gets its own from it.
        """
        everywhere = NamedSharding(self.mesh, P())
        key_data = transfer.put(jax.random.key_data(key), everywhere)
        params = transfer.put(params, self.layout.params)
        region = self._new_region(params, key_data)
        if self._syncs is None:
            return TrainState(region, OuterState((), ()), {}, None)
        outer, senders, in_flight, memory = self._syncs.init(params, region.params)
        return TrainState(region, outer, in_flight, memory, senders)

    def _make_region(self, params: PyTree, key_data: jax.Array) -> RegionState:
        key = jax.random.wrap_key_data(key_data)

        spread = functools.partial(inner.for_all_regions, num_regions=self.num_regions)
        sender = ()
        if self.method.step_exchange is not None:
            sender = self.method.step_exchange.init(params, self.method.compressor)
        return RegionState(
            spread(params),
            spread(self._optimizer.init(params)),
            jax.random.key_data(jax.random.split(key, self.num_regions)),
            spread(sender),
        )

    def abstract(self, params: PyTree, memory: ScheduleState | None) -> TrainState:
        """Shapes, dtypes and shardings of the state at which `memory` was taken.

        Args:
          params: one region's parameters, or their shapes.
          memory: the schedule's state, which tells the fragments in flight.

        Returns:
          A `TrainState` of `jax.ShapeDtypeStruct`s, for restoring a checkpoint.
        """
        shapes = jax.eval_shape(lambda x: x, params)
        region = place(
            jax.eval_shape(self._make_region, shapes, _KEY_DATA),
            self._where(shapes),
        )
        if self._syncs is None:
            return TrainState(region, OuterState((), ()), {}, memory)
        outer, senders, in_flight = self._syncs.abstract(shapes, memory, region)
        return TrainState(region, outer, in_flight, memory, senders)

    def steps_to_event(self, state: TrainState) -> int | None:
        """Inner steps until the next event; None for a method without a schedule."""
        if self.method.schedule is None or state.schedule is None:
            return None
        return self.method.schedule.next_step(state.schedule) - state.step

    def put_batches(self, batches: PyTree) -> PyTree:
        """Places host batches `[T, R, B, ...]` on the mesh, B over the data axis.

        With several processes each gives the rows of its own regions, whole, also
        those that it shares with other processes.
        """

        def put(x):
            spec = P(None, REGION, DATA) if np.ndim(x) > 2 else P(None, REGION)
            sharding = NamedSharding(self.mesh, spec)
            if isinstance(x, jax.Array) or sharding.is_fully_addressable:
                return jax.device_put(x, sharding)
            return transfer.put_own(x, sharding, self.num_regions, axis=1)

        return jax.tree.map(put, batches)

    def advance(
        self, state: TrainState, batches: PyTree, times: Times = (0.0, 0.0)
    ) -> tuple[TrainState, Output]:
        """Runs T inner steps, then the events of the step they lead to.

        Args:
          state: donated.
          batches: leaves `[T, R, B, ...]`, on the mesh or on the host; T at most
            `steps_to_event(state)`.
          times: seconds of an inner step and of a sync as this process has measured
            them, 0 for not yet; for schedules that go by them.

        Raises:
          ValueError: if T would run past an event.
        """
        num_steps = jax.tree.leaves(batches)[0].shape[0]
        limit = self.steps_to_event(state)
        if limit is not None and num_steps > limit:
            raise ValueError(
                f"{num_steps} steps run past the event {limit} steps ahead; pass at "
                "most `steps_to_event(state)`"
            )
        batches = self.put_batches(batches)
        active = None
        if not self.regions.are_even:
            active = self.regions.active(state.step, num_steps)
        region, (losses, aux) = self._steps(state.region, batches, active)
        state = dataclasses.replace(
            state,
            region=region,
            step=state.step + num_steps,
            bytes_sent=state.bytes_sent + num_steps * self.bytes_per_step,
        )
        syncs: tuple[Sync, ...] = ()
        if self._syncs is not None:
            state, syncs = self._syncs.after_steps(state, batches, times)
        return state, Output(losses, aux, syncs)

    def settle(self, state: TrainState) -> TrainState:
        """Tells the schedule of every update applied; waits for their norms."""
        return self._syncs.settle(state) if self._syncs else state

    def finite_regions(self, state: TrainState) -> jax.Array:
        """Whether all parameters of a region are finite, bool `[R]`."""
        return self._finite(state.region.params)

    def mean_params(self, state: TrainState) -> PyTree:
        """The mean of the regions' parameters: what every method is judged by."""
        return self._mean(state.region.params)

    def spread(self, state: TrainState) -> jax.Array:
        """How far the regions are apart, see `merging.spread`; a float32 scalar."""
        return self._spread(state.region.params)

    def outer_params(self, state: TrainState) -> PyTree:
        """The outer parameters, on the mesh; the mean where regions have their own."""
        if self.method.schedule is None:
            return self.mean_params(state)
        if isinstance(self.method.outer_optimizer, RegionalOuter):
            whole = state.region.params
            for k, part in enumerate(state.outer.params):
                whole = self.fragments.put(whole, k, part, lead=1)
            return self._mean(whole)
        parts, lanes = state.outer.params, self.layout.lanes
        if len(lanes) > 1:  # One program joins them, so on one device.
            parts = transfer.move(parts, lanes[0].host)
        return transfer.move(self._join(parts), self.layout.params)

    def outer_bytes(self, state: TrainState) -> int:
        """Bytes of everything a method keeps besides the regions' own training.

        Outer parameters and optimizer, fragments in flight, senders: of all regions
        together, each array counted once.
        """
        kept = (state.outer, state.in_flight, state.senders, state.region.sender)
        return sum(x.nbytes for x in jax.tree.leaves(kept))


def run(
    program: RegionProgram, state: TrainState, batches: Iterable[PyTree], num_steps: int
) -> Iterator[tuple[TrainState, Output]]:
    """Runs `num_steps` inner steps and yields after every scan, so at every event.

    Args:
      program: the compiled method.
      state: donated.
      batches: one step's host batches at a time, leaves `[R, B, ...]`.
      num_steps: inner steps to do.

    Yields:
      The state and the `Output` of the steps since the last yield.

    Raises:
      ValueError: if `batches` ends before.
    """
    stream, end = iter(batches), state.step + num_steps
    while state.step < end:
        ahead = program.steps_to_event(state) or MAX_SCAN_STEPS
        num_steps = min(ahead, end - state.step, MAX_SCAN_STEPS)
        batches = take_batches(stream, state.step, num_steps)
        state, output = program.advance(state, batches)
        yield state, output


def take_batches(stream: Iterator[PyTree], step: int, num_steps: int) -> PyTree:
    """Stacks the next batches for one `advance`.

    Args:
      stream: gives one step's host batches at a time.
      step: inner steps done, for the error message.
      num_steps: how many to take, T.

    Returns:
      Leaves `[T, R, B, ...]`.

    Raises:
      ValueError: if the stream ends before.
    """
    taken = list(itertools.islice(stream, num_steps))
    if len(taken) < num_steps:
        raise ValueError(
            f"batches ended at step {step + len(taken)}, before the next cut at step "
            f"{step + num_steps}; give an endless iterator, or ask for fewer steps"
        )
    return jax.tree.map(lambda *x: np.stack(x), *taken)
