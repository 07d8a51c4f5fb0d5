"""The syncs of one method without inner steps: `SyncProgram`.

`RegionProgram` adds the inner steps; a `RegionSync` has those of a trainer. All mutable
state is in the `TrainState` that goes in and comes out. Nothing here waits for a
device.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.core.checks import (
    check_arrays,
    check_counts,
    check_feedback,
    check_params,
    checked_fragments,
)
from cocodc_jax.core.state import AppliedSync, TrainState
from cocodc_jax.engine import transfer
from cocodc_jax.engine.crossing import Exchange, SyncSpec, Times, Trainer
from cocodc_jax.engine.devices import Devices, Recorder
from cocodc_jax.engine.elastic_exchange import ElasticExchange
from cocodc_jax.engine.executor import Executor
from cocodc_jax.engine.frozen import copied, joined, split
from cocodc_jax.engine.mesh import (
    EXPERT,
    INSIDE,
    REGION,
    make_mesh,
    methods_in_own_context,
    trace_without_mesh_if_needed,
)
from cocodc_jax.engine.placement import (
    OuterPlacement,
    Shardings,
    memory_kind,
    shardings_of,
    with_shardings,
)
from cocodc_jax.engine.region_map import LocalRegions
from cocodc_jax.engine.region_state import InitState, RegionMetrics
from cocodc_jax.engine.segment import InnerSteps
from cocodc_jax.engine.transport import Transport
from cocodc_jax.sync import needs
from cocodc_jax.sync.accumulation import NONE, Accumulation
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.schedules.base import Pending
from cocodc_jax.transforms.layers import named_leaves

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """The validated arguments of a program of syncs; see `make_setting`."""

    method: Method  # Bound to the regions.
    whole: PyTree  # Shapes of one region's parameters.
    # Bools like them, None if all are trained; see `frozen.find_trained`.
    trained: PyTree
    params: PyTree  # Shapes of the trained parameters.
    regions: Regions  # All regions.
    own_regions: Regions  # Regions that this program trains.
    mesh: Mesh
    fragments: Fragments
    transport: Transport
    trainer: Trainer
    exchange: str  # Name of the exchange, as `Transport.resolve` returns it.
    overlap: bool  # Whether syncs and inner steps share a program.
    accumulation: Accumulation = NONE  # Of gradients, by the optimizer.
    holds_copies: bool = False  # Whether its state holds a copy of the parameters.


class Parts(NamedTuple):
    """The parts of a program; each compiled function is wrapped in one jit."""

    shardings: Shardings  # Of all arrays.
    whole: PyTree  # Shapes and shardings of one region's parameters.
    first: InitState  # Makes the regions' state before the first step.
    read: RegionMetrics  # Reads metrics of the regions.
    local: LocalRegions  # The regions of a device.
    exchange: Exchange | None  # How messages cross regions; None without syncs.
    syncs: Executor | None  # Programs of the syncs; None without syncs.
    devices: Devices  # What compiles and runs programs.


def make_setting(
    method: Method | str,
    params: PyTree,
    regions: int | Regions,
    trainer: Trainer,
    transport: Transport,
    mesh: Mesh | None = None,
    fragments: Fragments | None = None,
    trained: PyTree = None,
) -> Setting:
    """Validate the arguments of a program of syncs, and fill in defaults.

    It checks only shapes, types and placement, and never reads a value or waits for a
    device. `params` are one region's, or their shapes; for the others see
    `RegionProgram`.
    """
    if not isinstance(regions, Regions):
        regions = Regions.alike(regions)
    if isinstance(method, str):
        method = methods.get(method)
    _check_types(method, mesh, fragments, trainer, transport)

    own_regions = transport.own(regions, method)
    mesh = make_mesh(own_regions.num) if mesh is None else mesh
    _check_mesh(mesh, own_regions.num)

    check_arrays(params)
    whole = jax.eval_shape(lambda x: x, params)
    trained_params, _ = split(whole, trained)
    check_params(trained_params)

    user_inputs = trainer.user_inputs
    needs.check(method.needs, user_inputs, f"method={method.name!r}")
    bound = method.bind(regions)
    if trainer.model_state is not None:
        trainer.model_state.check(bound)
        transport.check_model_state(trainer.model_state)
    exchange = transport.resolve(bound, jax.process_count())
    overlap = transport.overlaps(bound, mesh, exchange)

    fragments = dataclasses.replace(
        checked_fragments(bound, trained_params, fragments),
        shares_experts=mesh.shape.get(EXPERT, 1) > 1,
    )
    check_feedback(bound, fragments, trained_params)
    check_counts(bound, fragments, user_inputs, whole)

    if user_inputs.outputs is not None:
        model, loss = user_inputs.outputs
        outputs = (
            trace_without_mesh_if_needed(model),
            trace_without_mesh_if_needed(loss),
        )
        user_inputs = dataclasses.replace(user_inputs, outputs=outputs)
    traced_trainer = dataclasses.replace(
        trainer,
        loss_fn=trace_without_mesh_if_needed(trainer.loss_fn),
        user_inputs=user_inputs,
    )
    return Setting(
        method=bound,
        whole=whole,
        trained=trained,
        params=trained_params,
        regions=regions,
        own_regions=own_regions,
        mesh=mesh,
        fragments=fragments,
        transport=transport,
        trainer=traced_trainer,
        exchange=exchange,
        overlap=overlap,
    )


def _check_types(
    method: Any, mesh: Any, fragments: Any, trainer: Trainer, transport: Any
) -> None:
    """Raise ValueError for arguments of other types, such as a factory not called."""
    example = "UserInputs(learning_rate=...), say"
    needed = (
        ("method", method, Method, "methods.get(NAME, ...) gives one"),
        ("user_inputs", trainer.user_inputs, UserInputs, example),
        ("transport", transport, Transport, "Transport(exchange=...), say"),
    )
    for argument, value, kind, made_by in needed:
        _check_type(argument, value, kind, made_by)

    optional = (
        ("mesh", mesh, Mesh, "make_mesh(regions, data=..., model=...) gives one"),
        ("fragments", fragments, Fragments, "cut(params, num_fragments) gives one"),
        ("model_state", trainer.model_state, ModelState, "ModelState(init), say"),
    )
    for argument, value, kind, made_by in optional:
        if value is not None:
            _check_type(argument, value, kind, made_by)


def _check_type(argument: str, value: Any, kind: type, made_by: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{argument}={value!r} must be a {kind.__name__}: {made_by}")


def _check_mesh(mesh: Mesh, num_regions: int) -> None:
    axes = (REGION, *INSIDE)
    if mesh.axis_names != axes:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}, which must be {axes}; use "
            "make_mesh(regions, data=..., model=...)"
        )
    if num_regions % mesh.shape[REGION]:
        raise ValueError(
            f"regions={num_regions} is not a multiple of the mesh's region axis, "
            f"{mesh.shape[REGION]}"
        )


def check_like(params: PyTree, shapes: PyTree) -> None:
    """Refuse parameters of another structure, shape or dtype than the program's."""
    check_arrays(params)

    structure = jax.tree.structure(params)
    expected = jax.tree.structure(shapes)
    if structure != expected:
        raise ValueError(
            f"params has the structure {structure}, but the program was made for "
            f"{expected}"
        )

    leaves = named_leaves(jax.eval_shape(lambda x: x, params))
    for (path, leaf), like in zip(leaves, jax.tree.leaves(shapes), strict=True):
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"params has a leaf {path!r} of {leaf.dtype}{list(leaf.shape)}, but "
                f"the program was made for {like.dtype}{list(like.shape)}"
            )


