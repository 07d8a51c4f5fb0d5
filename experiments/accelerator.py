"""Times training on one accelerator: tokens per second, MFU, and a first frontier.

    python -m experiments.accelerator --workdir=DIR --minutes=10

It has two parts, and measures as many of their rows as the minutes allow:

1. Speed of `30m` and `150m` (the presets small and paper_150m: bfloat16, the platform's
   flash attention) with two and four regions on the one device: a plain loop over the
   regions, a scan that never syncs, diloco, streaming_diloco, cocodc, and one bit a
   value (experiments/recipe.py). Batches are made of random tokens. A turn is
   --interval steps, H; its tokens per second over the scan's are the cost of the syncs.
   Published intervals are longer, so their syncs cost less.
2. Losses of 32 million parameters on the source of the Python standard library, by
   bytes, in four regions: streaming_diloco, one bit, cocodc and data_parallel. The
   rates won at 0.84 million parameters, and were not tuned at this size.

DIR/accelerator.json is written after every row. A row that is in it does not run again,
so the same command continues where it stopped, with the same number of minutes. A row
starts only if it will end within the minutes at the speed of part 1. A row that failed,
for example for lack of memory, has its error, and runs again.

--compile_for=h100 measures nothing: it compiles the programs of part 1 for an H100 (or
h200) that need not be present, and prints their memory and whether they have the flash
kernel. It needs the extra `cuda`. In these programs the syncs' state is on the device,
because the compiler knows no host.

MFU is 6 operations a parameter and token, plus attention (models.flops_per_token), over
the published dense bf16 peak (cocodc_jax/chips.py). A CPU has no MFU; --shapes=tiny is
for trying the program there.
"""

import dataclasses
import gc
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.aot.costs import peak_bytes
from cocodc_jax.aot.targets import Target
from cocodc_jax.chips import mfu, peak_tokens_per_second
from cocodc_jax.files import read_table, write_whole
from cocodc_jax.run import losses
from cocodc_jax.run.build import build_program, mesh_of
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import TrainConfig
from cocodc_jax.run.preparing import prepare
from cocodc_jax.run.resume import make_folder

from . import program, recipe
from .benchmarks import contenders
from .benchmarks.cases import Case
from .benchmarks.contenders import Turn

RESULT_FILE = "accelerator.json"
WARM_TURNS = 2  # The second compiles what only a second cycle needs.
TRAIN_STEPS = 10**6  # Of the learning rate's schedule; no turn comes near its end.
# Seconds of a row of part 2 besides its steps: to compile, to evaluate, to write.
START_S = 60

COMPILED_STEPS = 8  # Of programs that are only compiled; it does not change memory.
FLASH = "__cudnn$fmha"  # XLA's name of cuDNN's attention.

PLAIN_LOOP = "plain loop"
SCAN = "scan"
# Methods by the names of their rows, with the flags that they set.
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"method": "diloco"},
    "streaming_diloco": {
        "method": "streaming_diloco",
        "num_fragments": 4,
        "delay_steps": 2,
    },
    "cocodc": {"method": "cocodc", "num_fragments": 4, "delay_steps": 2},
    "one_bit": recipe.setting().flags,
}
CONTENDERS = (SCAN, PLAIN_LOOP, *METHODS)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
      preset: name of the preset that the model and the optimizer are of.
      sequences: of all regions together in a step.
      trained: the configuration of part 2 for this kind of machine; None skips part 2.
    """

    preset: str
    sequences: int
    trained: TrainConfig | None = None

    def config(self, regions: int) -> TrainConfig:
        """Return the preset with these regions and their share of the batch."""
        return PRESETS[self.preset].replace(
            regions=regions, batch_per_region=max(self.sequences // regions, 1)
        )


# 31.9 million parameters; 32,768 tokens in a step of all regions.
TRAINED = PRESETS["small"].replace(
    num_layers=10,
    tokenizer="bytes",
    regions=4,
    batch_per_region=8,
    steps=4000,
    warmup_steps=200,
    log_every=100,
    eval_every=400,
    checkpoint_every=1000,
)
TINY = PRESETS["smoke"].replace(
    steps=16, warmup_steps=2, eval_every=8, checkpoint_every=8
)
SHAPES = {
    "30m": Shape("small", 64, TRAINED),
    "150m": Shape("paper_150m", 16),
    "tiny": Shape("smoke", 4, TINY),
}
DEFAULT_SHAPES = ("30m", "150m")

# Part 2: streaming_diloco with the rates that won at 0.84 million parameters, others
# with the same inner rate.
INNER_LR_FACTOR = recipe.INNER_LR_FACTOR
TUNED = {"outer_lr": 0.7, "outer_momentum": 0.5}
TRAINED_METHODS: dict[str, dict[str, Any]] = {
    "streaming_diloco": {
        "method": "streaming_diloco",
        "sync_interval": 40,
        "delay_steps": 5,
        "mixing_alpha": 0.25,
        **TUNED,
    },
    "one_bit": recipe.setting().flags,
    "cocodc": {"method": "cocodc", "sync_interval": 40, "delay_steps": 5, **TUNED},
    "data_parallel": {"method": "data_parallel"},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement, and its name in the results."""

    name: str
    measure: Callable[[], dict[str, Any]]
    # Tokens that it trains on, and of which shape; 0 where a row is short.
    tokens: int = 0


