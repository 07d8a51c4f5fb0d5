"""The programs of a run for a machine, and the least work that they must do."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from cocodc_jax import models
from cocodc_jax.aot.costs import written_flops
from cocodc_jax.aot.targets import GPUS_PER_HOST, Target
from cocodc_jax.chips import Chip
from cocodc_jax.engine.devices import LoweredProgram
from cocodc_jax.engine.mesh import DATA, EXPERT, REGION, SEQUENCE
from cocodc_jax.engine.transfer import PINNED
from cocodc_jax.expert_leaves import expert_axis
from cocodc_jax.models.dispatch import rows_of_a_round
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.run.build import build_program, check_model, mesh_of
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.losses import judge, torus_steps
from cocodc_jax.sync.schedules.base import START, events_at
from cocodc_jax.train.evaluate import list_evaluate
from cocodc_jax.train.run_steps import MAX_SCAN_STEPS

FIRST_STATE = "first state"
INNER_STEPS = "inner steps"


@dataclasses.dataclass(frozen=True)
class Built:
    """The programs of a run for a machine."""

    target: Target
    program: RegionProgram  # Of the method.
    mesh: Mesh  # Of devices to compile for.
    listed: list[LoweredProgram]  # To compile.
    scan_steps: int  # T, inner steps in one call.
    syncs_per_step: float  # Syncs that start, on average.
    state: Any  # Abstract, with the most that is ever in flight.
    # The share of a round's rows to experts that an even router fills; 1 without an
    # expert axis.
    even_share: float


def place(config: TrainConfig, target: Target, keep_data_axis: bool) -> TrainConfig:
    """Divide a machine over a run's regions; return the resulting configuration.

    The data axis takes the chips that other axes leave, unless `keep_data_axis`.
    Messages cross in the program, as for regions that share a fabric. A `ValueError`
    names the flag.
    """
    run = config.run
    num_chips = target.num_chips
    if num_chips % run.regions:
        raise ValueError(
            f"regions={run.regions} do not divide the {num_chips} chips of "
            f"target={target} * slices={target.slices}; use another number"
        )
    if target.slices > 1 and run.regions % target.slices:
        raise ValueError(
            f"slices={target.slices} do not hold regions={run.regions} in equal "
            "numbers; use a divisor"
        )

    chips = num_chips // run.regions  # Of one region.
    inside = run.stages * run.expert_axis * run.sequence_axis * run.model_axis
    if keep_data_axis:
        inside *= run.data_axis
    if chips % inside or (keep_data_axis and chips != inside):
        raise ValueError(
            f"stages * data_axis * expert_axis * sequence_axis * model_axis = {inside} "
            f"do not divide the {chips} chips of a region of target={target} with none "
            "left; use divisors, and leave out data_axis, which then takes the rest"
        )

    if not keep_data_axis:
        config = config.replace(data_axis=chips // inside)
    return config.replace(exchange="program") if run.exchange == "auto" else config


def build(config: TrainConfig, target: Target) -> Built:
    """Make the programs of a run that `place` has divided; compiles nothing.

    The vocabulary is the preset's, as no corpus is opened.
    """
    run = config.run
    data = config.data
    model = config.model
    check_model(config, model)

    devices = target.devices()
    devices_per_chip = len(devices) // target.num_chips  # A chip may show as several.
    config = config.replace(data_axis=run.data_axis * devices_per_chip)
    mesh = mesh_of(config.run, devices)
    program = build_program(config, model, mesh)
    scan_steps, syncs_per_step, schedule = _walk(program, run.log_every)

    sequences = (data.batch_per_region, data.sequence_length + 1)
    batches = jax.ShapeDtypeStruct((scan_steps, run.regions, *sequences), jnp.int32)
    loss_fn = judge(config, model, mesh)
    evaluation = list_evaluate(
        loss_fn, mesh, program.param_shapes, (run.eval_batches, *sequences)
    )
    return Built(
        target=target,
        program=program,
        mesh=mesh,
        listed=[*program.list_programs(batches), evaluation],
        scan_steps=scan_steps,
        syncs_per_step=syncs_per_step,
        state=program.abstract(schedule),
        even_share=_even_share(config),
    )


def _even_share(config: TrainConfig) -> float:
    run = config.run
    data = config.data
    if run.expert_axis == 1:
        return 1.0

    tokens = data.batch_per_region * data.sequence_length
    tokens //= run.devices_per_batch * run.sequence_axis * run.accumulate_steps
    rows = tokens * config.model.experts_per_token
    room = rows_of_a_round(rows, run.expert_axis)
    return rows / (run.expert_axis * room)


def _walk(program: RegionProgram, log_every: int) -> tuple[int, float, Any]:
    """Follow the schedule for three intervals."""
    sync = program.method.sync
    if sync is None:
        return min(log_every, MAX_SCAN_STEPS), 0.0, None

    schedule = sync.schedule
    end = 3 * schedule.sync_interval
    state = schedule.init()
    fullest = state  # The state with the most in flight.
    longest = 1
    starts = 0
    done = 0

    def observe(name: str) -> list:
        """Return equal observations for all fragments."""
        return [] if name == "applied" else [1.0] * len(program.fragments)

    while (step := schedule.next_step(state)) <= end:
        longest = max(longest, min(step - done, MAX_SCAN_STEPS))
        done = step
        for after, event in events_at(schedule, state, step, observe):
            state = after
            starts += event is not None and event.kind == START
        if len(state.in_flight) > len(fullest.in_flight):
            fullest = state

    return longest, starts / end, fullest


def model_flops(config: TrainConfig, num_devices: int) -> float:
    """Return the model's own operations of one step on one device."""
    data = config.data
    tokens = data.batch_per_region * data.sequence_length
    per_token = models.flops_per_token(config.model, data.sequence_length)
    return per_token * tokens * config.run.regions / num_devices