def check_alive(state: TrainState) -> None:
    """Refuse a state that was already donated to a call of `advance`."""
    # Steps donate all arrays, merges the parameters: checking those is enough.
    leaves = jax.tree.leaves((state.region.params, state.region.key))
    if any(_is_of_arrays(type(x)) and x.is_deleted() for x in leaves):
        raise ValueError(
            f"the state of step {state.step} was donated to `advance` and is gone: "
            "go on with the state that `advance` returned, and copy what is needed of "
            "an old one before (`jax.tree.map(jnp.copy, ...)`)"
        )


@functools.cache  # A state has many leaves of few types.
def _is_of_arrays(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)


def assemble(
    setting: Setting,
    param_specs: PyTree | None,
    local_regions: str,
    optimizer_memory: str,
    devices: Devices,
) -> Parts:
    """Build the parts of a program on `devices`; compiles nothing."""
    method = setting.method
    mesh = setting.mesh
    trainer = setting.trainer
    transport = setting.transport

    # Flax Linen boxes parameters but not their specs: the leaves' specs in their tree.
    spec_prefix = P() if param_specs is None else param_specs
    leaves = jax.tree.leaves(jax.tree.broadcast(spec_prefix, setting.whole))
    specs = jax.tree.structure(setting.whole).unflatten(leaves)
    param_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shardings = Shardings.of(
        mesh=mesh,
        fragments=setting.fragments,
        optimizer=trainer.optimizer,
        shapes=setting.params,
        specs=split(specs, setting.trained)[0],
        outer_channels=transport.outer_channels,
        optimizer_memory=memory_kind(optimizer_memory, mesh, method),
    )

    first = InitState(
        params=setting.params,
        optimizer=trainer.optimizer,
        shardings=shardings,
        num_regions=setting.own_regions.num,
        own_keys=transport.own_keys,
        of_all=setting.regions.num,
        per_step=method.per_step,
        model_state=trainer.model_state,
        devices=devices,
    )
    if "second_moment" in method.needs:  # It refuses an optimizer without one.
        assert trainer.user_inputs.second_moment is not None
        # Its memory, of devices or hosts, makes no difference here.
        plain = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first.abstract().opt_state
        )
        jax.eval_shape(trainer.user_inputs.second_moment, plain)

    num_params = sum(x.size for x in jax.tree.leaves(setting.params))
    local = LocalRegions.of(mesh, setting.own_regions.num, local_regions, num_params)

    exchange = None
    syncs = None
    if method.sync is not None:
        place = OuterPlacement.resolve(
            method.sync.outer, shardings, setting.exchange, setting.overlap
        )
        spec = SyncSpec(
            sync=method.sync,
            regions=setting.own_regions,
            fragments=setting.fragments,
            place=place,
            params=setting.params,
            trainer=trainer,
            local=local,
            devices=devices,
        )
        exchange = transport.exchange_of(spec, setting.exchange, setting.overlap)
        syncs = Executor(spec, exchange, setting.overlap)

    return Parts(
        shardings=shardings,
        whole=with_shardings(setting.whole, param_shardings),
        first=first,
        read=RegionMetrics(mesh, devices),
        local=local,
        exchange=exchange,
        syncs=syncs,
        devices=devices,
    )


