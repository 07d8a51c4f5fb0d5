"""One method around one loss: inner steps, and the syncs that are due after them.

`RegionProgram` holds what is compiled; the run itself is the `TrainState` that goes
in and comes out. Nothing here waits for a device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime import exchange, inner
from cocodc_jax.runtime.inner import Block
from cocodc_jax.runtime.layout import Layout, place
from cocodc_jax.runtime.mesh import DATA, REGION, make_mesh
from cocodc_jax.runtime.sources import Sources
from cocodc_jax.runtime.state import OuterState, RegionState, TrainState
from cocodc_jax.runtime.syncs import Sync, SyncPrograms
from cocodc_jax.sync.fragments import Fragments, cut
from cocodc_jax.sync.methods import Method
from cocodc_jax.sync.schedule import ScheduleState

PyTree = Any

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

        Raises:
          ValueError: if the mesh does not divide the regions, the parameters do not
            cut into the method's fragments, or the merge needs what is not given.
        """
        self.mesh = make_mesh(num_regions) if mesh is None else mesh
        if num_regions % self.mesh.shape[REGION]:
            raise ValueError(
                f"num_regions={num_regions} is not a multiple of the mesh's region "
                f"axis, {self.mesh.shape[REGION]}"
            )
        self.method = method
        self.num_regions = num_regions
        self.fragments = fragments or cut(
            params, method.num_fragments, method.fragment_strategy
        )
        if len(self.fragments) != method.num_fragments:
            raise ValueError(
                f"fragments has {len(self.fragments)} entries, but method="
                f"{method.name!r} was made for num_fragments={method.num_fragments}"
            )
        self._optimizer = optimizer
        shapes = jax.eval_shape(lambda x: x, params)
        self.layout = Layout.of(
            self.mesh, self.fragments, optimizer, shapes, param_specs
        )
        self._outer_dtypes = jax.tree.map(
            lambda x: exchange.outer_dtype(x.dtype), shapes
        )
        self.bytes_per_step = sum(self.fragments.num_bytes) * method.reduce_gradients
        # Every program is wrapped in one jit that lives as long as this object.
        self._new_region = jax.jit(self._make_region, out_shardings=self.layout.region)
        self._new_outer = jax.jit(self._make_outer)
        steps = inner.make_steps(
            loss_fn, optimizer, self.mesh, num_regions, method.reduce_gradients
        )
        self._steps = jax.jit(
            steps, donate_argnums=0, out_shardings=(self.layout.region, None)
        )
        self._mean = jax.jit(
            jax.shard_map(
                inner.mean_over_regions,
                mesh=self.mesh,
                axis_names={REGION},
                in_specs=P(REGION),
                out_specs=P(),
            )
        )
        self._finite = jax.jit(inner.are_finite)
        self._join = jax.jit(self.fragments.join)
        self._syncs = method.schedule and SyncPrograms(
            method,
            self.mesh,
            self.fragments,
            self.layout,
            Block.of(self.mesh, num_regions),
            Sources(loss_fn, learning_rate, second_moment, outputs),
        )

    def init(self, params: PyTree, key: jax.Array) -> TrainState:
        """The state before the first step: all regions and the outer model alike.

        Args:
          params: one region's parameters.
          key: PRNG key; each region gets its own from it.
        """
        key = jax.device_put(key, NamedSharding(self.mesh, P()))
        region = self._new_region(jax.device_put(params, self.layout.params), key)
        # The jit copies: outer arrays are donated later, the caller's must survive.
        outer = self._new_outer(jax.device_put(params, self.layout.outer))
        schedule = self.method.schedule
        memory = schedule.init() if schedule else None
        return TrainState(region, outer, {}, memory)

    def _make_region(self, params: PyTree, key: jax.Array) -> RegionState:
        def spread(x):
            return jnp.broadcast_to(x[None], (self.num_regions, *x.shape))

        opt_state = jax.tree.map(spread, self._optimizer.init(params))
        keys = jax.random.key_data(jax.random.split(key, self.num_regions))
        return RegionState(jax.tree.map(spread, params), opt_state, keys)

    def _make_outer(self, params: PyTree) -> OuterState:
        if self.method.schedule is None:
            return OuterState((), ())
        cast = jax.tree.map(lambda x, d: x.astype(d), params, self._outer_dtypes)
        parts = tuple(self.fragments.take(cast, k) for k in range(len(self.fragments)))
        init = self.method.outer_optimizer.init
        return OuterState(parts, tuple(init(part) for part in parts))

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
            jax.eval_shape(self._make_region, shapes, jax.random.key(0)),
            self.layout.region,
        )
        outer = jax.eval_shape(self._make_outer, shapes)
        in_flight = {}
        if self._syncs is not None and memory is not None:
            in_flight = {
                k: self._syncs.abstract_flight(k, region.params, outer.params)
                for k, _ in memory.in_flight
            }
        where = jax.tree.map(lambda _: self.layout.outer, outer)
        return TrainState(region, place(outer, where), in_flight, memory)

    def steps_to_event(self, state: TrainState) -> int | None:
        """Inner steps until the next event; None for a method without a schedule."""
        if self.method.schedule is None or state.schedule is None:
            return None
        return self.method.schedule.next_step(state.schedule) - state.step

    def put_batches(self, batches: PyTree) -> PyTree:
        """Places host batches `[T, R, B, ...]` on the mesh, B over the data axis."""

        def put(x):
            spec = P(None, REGION, DATA) if np.ndim(x) > 2 else P(None, REGION)
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(put, batches)

    def advance(self, state: TrainState, batches: PyTree) -> tuple[TrainState, Output]:
        """Runs T inner steps, then the events of the step they lead to.

        Args:
          state: donated.
          batches: leaves `[T, R, B, ...]`, on the mesh or on the host; T at most
            `steps_to_event(state)`.

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
        region, (losses, aux) = self._steps(state.region, batches)
        state = dataclasses.replace(
            state,
            region=region,
            step=state.step + num_steps,
            bytes_sent=state.bytes_sent + num_steps * self.bytes_per_step,
        )
        syncs: tuple[Sync, ...] = ()
        if self._syncs is not None:
            state, syncs = self._syncs.after_steps(state, batches)
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

    def outer_params(self, state: TrainState) -> PyTree:
        """The outer parameters, on the mesh; the mean where a method has none."""
        if self.method.schedule is None:
            return self.mean_params(state)
        return jax.device_put(self._join(state.outer.params), self.layout.params)


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
