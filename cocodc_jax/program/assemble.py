"""Build the parts of a `RegionProgram` from its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.core.checks import (
    check_accumulation,
    check_arrays,
    check_feedback,
    check_params,
    checked_fragments,
)
from cocodc_jax.core.regional import make_correct
from cocodc_jax.exchange.base import Exchange, SyncSpec
from cocodc_jax.exchange.programs import Devices
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.program import checks
from cocodc_jax.program import inner_step as step
from cocodc_jax.program.batches import LENGTH_BUCKET, Batches
from cocodc_jax.program.executor import Executor
from cocodc_jax.program.frozen import Trainable, find_trained, split, without_masks
from cocodc_jax.program.region_state import InitState, RegionMetrics
from cocodc_jax.program.segment import InnerSteps
from cocodc_jax.sharding.ambient import trace_without_mesh_if_needed
from cocodc_jax.sharding.local_regions import LocalRegions
from cocodc_jax.sharding.mesh import EXPERT, REGION, is_cpu, make_mesh
from cocodc_jax.sharding.optimizer_memory import memory_kind
from cocodc_jax.sharding.outer_placement import OuterPlacement
from cocodc_jax.sharding.shardings import Shardings, with_shardings
from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Given:
    """The validated arguments of `RegionProgram`, with defaults filled in.

    Attributes:
      optimizer: wrapped to accept `value=`.
      method: bound to the regions.
      whole: shapes of one region's parameters.
      trained: bools like them, None if all are trained; see `frozen.find_trained`.
      params: shapes of the trained parameters.
      regions: all regions.
      own: regions that this program trains.
      exchange: name of the exchange, as `Transport.resolve` returns it.
      overlap: whether syncs and inner steps share a program.
    """

    loss_fn: AnyLossFn
    optimizer: optax.GradientTransformation
    method: Method
    whole: PyTree
    trained: PyTree
    params: PyTree
    regions: Regions
    own: Regions
    mesh: Mesh
    fragments: Fragments
    user_inputs: UserInputs
    transport: Transport
    model_state: ModelState | None
    exchange: str
    overlap: bool


class Parts(NamedTuple):
    """The parts of a program; each compiled function is wrapped in one jit.

    Attributes:
      shardings: of all arrays.
      whole: shapes and shardings of one region's parameters.
      first: makes the regions' state before the first step.
      batches: places batches on the mesh.
      read: reads metrics of the regions.
      corrects: whether the inner steps also take the outer state.
      steps: the inner steps, `(region, batches, participating, counted, *outer)`.
      exchange: how messages cross regions; None without syncs.
      syncs: programs of the syncs; None without syncs.
    """

    shardings: Shardings
    whole: PyTree
    first: InitState
    batches: Batches
    read: RegionMetrics
    corrects: bool
    steps: Any
    exchange: Exchange | None
    syncs: Executor | None


def checked(
    loss_fn: AnyLossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    method: Method | str,
    params: PyTree,
    regions: int | Regions,
    mesh: Mesh | None,
    fragments: Fragments | None,
    user_inputs: UserInputs,
    transport: Transport,
    model_state: ModelState | None,
    trainable: Trainable,
) -> Given:
    """Validate the arguments of a program and fill in defaults.

    Raises:
      ValueError: see `RegionProgram`.
    """
    checks.check_functions(loss_fn, optimizer)
    accumulates = optimizer
    if not isinstance(regions, Regions):
        regions = Regions.alike(regions)
    if isinstance(optimizer, optax.MultiSteps):  # Accepts `value=`.
        each: Any = optimizer.init, optimizer.update
        optimizer = optax.GradientTransformationExtraArgs(*each)
    if isinstance(method, str):
        method = methods.get(method)
    for argument, value, kind, made_by in (
        ("method", method, Method, "methods.get(NAME, ...) gives one"),
        ("mesh", mesh, Mesh, "make_mesh(regions, data=..., model=...) gives one"),
        ("fragments", fragments, Fragments, "cut(params, num_fragments) gives one"),
        ("user_inputs", user_inputs, UserInputs, "UserInputs(learning_rate=...), say"),
        ("transport", transport, Transport, "Transport(exchange=...), say"),
        ("model_state", model_state, ModelState, "ModelState(init), say"),
    ):
        if value is not None or argument in ("method", "user_inputs", "transport"):
            checks.check_kind(argument, value, kind, made_by)
    own = transport.own(regions, method)
    mesh = make_mesh(own.num) if mesh is None else mesh
    checks.check_mesh(mesh, own.num)
    check_arrays(params)
    whole = jax.eval_shape(lambda x: x, params)
    trained = find_trained(trainable, whole, optimizer)
    params, _ = split(whole, trained)
    check_params(params)
    needs.check(method.needs, user_inputs, f"method={method.name!r}")
    method = method.bind(regions)
    check_accumulation(accumulates, method)
    if model_state is not None:
        model_state.check(method)
        transport.check_model_state(model_state)
    exchange = transport.resolve(method, jax.process_count())
    overlap = transport.overlaps(method, mesh, exchange)
    fragments = dataclasses.replace(
        checked_fragments(method, params, fragments),
        shares_experts=mesh.shape.get(EXPERT, 1) > 1,
    )
    check_feedback(method, fragments, params)
    if user_inputs.outputs is not None:
        outputs = tuple(map(trace_without_mesh_if_needed, user_inputs.outputs))
        user_inputs = dataclasses.replace(user_inputs, outputs=outputs)
    if trained is not None and user_inputs.second_moment is not None:
        found = without_masks(user_inputs.second_moment, params)
        user_inputs = dataclasses.replace(user_inputs, second_moment=found)
    return Given(
        trace_without_mesh_if_needed(loss_fn),
        optimizer,
        method,
        whole,
        trained,
        params,
        regions,
        own,
        mesh,
        fragments,
        user_inputs,
        transport,
        model_state,
        exchange,
        overlap,
    )


def assemble(
    given: Given,
    param_specs: PyTree | None,
    local_regions: str,
    optimizer_memory: str,
    devices: Devices,
) -> Parts:
    """Build the parts of a program on `devices`; compiles nothing.

    Raises:
      ValueError: see `RegionProgram`.
    """
    method, mesh, transport = given.method, given.mesh, given.transport
    memory = memory_kind(optimizer_memory, mesh, method)
    specs = P() if param_specs is None else param_specs
    # Flax Linen boxes parameters but not their specs.
    specs = jax.tree.unflatten(
        jax.tree.structure(given.whole),
        jax.tree.leaves(jax.tree.broadcast(specs, given.whole)),
    )
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shardings = Shardings.of(
        mesh,
        given.fragments,
        given.optimizer,
        given.params,
        split(specs, given.trained)[0],
        transport.outer_channels,
        optimizer_memory=memory,
    )
    first = InitState(
        given.params,
        given.optimizer,
        shardings,
        given.own.num,
        transport.own_keys,
        given.regions.num,
        method.per_step,
        given.model_state,
        devices,
    )
    if "second_moment" in method.needs:
        checks.check_second_moment(given.user_inputs, first.abstract().opt_state)
    num_params = sum(x.size for x in jax.tree.leaves(given.params))
    local = LocalRegions.of(mesh, given.own.num, local_regions, num_params)
    correct = make_correct(method.sync, given.fragments, given.own.num)
    steps = step.make_steps(
        given.loss_fn,
        given.optimizer,
        mesh,
        local,
        method.per_step,
        transport.all_reduce,
        correct,
        given.model_state,
        None if memory is None else shardings.region.opt_state,
    )
    # Losses are replicated inside a region: a process reads its own regions'.
    inner = InnerSteps(steps, first.lies, NamedSharding(mesh, P(None, REGION)))
    exchange, syncs = _syncs(given, shardings, local, inner, devices)
    length_bucket = LENGTH_BUCKET if is_cpu(mesh) and not given.overlap else None
    return Parts(
        shardings,
        with_shardings(given.whole, where),
        first,
        Batches(mesh, given.own.num, length_bucket),
        RegionMetrics(mesh, devices),
        correct is not None,
        inner.compiled(devices),
        exchange,
        syncs,
    )


def _syncs(
    given: Given,
    shardings: Shardings,
    local: LocalRegions,
    inner: InnerSteps,
    devices: Devices,
) -> tuple[Exchange | None, Executor | None]:
    if given.method.sync is None:
        return None, None
    sync, overlap = given.method.sync, given.overlap
    spec = SyncSpec(
        sync,
        given.own,
        given.fragments,
        OuterPlacement.resolve(sync.outer, shardings, given.exchange, overlap),
        given.params,
        given.loss_fn,
        given.user_inputs,
        local,
        devices,
        given.model_state,
    )
    exchange = given.transport.exchange_of(spec, given.exchange, overlap)
    return exchange, Executor(spec, exchange, given.optimizer, inner, overlap)
