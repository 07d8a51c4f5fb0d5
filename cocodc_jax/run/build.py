"""Build devices, program and evaluation from a run's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.core.checks import UnevenFragmentsWarning
from cocodc_jax.data.text_data import TextData
from cocodc_jax.elastic.place import MIN_KEY_BYTES, Place
from cocodc_jax.engine.mesh import (
    EXPERT,
    MODEL,
    REGION,
    STAGE,
    Mesh,
    inner_devices,
    make_mesh,
)
from cocodc_jax.engine.transfer import gather
from cocodc_jax.files import say
from cocodc_jax.run import losses
from cocodc_jax.run.config.optimizer_config import OptimizerConfig
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import RunConfig, TrainConfig
from cocodc_jax.run.processes import check_shares
from cocodc_jax.train.evaluate import make_evaluate
from cocodc_jax.transforms.compensation import adam_second_moment

# Arguments of methods that have a meaning only for a mixture of experts.
_OF_EXPERTS = {
    "fragment_strategy": "experts",
    "expert_weights": "tokens",
    "transmission_score": "load",
}


def use_devices(run: RunConfig, num_processes: int) -> list[Any]:
    """Return the devices for regions; on a CPU, virtual ones and the outer devices."""
    wanted = run.regions * run.devices_per_region
    of_process = wanted // max(num_processes, 1)
    # On other platforms the option only makes devices for the outer state.
    with contextlib.suppress(RuntimeError):  # JAX has started: use its devices.
        cc.use_cpu_devices(max(of_process, run.devices) + run.outer_channels)

    if jax.process_count() > 1:
        return _shared_devices(run, wanted)
    devices = jax.devices()
    is_cpu = devices[0].platform == "cpu"
    there = wanted if is_cpu else len(devices)
    if run.devices > there:
        virtual = (
            " (regions * stages * data_axis * expert_axis * sequence_axis * model_axis "
            "virtual ones)"
        )
        raise ValueError(
            f"devices={run.devices} asks for more than there are: {there}"
            f"{virtual if is_cpu else ''}"
        )
    return devices[: run.devices or there]


def _shared_devices(run: RunConfig, wanted: int) -> list[Any]:
    """Return as many devices of every process as regions need, ordered by process."""
    count = jax.process_count()
    if run.devices:
        raise ValueError(
            f"devices={run.devices} has no meaning for {count} processes, which share "
            "the regions out; leave it out"
        )
    check_shares(run.regions, count, run.devices_per_region)

    there = jax.local_device_count()
    processes_per_region = max(count // run.regions, 1)
    of_region = run.devices_per_region // processes_per_region  # In one process.
    most = max(run.regions // count, 1)
    fitting = [
        num_regions
        for num_regions in range(1, most + 1)
        if most % num_regions == 0 and num_regions * of_region <= there
    ]
    if not fitting:
        raise ValueError(
            f"one region needs {of_region} devices of a process, but a process has "
            f"{there}; lower stages, data_axis, expert_axis, sequence_axis or "
            "model_axis"
        )
    return inner_devices(fitting[-1] * of_region)


def mesh_of(run: RunConfig, devices: list[Any] | None = None) -> Mesh:
    """Return the inner mesh of a run on these devices."""
    return make_mesh(
        run.regions,
        run.data_axis,
        run.model_axis,
        devices,
        stage=run.stages,
        expert=run.expert_axis,
        sequence=run.sequence_axis,
    )


def check_model(config: TrainConfig, model: models.TransformerConfig) -> None:
    """Raise ValueError if a region's devices or the method cannot divide the model."""
    run = config.run
    interval = config.method.values.get("router_interval")
    if interval is not None and not model.num_experts:
        raise ValueError(
            f"router_interval={interval} has no meaning for a model without experts; "
            "leave it out, or use num_experts=8"
        )
    for name, value in _OF_EXPERTS.items():
        if config.method.values.get(name) == value and not model.num_experts:
            raise ValueError(
                f"{name}={value} has no meaning for a model without experts; leave it "
                "out, or use num_experts=8"
            )

    models.check_divisible(
        model,
        data=run.data_axis,
        model=run.model_axis,
        stages=run.stages,
        sequence=run.sequence_axis,
        expert=run.expert_axis,
    )
    losses.subspace_of(run, model)
    if run.is_pipelined:
        batch = config.data.batch_per_region
        models.check_pipeline(
            model,
            stages=run.stages,
            microbatches=run.microbatches,
            batch=batch,
            data=run.data_axis,
        )