class Results:
    """The rows measured so far, in a file that each new row is added to."""

    def __init__(self, workdir: pathlib.Path, device_kind: str):
        self._file = workdir / RESULT_FILE
        self._content = {
            "device": device_kind,
            "jax": jax.__version__,
            "cocodc_jax": cc.__version__,
            "rows": {},
        }
        if not self._file.exists():
            return

        before = read_table(self._file)
        for name in ("device", "jax", "cocodc_jax"):
            if before[name] != self._content[name]:
                raise ValueError(
                    f"workdir={workdir} has rows of {name}={before[name]}, but this is "
                    f"{self._content[name]}; use another folder"
                )
        self._content = before

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows by name, with those that failed."""
        return self._content["rows"]

    def has(self, name: str) -> bool:
        """Return whether a row was measured."""
        return name in self.rows and "error" not in self.rows[name]

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows[name] = row
        write_whole(self._file, json.dumps(self._content, indent=1) + "\n")

    def fastest(self) -> float | None:
        """Return the most tokens per second of part 1; None before its first row."""
        rates = [
            row["tokens_per_second"]
            for row in self.rows.values()
            if "tokens_per_second" in row
        ]
        return max(rates, default=None)


# --- Part 1: speed ---


def speed_rows(
    shapes: Sequence[str],
    regions: Sequence[int],
    wanted: Sequence[str],
    interval_steps: int,
    repeats: int,
) -> Iterator[Row]:
    """Yield a row for each shape, number of regions and contender."""
    for num_regions in regions:
        for shape in shapes:
            config = SHAPES[shape].config(num_regions)
            for contender in wanted:
                name = speed_name(shape, num_regions, contender)
                yield Row(name, _timing_of(config, contender, interval_steps, repeats))


def speed_name(shape: str, regions: int, contender: str) -> str:
    """Return the name of a row of part 1."""
    return f"speed/{shape}/{regions} regions/{contender}"


def _timing_of(
    config: TrainConfig, contender: str, interval_steps: int, repeats: int
) -> Callable[[], dict[str, Any]]:
    return lambda: time_turns(
        config, make_turn(config, contender, interval_steps), interval_steps, repeats
    )


def make_turn(config: TrainConfig, contender: str, interval_steps: int) -> Turn:
    """Return a turn of a contender: `interval_steps` of all regions on one device."""
    if contender in METHODS:
        arguments = {"sync_interval": interval_steps} | METHODS[contender]
        return _run_of(config.replace(**arguments), interval_steps)

    model = plain_model(config, jax.devices()[0])
    params = models.init_params(model, jax.random.key(0))
    case = _case(config, model, params, _batches(config, interval_steps))
    if contender == PLAIN_LOOP:
        return contenders.plain_loops(case)
    return contenders.scan_alone(case, num_devices=1)


def _run_of(config: TrainConfig, interval_steps: int) -> Turn:
    """Return a turn of a configuration's `RegionProgram`."""
    mesh = mesh_of(config.run, jax.devices()[:1])
    trained = build_program(config, config.model, mesh)
    params = models.init_params(config.model, jax.random.key(0))
    return contenders.program_turn(trained, params, _batches(config, interval_steps))