@methods_in_own_context
class SyncProgram:
    """Compiled programs of one method's syncs, for one model on one mesh.

    Region arrays are donated: do not use an old state again.

    Attributes:
      setting: the arguments that it was made from.
      param_shapes: shapes and shardings of one region's parameters.
      shardings: of all arrays.
      exchange: how messages cross regions; None without syncs.
    """

    def __init__(
        self,
        setting: Setting,
        param_specs: PyTree | None = None,
        local_regions: str = "auto",
        optimizer_memory: str = "device",
    ):
        """Prepare the programs; nothing is compiled before the first call."""
        self.setting = setting
        self._assemble = functools.partial(
            assemble, setting, param_specs, local_regions, optimizer_memory
        )
        self._use(self._assemble(Devices()))

    def _use(self, parts: Parts) -> None:
        self._devices = parts.devices
        self.shardings = parts.shardings
        self.param_shapes = parts.whole
        self.exchange = parts.exchange
        self._syncs = parts.syncs
        self._first = parts.first
        self._read = parts.read

        # Whether inner steps also take the outer state.
        outer = self.method.sync.outer if self.method.sync else None
        self._corrects = getattr(outer, "correct", None) is not None

    @property
    def method(self) -> Method:
        """The method, bound to the regions."""
        return self.setting.method

    @property
    def mesh(self) -> Mesh:
        """The inner mesh."""
        return self.setting.mesh

    @property
    def fragments(self) -> Fragments:
        """The cut of the trained parameters."""
        return self.setting.fragments

    @property
    def regions(self) -> Regions:
        """All regions."""
        return self.setting.regions

    @property
    def num_regions(self) -> int:
        """Number of regions that this program trains."""
        return self.setting.own_regions.num

    @property
    def trained(self) -> PyTree:
        """Bools like the parameters, None if all are trained."""
        return self.setting.trained

    @property
    def model_state(self) -> ModelState | None:
        """Non-trained state of the model, if any."""
        return self.setting.trainer.model_state

    @property
    def accumulation(self) -> Accumulation:
        """Gradients that the inner optimizer accumulates for an update."""
        return self.setting.accumulation

    @property
    def on_merge(self) -> Callable | None:
        """What a merge does to the inner optimizer's state, None if nothing."""
        return self.setting.trainer.on_merge

    @property
    def holds_copies(self) -> bool:
        """Whether the inner optimizer's state holds a copy of the parameters."""
        return self.setting.holds_copies

    def recording(self) -> tuple[Self, Recorder]:
        """Return a copy that compiles and runs nothing, and what it would run."""
        recorder = Recorder()
        listing = copy.copy(self)
        listing._use(self._assemble(recorder))
        return listing, recorder

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
        params_on_mesh = transfer.put(params, shardings_of(self.param_shapes))
        return self.begin(params_on_mesh, key_data)

    def opt_state_of(self, params: PyTree) -> PyTree:
        """Return the inner optimizer's first state at all regions' parameters."""
        return self._first.opt_state_of(params)

    def begin(
        self, params: PyTree, key_data: jax.Array, schedule: Any = None
    ) -> TrainState:
        """Make an initial state of arrays on the mesh and a schedule's state."""
        trained_params, frozen = split(params, self.trained)
        region = self._first.make(trained_params, key_data)
        sync = None
        if self._syncs is not None:
            sync = self._syncs.init(trained_params, region, schedule)
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
            rule = self.method.sync.schedule
            schedule = rule.landed(rule.init())
        sync = self._syncs.abstract(schedule, region)
        return TrainState(region, sync, frozen=frozen)

    def steps_to_event(self, state: TrainState) -> int | None:
        """Return the inner steps until the next event; None if there are no events."""
        if self.method.sync is None or state.sync is None:
            return None
        return self.method.sync.schedule.next_step(state.sync.schedule) - state.step

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
        return self._syncs.run_events(
            state=state, batches=batches, num_steps=1, times=times, merged={}
        )

    def use_steps(self, steps: InnerSteps) -> None:
        """Take the inner steps, of all regions."""
        self._steps = self._devices.jit(
            steps.run,
            "inner steps",
            donate_argnums=0,
            out_shardings=(steps.region, steps.losses),
        )
        if self._syncs is not None:
            self._syncs.use_steps(steps)

    def run_segment(
        self,
        state: TrainState,
        batches: PyTree,
        num_steps: int,
        counted: Any = None,
        times: Times = (0.0, 0.0),
        on_steps: Callable[[int, PyTree], None] = lambda step, outputs: None,
    ) -> tuple[TrainState, PyTree, tuple[AppliedSync, ...]]:
        """Run inner steps, and the events that are due after them.

        Args:
          state: donated.
          batches: in the form that the steps take, leaves `[T, R, ...]`, T at least
            `num_steps`.
          num_steps: steps to take.
          counted: `num_steps` in the form that the steps take; None takes all of
            `batches`.
          times: measured seconds of an inner step and of a sync, 0 if not yet known.
          on_steps: called with the step after the inner steps, and their outputs, as
            soon as they are dispatched; the events may wait for other regions.

        Returns:
          The state, the outputs of the steps, and the syncs that were applied.
        """
        state, outputs, merged = self._inner_steps(state, batches, counted, num_steps)
        state = dataclasses.replace(state, step=state.step + num_steps)
        on_steps(state.step, outputs)

        if self._syncs is None:
            return state, outputs, ()
        state, syncs = self._syncs.run_events(
            state=state,
            batches=batches,
            num_steps=num_steps,
            times=times,
            merged=merged,
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
            result = self._syncs.run_segment(state, batches, participating, step)
            if result is not None:
                return result

        outer = (state.sync.outer,) if self._corrects and state.sync else ()
        region, outputs = self._steps(
            state.region, batches, participating, counted, state.frozen, *outer
        )
        return dataclasses.replace(state, region=region), outputs, {}

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

        With `optax.contrib.schedule_free` they are y, at which gradients are taken, and
        so are the outer parameters. For x, which is evaluated, see `docs/start`.
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