def init_params(
    run: RunConfig, model: models.TransformerConfig, key: jax.Array
) -> models.Params:
    """Initialize or read one region's parameters, projected to the subspace if any.

    With adapters, the base model is read and the adapters are initialized.
    """
    if run.init_from:
        params = models.hugging_face.read(run.init_from, model)
        return models.lora.adapted(params, model, key)

    params = models.init_params(model, key)
    subspace = losses.subspace_of(run, model)
    return params if subspace is None else models.confine(params, subspace)


def program_key(config: TrainConfig) -> tuple:
    """Return a key that is equal for runs that can share a compiled program."""
    run = config.run
    return (
        config.method,
        config.optimizer,
        config.data.sequence_length,
        run.unequal(config.data.batch_per_region),
        run.transport,
        run.steps,
        run.how_mapped,
        run.optimizer_memory,
        run.step_seconds,
        run.accumulate_steps,
        run.microbatches,
        run.random_routing,
        run.stage_subspace,
        run.stage_compress,
    )


def own_part(config: TrainConfig, place: Place | None) -> RunConfig:
    """Return the configuration of this process: of one region if it is elastic."""
    run = config.run
    if place is None:
        return run
    if run.random_routing:
        raise ValueError(
            "random_routing=True hands activations on to other regions, which "
            "exchange='elastic' does not; leave it out"
        )

    transport = dataclasses.replace(run.transport, place=place)
    transport.own(run.unequal(config.data.batch_per_region), config.method.build())
    return dataclasses.replace(run, regions=1, step_times="", batch_sizes="")


def check_elastic(config: TrainConfig) -> None:
    """Raise ValueError for what elastic regions cannot run, before they are started."""
    if config.run.exchange not in ("auto", "elastic"):
        raise ValueError(
            f"exchange={config.run.exchange!r} is not how elastic regions "
            "exchange; leave it out"
        )
    # Placeholder addresses: they make no difference to the checks.
    addresses = tuple(f"region-{number}:1" for number in range(config.run.regions))
    place = Place(0, addresses, bytes(MIN_KEY_BYTES))
    own_part(config.replace(exchange="elastic"), place)


def training_parts(
    model: models.TransformerConfig,
    method: cc.methods.Method,
    inner: OptimizerConfig,
    steps: int,
    layout: models.Layout | None = None,
    subspace: models.Subspace | None = None,
) -> tuple[optax.GradientTransformation, cc.UserInputs]:
    """Return the inner optimizer and the user inputs for training a model."""
    optimizer = inner.build(steps, method)
    if subspace is not None:
        optimizer = models.confined(optimizer, subspace)
    if model.num_experts:
        optimizer = models.experts.counting(optimizer)

    user_inputs = cc.UserInputs(
        inner.learning_rate(steps, method),
        adam_second_moment(inner.second_moment_decay(method)),
        models.make_outputs(model, layout),
        token_counts=models.experts.is_token_count if model.num_experts else None,
    )
    return optimizer, user_inputs