def plain_model(config: TrainConfig, device: Any) -> models.TransformerConfig:
    """Return the model that a plain loop trains, with the kernels of a run."""
    return losses.with_kernels(
        config,
        config.model,
        cc.methods.get("diloco"),
        device,
        is_divided=device.platform != "cpu",
    )


def _case(
    config: TrainConfig,
    model: models.TransformerConfig,
    params: Any,
    batches: np.ndarray,
) -> Case:
    """Return the case for the contenders that are not programs of this package."""
    return Case(
        name=config.preset,
        loss_fn=models.make_loss_fn(model),
        optimizer=config.optimizer.build(TRAIN_STEPS),
        params=params,
        batches=batches,
    )


def _batches(config: TrainConfig, interval_steps: int) -> np.ndarray:
    sizes = (interval_steps, config.run.regions, *_batch_sizes(config))
    rng = np.random.default_rng(0)
    return rng.integers(0, config.model.vocab_size, sizes, np.int32)


def _batch_sizes(config: TrainConfig) -> tuple[int, int]:
    """Return the shape of one region's batch."""
    return config.data.batch_per_region, config.data.sequence_length + 1


def time_turns(
    config: TrainConfig, turn: Turn, interval_steps: int, repeats: int
) -> dict[str, Any]:
    """Warm up, time turns, and return their seconds, tokens per second and MFU."""
    began_s = time.perf_counter()
    for _ in range(WARM_TURNS):
        turn()
    start_s = time.perf_counter() - began_s

    turns_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        turn()
        turns_s.append(time.perf_counter() - began_s)

    rate = interval_steps * config.tokens_per_step / statistics.median(turns_s)
    flops = models.flops_per_token(config.model, config.data.sequence_length)
    peak = peak_tokens_per_second(jax.devices()[:1], flops)
    return {
        "tokens_per_second": rate,
        "mfu": mfu(rate, peak),
        "seconds": turns_s,
        "start_s": start_s,
        "interval_steps": interval_steps,
        "tokens_per_step": config.tokens_per_step,
    }


# --- Part 1, compiled only ---


def compile_all(
    target: Target,
    shapes: Sequence[str],
    regions: Sequence[int],
    wanted: Sequence[str],
    interval_steps: int,
    console: Console,
) -> None:
    """Compile the programs of part 1 for one device of a machine, and print them."""
    device = target.devices()[0]
    for num_regions in regions:
        for shape in shapes:
            config = SHAPES[shape].config(num_regions)
            for contender in wanted:
                listed = programs_of(config, contender, interval_steps, device)
                for part, program_, arguments in listed:
                    name = speed_name(shape, num_regions, contender)
                    result = compiled(program_, arguments, target.chip.platform)
                    console.print(f"{name}, {part}: {result}", soft_wrap=True)


def programs_of(
    config: TrainConfig, contender: str, interval_steps: int, device: Any
) -> Iterator[tuple[str, Any, tuple]]:
    """Yield a contender's programs for a device: name, `jax.jit`, arguments' shapes."""
    sizes = _batch_sizes(config)
    if contender in METHODS:
        arguments = {"sync_interval": interval_steps} | METHODS[contender]
        config = config.replace(exchange="program", **arguments)
        trained = build_program(config, config.model, mesh_of(config.run, [device]))
        batches = jax.ShapeDtypeStruct(
            (COMPILED_STEPS, config.run.regions, *sizes), jnp.int32
        )
        for listed in trained.list_programs(batches):
            yield listed.name, listed.program, listed.arguments
        return

    model = plain_model(config, device)
    params = jax.eval_shape(
        lambda key: models.init_params(model, key), jax.random.key(0)
    )
    no_batches = np.empty((0, config.run.regions, *sizes), np.int32)
    case = _case(config, model, params, no_batches)
    state = jax.eval_shape(case.optimizer.init, case.params)
    batches = jax.ShapeDtypeStruct((COMPILED_STEPS, *sizes), jnp.int32)
    loop = contenders.make_loop(case)
    of_all = (case.params, state), batches
    if contender == SCAN:
        loop = jax.vmap(loop)
        of_all = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((config.run.regions, *x.shape), x.dtype),
            of_all,
        )

    where = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), of_all
    )
    yield "steps", jax.jit(loop, donate_argnums=0), placed


