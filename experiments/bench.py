"""Region program against plain Optax loops: what the framework costs.

    python -m experiments.bench

The same regions, model, batches and inner optimizer, once in a `RegionProgram` and
once as so many plain `lax.scan` loops, one after the other on one device. Both are
timed in turn within one process, because these machines are noisy; the ratio of
tokens per second is the figure to read, and it should be at least 0.95.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.run import flags
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.presets import PRESETS

from . import commands

# As many steps as the tiny preset's interval: a sync is part of the region program.
STEPS = 40


def main() -> None:
    """Print a row for each preset and layout."""
    regions, repeats = flags.value("regions"), flags.value("repeats")
    with flags.usage_errors():
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1")
        names = flags.value("presets").split(",")
        for name in names:
            if name not in PRESETS:
                raise ValueError(f"presets={name!r} is unknown; use {list(PRESETS)}")
        cc.use_cpu_devices(regions + 1)
    table = Table("preset", "method", "devices", box=box.SIMPLE, pad_edge=False)
    for head in ("region program tokens/s", "plain loops", "ratio"):
        table.add_column(head, justify="right")
    for name in names:
        config = PRESETS[name].replace(regions=regions, eval_batches=regions)
        for method in ("diloco", "cocodc"):
            for num_devices in sorted({1, min(regions, len(jax.devices()))}):
                ours, plain = measure(config, method, num_devices, repeats)
                table.add_row(
                    name,
                    method,
                    str(num_devices),
                    f"{ours:,.0f}",
                    f"{plain:,.0f}",
                    f"{ours / plain:.2f}",
                )
    console = Console()
    console.print(table)
    console.print(f"Medians of {repeats} turns, {regions} regions.", highlight=False)


def measure(
    config: TrainConfig, method: str, num_devices: int, repeats: int
) -> tuple[float, float]:
    """Tokens per second of the region program, and of the plain loops.

    Args:
      config: model, optimizer and sizes.
      method: name of the method.
      num_devices: devices that the regions are spread over.
      repeats: turns that are timed; each is `STEPS` steps of every region.
    """
    model = config.model
    params = models.init_params(model, jax.random.key(0))
    regions, data = config.run.regions, config.data
    batches = np.random.default_rng(0).integers(
        0,
        model.vocab_size,
        (STEPS, regions, data.batch_per_region, data.sequence_length + 1),
        np.int32,
    )
    loss_fn = models.make_loss_fn(model)
    optimizer = config.optimizer.build(10**6)
    parts = (loss_fn, optimizer, params, batches)
    contenders = (
        _region_program(config, method, num_devices, *parts),
        _plain_loops(*parts),
    )
    for turn in contenders:
        turn()  # Compiles.
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for turn, taken in zip(contenders, seconds, strict=True):
            began = time.perf_counter()
            turn()
            taken.append(time.perf_counter() - began)
    tokens = STEPS * regions * data.batch_per_region * data.sequence_length
    ours, plain = (tokens / statistics.median(taken) for taken in seconds)
    return ours, plain


def _region_program(
    config: TrainConfig, method, num_devices, loss_fn, optimizer, params, batches
) -> Callable[[], None]:
    regions = config.run.regions
    config = config.replace(method=method, sync_interval=STEPS)
    program = cc.RegionProgram(
        loss_fn,
        optimizer,
        config.method.build(),
        params,
        regions,
        mesh=cc.make_mesh(regions, devices=jax.devices()[:num_devices]),
    )
    held = [program.init(params, jax.random.key(0))]

    def turn() -> None:
        stream = iter(batches)
        for state, _ in cc.run_steps(program, held.pop(), stream, STEPS):
            held[:] = [state]
        jax.block_until_ready(held[0].region.params)

    return turn


def _plain_loops(loss_fn, optimizer, params, batches) -> Callable[[], None]:
    def step(carry: Any, batch: Any):
        params, opt_state = carry
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch, jax.random.key(0)
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    loop = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs), donate_argnums=0)
    carries = [
        jax.tree.map(lambda x: x.copy(), (params, optimizer.init(params)))
        for _ in range(batches.shape[1])
    ]

    def turn() -> None:
        for region, carry in enumerate(carries):
            carries[region], _ = loop(carry, batches[:, region])
        jax.block_until_ready(carries)

    return turn


def cli() -> None:
    """Run the program as a command."""
    flags.define_one(str, "presets", "smoke,tiny", "Presets, separated by commas.")
    flags.define_one(int, "regions", 4, "Regions that train, M.")
    flags.define_one(int, "repeats", 5, "Timed turns of each contender.")
    flags.run_main(main, commands.shown(__doc__))


if __name__ == "__main__":
    cli()