def recomputed_flops(built: Built, config: TrainConfig) -> float:
    """Return the operations that a step's backward pass recomputes, on one device.

    They are the products of the inner steps minus those of inner steps that keep every
    activation. `config` is that of `built`.
    """
    if config.model.remat == "none":
        return 0.0
    kept = build(config.replace(remat="none"), built.target)

    def flops_of(one_build: Built) -> float:
        steps = next(x for x in one_build.listed if x.name == INNER_STEPS)
        jaxpr = steps.program.trace(*steps.arguments).jaxpr
        return written_flops(jaxpr, one_build.even_share)

    recomputed = flops_of(built) - flops_of(kept)
    return recomputed / built.scan_steps / built.mesh.size


def least_bytes_inside(built: Built, config: TrainConfig) -> float:
    """Return the least bytes that a device receives over its tokens' axes in one step.

    They are those of fully sharded data parallelism: each weight is gathered twice in
    the compute dtype (forward and backward), and its float32 gradient is
    reduce-scattered. Gradients of replicated parameters are all-reduced. Over an expert
    axis each row, of a token and one of its experts, goes there and back, and so do
    cotangents; weights of experts are not gathered over it. Keys and values that
    attention gathers over a sequence axis are not counted.
    """
    mesh = built.mesh
    model = config.model
    itemsize = jnp.dtype(model.compute_dtype).itemsize
    total = 0.0
    leaves = jax.tree_util.tree_leaves_with_path(built.state.region.params)

    frozen = jax.tree_util.tree_leaves_with_path(built.state.frozen)  # No gradients.
    for at, (path, leaf) in enumerate(leaves + frozen):
        named = jax.tree.leaves(tuple(leaf.sharding.spec))
        over = [axis for axis in (DATA, EXPERT, SEQUENCE) if axis in named]

        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if EXPERT in over and expert_axis(name) is not None:
            over.remove(EXPERT)

        gathered = over or (DATA, EXPERT, SEQUENCE)
        size = math.prod(mesh.shape[axis] for axis in gathered)
        numbers = device_bytes([leaf], mesh) // leaf.dtype.itemsize
        of_gradient = leaf.dtype.itemsize if at < len(leaves) else 0
        if over:  # Gathered twice, and its gradient scattered.
            total += numbers * (2 * itemsize + of_gradient) * (size - 1)
        else:  # Its gradient is all-reduced.
            total += numbers * 2 * of_gradient * (size - 1) / size

    tokens = config.data.batch_per_region * config.data.sequence_length
    rows = model.experts_per_token * tokens // (mesh.shape[DATA] * mesh.shape[SEQUENCE])
    layers = model.num_layers // model.moe_every if model.num_experts else 0
    share = (mesh.shape[EXPERT] - 1) / mesh.shape[EXPERT] ** 2

    return total + 4 * layers * rows * share * model.width * itemsize


def device_bytes(tree: Any, mesh: Mesh) -> int:
    """Return a device's bytes of abstract arrays, without those in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf.sharding, NamedSharding)
        and leaf.sharding.mesh == mesh
        and leaf.sharding.memory_kind != PINNED
    )


def held_bytes(built: Built, listed: LoweredProgram) -> int:
    """Return the bytes of a device's state that are not a program's arguments."""
    if listed.name == FIRST_STATE:
        return 0

    state = built.state
    held = []
    arguments = (x for x in jax.tree.leaves(listed.arguments) if hasattr(x, "sharding"))
    taken = collections.Counter((x.shape, str(x.dtype), x.sharding) for x in arguments)

    kept = (state.region, state.frozen, state.sync and state.sync.arrays)
    for leaf in jax.tree.leaves(kept):
        key = (leaf.shape, str(leaf.dtype), leaf.sharding)
        if taken[key] > 0:
            taken[key] -= 1
        else:
            held.append(leaf)

    return device_bytes(held, built.mesh)


def device_of(target: Target, mesh: Mesh) -> Chip:
    """Return the rates of a device of the mesh, with those of its region's links.

    In a region of several GPU hosts, devices are connected by the network. Regions in
    one TPU slice or GPU host are connected by its links. If weights are gathered axis
    by axis of a torus, the links of one axis carry them at a time.
    """
    chip = target.per_device(mesh.size)
    if torus_steps(mesh):
        chip = dataclasses.replace(chip, link_bps=chip.link_bps / chip.axes)
    if chip.platform == "cuda" and mesh.size // mesh.shape[REGION] > GPUS_PER_HOST:
        return dataclasses.replace(chip, link_bps=chip.network_bps)
    is_host = chip.platform == "cuda" and target.num_chips <= GPUS_PER_HOST
    if is_host or (chip.platform == "tpu" and target.slices == 1):
        return dataclasses.replace(chip, network_bps=chip.link_bps)
    return chip