def compiled(program_: Any, arguments: tuple, platform: str) -> str:
    """Compile a program; return its memory, its kernel and the seconds in words."""
    began_s = time.perf_counter()
    lowered = program_.trace(*arguments).lower(lowering_platforms=(platform,))
    done = lowered.compile()
    seconds = time.perf_counter() - began_s

    gigabytes = peak_bytes(done.memory_analysis()) / 1e9
    flash = "with" if FLASH in done.as_text() else "without"
    return f"{gigabytes:.1f} GB, {flash} a flash kernel, {seconds:.0f} s"


# --- Part 2: losses ---


def loss_rows(
    shapes: Sequence[str], wanted: Sequence[str], workdir: pathlib.Path
) -> Iterator[Row]:
    """Yield a row for each method that is trained."""
    for shape in shapes:
        base = SHAPES[shape].trained
        if base is None:
            continue
        for method in wanted:
            config = loss_config(base, method)
            folder = workdir / f"{shape}_{method}"
            yield Row(
                f"loss/{shape}/{method}",
                _training_of(config, folder),
                tokens=_tokens_of(config),
            )


def loss_config(base: TrainConfig, method: str) -> TrainConfig:
    """Return the configuration of a row of part 2."""
    return base.replace(
        inner_lr=INNER_LR_FACTOR * base.optimizer.inner_lr,
        devices=1,
        **TRAINED_METHODS[method],
    )


def _tokens_of(config: TrainConfig) -> int:
    return config.run.steps * config.tokens_per_step


def _training_of(
    config: TrainConfig, folder: pathlib.Path
) -> Callable[[], dict[str, Any]]:
    def train() -> dict[str, Any]:
        began = time.perf_counter()
        summary = prepare(config, folder).train()
        names = ("eval_loss", "eval_loss_outer", "bytes_sent_per_region", "mfu")
        kept = {name: summary.get(name) for name in names}
        return {
            **kept,
            "steps": config.run.steps,
            "tokens": _tokens_of(config),
            "seconds": time.perf_counter() - began,
        }

    return train


# --- The program ---


def measure(
    rows: Iterator[Row], results: Results, end_s: float, console: Console
) -> list[str]:
    """Measure the missing rows; return those for which there was no time."""
    left = []
    for row in rows:
        if results.has(row.name):
            continue
        if time.monotonic() + seconds_needed(row, results) > end_s:
            left.append(row.name)
            continue

        try:
            measured = row.measure()
        except Exception as error:  # Whatever a device or a compiler raises.
            first_line = str(error).strip().partition("\n")[0]
            measured = {"error": f"{type(error).__name__}: {first_line}"}
        results.add(row.name, measured)
        console.print(f"{row.name}: {one_line(measured)}", soft_wrap=True)

        # The next row needs the memory.
        gc.collect()
        jax.clear_caches()

    return left


def seconds_needed(row: Row, results: Results) -> float:
    """Return the seconds that a row of part 2 takes at the speed of part 1.

    0 for other rows, and if no speed is known.
    """
    rate = results.fastest()
    if not row.tokens or rate is None:
        return 0.0
    return row.tokens / rate + START_S


def one_line(row: dict[str, Any]) -> str:
    """Return a row as one line for the console."""
    if "error" in row:
        return row["error"]
    if "eval_loss" in row:
        return f"loss {row['eval_loss']:.4f} in {row['seconds']:.0f} s"
    share = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"{row['tokens_per_second']:,.0f} tokens/s{share}"