def build_program(
    config: TrainConfig,
    model: models.TransformerConfig,
    mesh: Mesh,
    place: Place | None = None,
) -> cc.RegionProgram:
    """Build the program that trains the model by the run's method; compiles nothing.

    Args:
      config: of the run.
      model: the model with the vocabulary of its corpus.
      mesh: of the regions' devices.
      place: of an elastic region; None for others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenFragmentsWarning)
        return _program(config, model, mesh, place)


def _program(
    config: TrainConfig,
    model: models.TransformerConfig,
    mesh: Mesh,
    place: Place | None,
) -> cc.RegionProgram:
    shapes = jax.eval_shape(
        lambda key: models.init_params(model, key), jax.random.key(0)
    )
    method = config.method.build()
    layout = losses.layout(config.run, mesh)
    model = losses.with_kernels(
        config=config,
        model=model,
        method=method,
        device=mesh.devices.flat[0],
        is_divided=layout is not None,
    )
    subspace = losses.subspace_of(config.run, model)
    optimizer, user_inputs = training_parts(
        model=model,
        method=method,
        inner=config.optimizer,
        steps=config.run.steps,
        layout=layout,
        subspace=subspace,
    )

    return cc.RegionProgram(
        loss_fn=losses.make(own_part(config, place), model, method, mesh),
        optimizer=optimizer,
        method=method,
        params=shapes,
        regions=config.run.unequal(config.data.batch_per_region),
        mesh=mesh,
        param_specs=models.partition_specs(
            shapes,
            stage=STAGE if config.run.stages > 1 else None,
            divides_embedding=layout is not None,
            axes=(losses.axes(config.run).tokens, MODEL),
            expert=EXPERT if config.run.expert_axis > 1 else None,
        ),
        user_inputs=user_inputs,
        transport=dataclasses.replace(config.run.transport, place=place),
        local_regions=config.run.how_mapped,
        optimizer_memory=config.run.optimizer_memory,
        trainable=models.lora.is_adapter if model.lora_rank else None,
    )


def say_if_uneven(config: TrainConfig, program: cc.RegionProgram) -> None:
    """Warn of uneven fragments, naming the flag, unless a preset cuts them so.

    It replaces the warning of `RegionProgram`, which names its argument.
    """
    sizes = program.fragments.num_params
    if max(sizes) <= 2 * min(sizes) or jax.process_index():
        return

    method = config.method
    preset = PRESETS.get(config.preset)
    strategy = method.values.get("fragment_strategy")
    if strategy not in ("strided", "sequential"):
        return

    usual = cc.methods.defaults(method.method)
    if preset is not None:
        usual |= dict(preset.method.where_taken)
    names = ("num_fragments", "fragment_strategy")
    is_usual = all(method.values[name] == usual[name] for name in names)
    if is_usual and (preset is None or preset.model == config.model):
        return
    say(
        f"note: --num_fragments={len(sizes)} cuts the model into fragments of "
        f"{', '.join(f'{size:,}' for size in sizes)} parameters, so that some syncs "
        "carry more than twice what others do; --fragment_strategy=balanced evens them"
    )


def open_for(
    open_text: Callable[..., TextData],
    config: TrainConfig,
    mesh: Mesh,
    place: Place | None = None,
) -> TextData:
    """Open the corpus for the regions of this process; process 0 prepares it."""
    own_regions = None  # All.
    if place is not None:
        own_regions = [place.region]
    elif jax.process_count() > 1:
        own_regions = _regions_of_process(config.run.regions, mesh)

    if jax.process_index() > 0:
        gather("process 0 has prepared it")
    text = open_text(config.data, config.run.regions, own_regions)
    if jax.process_index() == 0:
        gather("process 0 has prepared it")
    return text


def _regions_of_process(num_regions: int, mesh: Mesh) -> list[int]:
    """Return the regions that have devices of this process."""
    block = num_regions // mesh.shape[REGION]
    regions = []
    for row, devices in enumerate(mesh.devices):
        processes = {device.process_index for device in devices.flat}
        if jax.process_index() in processes:
            regions += range(row * block, (row + 1) * block)
    return regions


def build_evaluate(
    config: TrainConfig, model: models.TransformerConfig, mesh: Mesh, text: TextData
) -> Callable[[models.Params], jax.Array]:
    """Return the evaluation on the validation batches; compiles nothing."""
    # The same batches whatever the method and the seed.
    try:
        tokens = text.eval_tokens(config.run.eval_batches)
    except ValueError as error:
        raise ValueError(f"eval_batches={config.run.eval_batches}: {error}") from error
    return make_evaluate(losses.judge(config, model, mesh), mesh, tokens)
