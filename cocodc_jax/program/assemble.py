"""Validate the arguments of a `RegionProgram`, and build its parts from them.

Checks shapes, types and placement only; never reads a value or waits for a device.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.core.checks import (
    check_accumulation,
    check_arrays,
    check_counts,
    check_feedback,
    check_inner_state,
    check_params,
    check_passed,
    checked_fragments,
)
from cocodc_jax.core.state import TrainState
from cocodc_jax.core.sync import make_correct
from cocodc_jax.engine.crossing import Exchange, SyncSpec, Trainer
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.executor import Executor
from cocodc_jax.engine.frozen import Trainable, find_trained, split, without_masks
from cocodc_jax.engine.mesh import (
    EXPERT,
    INSIDE,
    REGION,
    is_cpu,
    make_mesh,
    trace_without_mesh_if_needed,
)
from cocodc_jax.engine.placement import (
    OuterPlacement,
    Shardings,
    memory_kind,
    with_shardings,
)
from cocodc_jax.engine.region_map import LocalRegions
from cocodc_jax.engine.region_state import InitState, RegionMetrics
from cocodc_jax.engine.segment import InnerSteps
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program import inner_step as step
from cocodc_jax.program.batches import Batches
from cocodc_jax.sync import needs
from cocodc_jax.sync.accumulation import Accumulation
from cocodc_jax.sync.accumulation import find as find_accumulation
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.inner_state import OnMerge, is_moved, merge_opt_state
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms.layers import named_leaves
from cocodc_jax.transforms.numerics import check_transform

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Given:
    """What a program is made from."""

    loss_fn: AnyLossFn
    optimizer: optax.GradientTransformation  # Wrapped to accept `value=`.
    method: Method  # Bound to the regions.
    whole: PyTree  # Shapes of one region's parameters.
    # Bools like them, None if all are trained; see `frozen.find_trained`.
    trained: PyTree
    params: PyTree  # Shapes of the trained parameters.
    regions: Regions  # All regions.
    own: Regions  # Regions that this program trains.
    mesh: Mesh
    fragments: Fragments
    user_inputs: UserInputs
    transport: Transport
    model_state: ModelState | None
    exchange: str  # Name of the exchange, as `Transport.resolve` returns it.
    overlap: bool  # Whether syncs and inner steps share a program.
    accumulation: Accumulation  # Of gradients, by the optimizer.
    holds_copies: bool  # Whether its state holds a copy of the parameters.
    # What a merge does to one region's optimizer state, None if nothing.
    on_merge: OnMerge | None


class Parts(NamedTuple):
    """The parts of a program; each compiled function is wrapped in one jit."""

    shardings: Shardings  # Of all arrays.
    whole: PyTree  # Shapes and shardings of one region's parameters.
    first: InitState  # Makes the regions' state before the first step.
    batches: Batches  # Places batches on the mesh.
    read: RegionMetrics  # Reads metrics of the regions.
    corrects: bool  # Whether the inner steps also take the outer state.
    steps: Any  # The inner steps, `(region, batches, participating, counted, *outer)`.
    exchange: Exchange | None  # How messages cross regions; None without syncs.
    syncs: Executor | None  # Programs of the syncs; None without syncs.
    devices: Devices  # What compiles and runs programs.


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
    """Validate the arguments of a program, see `RegionProgram`; fill in defaults."""
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={loss_fn!r} must be a function, (params, batch, key) -> (loss, "
            "aux)"
        )
    check_transform("optimizer", optimizer, "optax.adam(1e-3)")
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
        is_needed = argument in ("method", "user_inputs", "transport")
        # Such as a name, or a function that was not called.
        if (value is not None or is_needed) and not isinstance(value, kind):
            raise ValueError(
                f"{argument}={value!r} must be a {kind.__name__}: {made_by}"
            )
    own = transport.own(regions, method)
    mesh = make_mesh(own.num) if mesh is None else mesh
    _check_mesh(mesh, own.num)
    check_arrays(params)
    whole = jax.eval_shape(lambda x: x, params)
    trained = find_trained(trainable, whole, optimizer)
    params, _ = split(whole, trained)
    check_params(params)
    needs.check(method.needs, user_inputs, f"method={method.name!r}")
    method = method.bind(regions)
    accumulation = find_accumulation(optimizer, params)
    check_accumulation(accumulation, method, regions.step_times)
    copies = check_inner_state(optimizer, method, params, user_inputs)
    check_passed(copies.state)
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
    check_counts(method, fragments, user_inputs, whole)
    if user_inputs.outputs is not None:
        outputs = tuple(map(trace_without_mesh_if_needed, user_inputs.outputs))
        user_inputs = dataclasses.replace(user_inputs, outputs=outputs)
    if trained is not None and user_inputs.second_moment is not None:
        found = without_masks(user_inputs.second_moment, params)
        user_inputs = dataclasses.replace(user_inputs, second_moment=found)
    on_merge = None
    if user_inputs.on_merge is not None or is_moved(copies.state):
        on_merge = functools.partial(merge_opt_state, on_merge=user_inputs.on_merge)
    return Given(
        loss_fn=trace_without_mesh_if_needed(loss_fn),
        optimizer=optimizer,
        method=method,
        whole=whole,
        trained=trained,
        params=params,
        regions=regions,
        own=own,
        mesh=mesh,
        fragments=fragments,
        user_inputs=user_inputs,
        transport=transport,
        model_state=model_state,
        exchange=exchange,
        overlap=overlap,
        accumulation=accumulation,
        holds_copies=copies.some,
        on_merge=on_merge,
    )


def _check_mesh(mesh: Mesh, num_regions: int) -> None:
    if mesh.axis_names != (axes := (REGION, *INSIDE)):
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
    given, made = jax.tree.structure(params), jax.tree.structure(shapes)
    if given != made:
        raise ValueError(
            f"params has the structure {given}, but the program was made for {made}"
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
    given: Given,
    param_specs: PyTree | None,
    local_regions: str,
    optimizer_memory: str,
    devices: Devices,
) -> Parts:
    """Build the parts of a program on `devices`; compiles nothing."""
    method, mesh, transport = given.method, given.mesh, given.transport
    memory = memory_kind(optimizer_memory, mesh, method)
    specs = P() if param_specs is None else param_specs
    leaves = jax.tree.leaves(jax.tree.broadcast(specs, given.whole))
    # Flax Linen boxes parameters but not their specs.
    specs = jax.tree.structure(given.whole).unflatten(leaves)
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
        given.params, given.optimizer, shardings, given.own.num, transport.own_keys,
        given.regions.num, method.per_step, given.model_state, devices,
    )  # fmt: skip
    if "second_moment" in method.needs:  # It refuses an optimizer without one.
        assert given.user_inputs.second_moment is not None
        # Its memory, of devices or hosts, makes no difference here.
        plain = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first.abstract().opt_state
        )
        jax.eval_shape(given.user_inputs.second_moment, plain)
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
    losses = NamedSharding(mesh, P(None, REGION))
    exchange = syncs = None
    if (sync := method.sync) is not None:
        kind, overlap = given.exchange, given.overlap
        spec = SyncSpec(
            sync=sync,
            regions=given.own,
            fragments=given.fragments,
            place=OuterPlacement.resolve(sync.outer, shardings, kind, overlap),
            params=given.params,
            trainer=Trainer(
                loss_fn=given.loss_fn,
                user_inputs=given.user_inputs,
                init_opt_state=given.optimizer.init,
                model_state=given.model_state,
                on_merge=given.on_merge,
            ),
            local=local,
            devices=devices,
        )
        exchange = transport.exchange_of(spec, kind, overlap)
        syncs = Executor(spec, exchange, overlap)
        syncs.use_steps(InnerSteps(steps, first.lies, losses))
    return Parts(
        shardings,
        with_shardings(given.whole, where),
        first,
        Batches(mesh, given.own.num, pads=is_cpu(mesh) and not given.overlap),
        RegionMetrics(mesh, devices),
        correct is not None,
        devices.jit(
            steps, "inner steps", donate_argnums=0, out_shardings=(first.lies, losses)
        ),
        exchange,
        syncs,
        devices,
    )