def speed_table(results: Results) -> Table:
    """Return part 1 as a table; ratios are to the scan of the same shape."""
    heads = ("shape, regions, contender", "tokens/s", "MFU", "over the scan", "start s")
    cells = []
    for name, row in results.rows.items():
        if "tokens_per_second" not in row:
            continue

        *group, _ = name.split("/")
        scan = results.rows.get("/".join([*group, SCAN]), {}).get("tokens_per_second")
        rate = row["tokens_per_second"]

        cells.append(
            (
                name.removeprefix("speed/"),
                f"{rate:,.0f}",
                "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
                "-" if scan is None else f"{rate / scan:.3f}",
                f"{row['start_s']:.0f}",
            )
        )

    return program.table(heads, cells, is_ruled=True)


def loss_table(results: Results) -> Table:
    """Return part 2 as a table."""
    heads = ("shape, method", "loss", "of the outer model", "MB sent", "seconds")
    cells = [
        (
            name.removeprefix("loss/"),
            f"{row['eval_loss']:.4f}",
            f"{row['eval_loss_outer']:.4f}" if row["eval_loss_outer"] else "-",
            f"{row['bytes_sent_per_region'] / 1e6:,.1f}",
            f"{row['seconds']:.0f}",
        )
        for name, row in results.rows.items()
        if "eval_loss" in row
    ]
    return program.table(heads, cells, is_ruled=True)


FLAGS = (
    ("workdir", pathlib.Path("runs/accelerator"), "Folder of the results."),
    ("minutes", 10.0, "No row starts after so many minutes."),
    ("shapes", ",".join(DEFAULT_SHAPES), f"Which of {', '.join(SHAPES)} to measure."),
    ("regions", "2,4", "Numbers of regions on the device, in part 1."),
    ("contenders", ",".join(CONTENDERS), "Rows of part 1; empty is none."),
    ("methods", ",".join(TRAINED_METHODS), "Rows of part 2; empty is none."),
    ("interval", 40, "H, steps of a turn in part 1: a multiple of 4, at least 8."),
    ("repeats", 3, "Timed turns of each row of part 1."),
    ("compile_for", "", "h100 or h200: compile part 1 for one, and measure nothing."),
)


def main(argv: Sequence[str]) -> int:
    """Read the flags, measure and print; return the exit code."""
    end_s = time.monotonic()
    values = program.own_flags(*FLAGS, minutes=0.0, repeats=1)
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        shapes = program.words("shapes", values.shapes.split(","), list(SHAPES))
        wanted = program.words("contenders", values.contenders.split(","), CONTENDERS)
        trained = program.words(
            "methods", values.methods.split(","), list(TRAINED_METHODS)
        )
        regions = program.numbers("regions", values.regions.split(","))
        if min(regions) < 1:
            raise ValueError(f"regions={values.regions} must be at least 1 each")
        if values.interval < 8 or values.interval % 4:
            raise ValueError(
                f"interval={values.interval} must be a multiple of 4 and at least 8, "
                "for four fragments and their delays"
            )

        if values.compile_for:
            target = Target.parse(f"{values.compile_for}:1")
            target.check_installed()
            os.environ.update(target.environment())
            console = Console(highlight=False)
            compile_all(target, shapes, regions, wanted, values.interval, console)
            return 0

        # The outer state is with the host's processor.
        cc.use_cpu_devices(max(*regions, 4) + 1)
        workdir = pathlib.Path(values.workdir)
        make_folder(workdir)
        results = Results(workdir, jax.devices()[0].device_kind)

    end_s += 60 * values.minutes
    console = Console(highlight=False)
    speeds = speed_rows(shapes, regions, wanted, values.interval, values.repeats)
    left = measure(speeds, results, end_s, console)
    left += measure(loss_rows(shapes, trained, workdir), results, end_s, console)

    console.print(speed_table(results))
    console.print(loss_table(results))
    if left:
        console.print(
            f"No time for {len(left)} rows, from {left[0]!r} on: run the same command "
            "again.",
            soft_wrap=True,
        )
    return 1 if any("error" in row for row in results.rows.values()) else 0


cli = program.with_own_flags(main)

if __name__ == "__main__":
    cli()
