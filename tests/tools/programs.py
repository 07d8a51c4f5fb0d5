"""Print a hash of the programs that the package traces, one line a case.

    python -m tests.tools.programs > before.txt
    ... change code, but nothing that it computes ...
    python -m tests.tools.programs | diff before.txt - && echo unchanged

Compiles and runs nothing. A case is every method as a transform (`cc.synchronized`),
every program that a run of the method compiles (`RegionProgram.list_programs`), every
transform and compressor of the tests' batteries, and the loss of the transformer with
its gradient, on one device and over stages, positions and experts.

A hash is of the equations in their order, with the shapes and values they work on.
Names of Python functions and variables, and where in a file they stand, have no part in
it. Arguments choose cases by what their names begin with: `python -m
tests.tools.programs transform/ model/`.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

if __name__ == "__main__":  # As the tests have it, before a module makes an array.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_num_cpu_devices", 9)
    jax.config.update("jax_numpy_rank_promotion", "raise")

import cocodc_jax as cc  # noqa: E402
from cocodc_jax import methods, models  # noqa: E402
from cocodc_jax.transforms import compression  # noqa: E402
from tests.core import test_optimizer  # noqa: E402
from tests.jaxprs import digest  # noqa: E402
from tests.models import pipelined  # noqa: E402
from tests.program import test_family, tiny  # noqa: E402
from tests.transforms import test_battery, test_compression  # noqa: E402

Trace = Callable[[], Any]

# --- Methods, as transforms and as programs of regions ---


def _trace_transform(name: str, options: dict, optimizer: Any) -> ClosedJaxpr:
    """Trace a step of every region, with `synchronized` around an optimizer."""
    method = methods.get(name, **options)
    num_regions = method.num_regions or tiny.NUM_REGIONS
    tx = cc.synchronized(
        optimizer,
        method,
        axis_name="region",
        num_regions=num_regions,
        user_inputs=tiny.USER_INPUTS,
    )
    axes = (0, cc.sync_axes(method))
    step = test_optimizer.make_step(tiny.loss_fn, tx)
    all_regions = jax.vmap(
        step, in_axes=(axes, 0), out_axes=(axes, 0), axis_name="region"
    )

    def init_and_step(batch):
        params = tiny.make_params()
        carry = test_optimizer.laid_out(axes, (params, tx.init(params)), num_regions)
        return all_regions(carry, batch)

    batch = jax.tree.map(lambda x: x[:num_regions], tiny.make_batch(0))
    return jax.make_jaxpr(init_and_step)(batch)


def _transforms() -> Iterator[tuple[str, Trace]]:
    for name, (method, options, optimizer) in test_optimizer.CASES.items():
        yield (
            f"transform/{name}",
            functools.partial(_trace_transform, method, options, optimizer),
        )


def _shapes_of_batches(num_steps: int, num_regions: int) -> Any:
    batch = tiny.make_batch(0)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_steps, num_regions, *x.shape[1:]), x.dtype),
        batch,
    )


def _trace_listed(program: Any, num_steps: int) -> dict[str, ClosedJaxpr]:
    batches = _shapes_of_batches(num_steps, program.num_regions)
    listed = program.list_programs(batches)
    return {entry.name: entry.program.trace(*entry.arguments).jaxpr for entry in listed}


def _programs() -> Iterator[tuple[str, Trace]]:
    for name in test_family.OPTIONS:
        yield (
            f"program/{name}",
            lambda name=name: _trace_listed(test_family.make(name), num_steps=2),
        )
    for name in ("cocodc", "cocodc_hessian"):  # With curvatures of every source.
        yield (
            f"program/{name} of tiny",
            lambda name=name: _trace_listed(tiny.make_program(name), num_steps=2),
        )
    for name in ("streaming_diloco", "cocodc"):
        yield (
            f"sharded/{name}",
            lambda name=name: _trace_listed(
                tiny.sharded_program(name, 4, 2, 1), num_steps=2
            ),
        )


# --- What methods are made of ---


def _trace_update(case: Any) -> ClosedJaxpr:
    def init_and_update(gradients, params, anchor):
        transform = test_battery.build(case)
        return test_battery.run(transform, gradients, params, anchor)

    trees = [test_battery.tree(seed) for seed in range(3)]
    return jax.make_jaxpr(init_and_update)(*trees)


def _trace_round_trip(text: str) -> ClosedJaxpr:
    compressor = compression.parse(text)

    def round_trip(x, key):
        memory = compressor.init(x)
        for _ in range(2):  # With the memory that the first message leaves.
            message, memory = compressor.encode(x, memory, key)
        return message, memory, compressor.decode(message)

    return jax.make_jaxpr(round_trip)(test_compression.tree(), test_compression.KEY)


def _parts() -> Iterator[tuple[str, Trace]]:
    for name, case in test_battery.CASES.items():
        yield f"update/{name}", functools.partial(_trace_update, case)
    for text in test_compression.EXPRESSIONS:
        yield f"compressor/{text}", functools.partial(_trace_round_trip, text)


# --- The transformer ---

_PLAIN = pipelined.CONFIG
_MIXTURE = dataclasses.replace(_PLAIN, num_experts=4, expert_width=12, shared_experts=1)
_CONFIGS = {
    "plain": _PLAIN,
    "untied": pipelined.UNTIED,
    "chunked": pipelined.CHUNKED,
    "adapted": pipelined.ADAPTED,
    "bfloat16": pipelined.BFLOAT16,
    "unscanned": dataclasses.replace(_PLAIN, scan_layers=False, num_kv_heads=1),
    "offload": dataclasses.replace(_PLAIN, remat="offload"),
    "blocks": dataclasses.replace(_PLAIN, attention="blocks", remat="attention"),
    "cpu": dataclasses.replace(_PLAIN, backward="cpu", qk_norm=True),
    "mixture": _MIXTURE,
    "ragged": dataclasses.replace(_MIXTURE, expert_dispatch="ragged", moe_every=2),
}


def _trace_loss(config: Any) -> ClosedJaxpr:
    step = pipelined.step(models.make_loss_fn(config))
    return jax.make_jaxpr(step)(
        pipelined.shapes(config), pipelined.tokens(), pipelined.KEY
    )


def _trace_init(config: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(functools.partial(models.init_params, config))(pipelined.KEY)


def _trace_run(**leaves: Any) -> dict[str, ClosedJaxpr]:
    """Trace the programs of a run that flags describe."""
    from cocodc_jax.run.build import build_program, mesh_of
    from cocodc_jax.run.config.presets import PRESETS

    config = PRESETS["smoke"].replace(
        method="diloco",
        sync_interval=2,
        steps=100,
        warmup_steps=1,
        eval_batches=2,
        regions=2,
        sequence_length=8,
        **leaves,
    )
    num_devices = config.run.regions * config.run.devices_per_region
    mesh = mesh_of(config.run, jax.devices()[:num_devices])
    program = build_program(config, config.model, mesh)
    tokens = jax.ShapeDtypeStruct((2, 2, 4, 9), np.int32)
    return {
        entry.name: entry.program.trace(*entry.arguments).jaxpr
        for entry in program.list_programs(tokens)
    }


_STAGES = {"stages": 2, "microbatches": 2, "scan_layers": True}
_EXPERTS = {"num_experts": 4, "expert_width": 12}
_RUNS = {
    "plain": {},
    "data": {"data_axis": 2},
    "model": {"model_axis": 2},
    "sequence": {"sequence_axis": 2},
    "experts": {"expert_axis": 2, **_EXPERTS},
    "experts by tokens": {"expert_weights": "tokens", **_EXPERTS},
    "stages": _STAGES,
    "stages by int8": {**_STAGES, "stage_compress": "int8"},
    "subspace": {**_STAGES, "stage_subspace": 4},
    "accumulated": {"accumulate_steps": 2},
}


def _models() -> Iterator[tuple[str, Trace]]:
    for name, config in _CONFIGS.items():
        yield f"model/{name}/init", functools.partial(_trace_init, config)
        yield f"model/{name}/loss", functools.partial(_trace_loss, config)
    for name, leaves in _RUNS.items():
        yield f"run/{name}", functools.partial(_trace_run, **leaves)


def main(prefixes: list[str]) -> None:
    """Print one line a case, sorted as they are made."""
    for cases in (_transforms, _programs, _parts, _models):
        for name, trace in cases():
            if prefixes and not name.startswith(tuple(prefixes)):
                continue

            traced = trace()
            jaxprs = traced if isinstance(traced, dict) else {"": traced}
            for part, jaxpr in jaxprs.items():
                title = f"{name}: {part}" if part else name
                print(digest(jaxpr), title, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
