"""Compile MaxText's step with regions on TPU slices that are not there, by method.

    ../envs/maxtext/bin/python -m tests.integrations.maxtext_compile RESULT.json \
        [--only=REGEX] [OPTION=VALUE ...]

Run it in MaxText's environment, from the checkout. OPTIONs are those of MaxText's
command line: its model (`model_name=qwen3-8b`), one slice (`compile_topology=v5p-8`)
and how many (`compile_topology_num_slices=2`). Each slice is a region, over MaxText's
mesh axis `diloco`, fully sharded inside. Prints and writes for each method, of one
device: memory, whether it fits, bytes of the outer state, and bytes between slices in
one period, counted in the scheduled programs; and whether these cross while the steps
compute. `--only` takes the methods whose name it finds, and keeps the others of a
result with the same options.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocodc_jax.aot.targets import Target

if TYPE_CHECKING:
    from cocodc_jax.aot.hlo import Module
    from cocodc_jax.engine.devices import LoweredProgram

INTERVAL = 36  # H, MaxText's own default.
NUM_FRAGMENTS = 3  # Of MaxText's, the first has all that is in no layer.
DELAY = 5

# MaxText's options where its defaults need a machine, or a choice is ours.
OPTIONS = {
    "run_name": "compile",
    "base_output_directory": "/tmp/maxtext_compile",
    "skip_jax_distributed_system": True,
    "log_config": False,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "compile_topology": "v5p-8",
    "compile_topology_num_slices": 2,
    "enable_diloco": True,
    "diloco_sync_period": INTERVAL,
}
STREAMING = {
    "enable_streaming_diloco": True,
    "num_diloco_fragments": NUM_FRAGMENTS,
    "num_communication_overlapping_steps": DELAY,
    "communication_overlapping_alpha": 0.5,
}
OVERLAPPED = {
    "sync_interval": INTERVAL,
    "num_fragments": NUM_FRAGMENTS,
    "delay_steps": DELAY,
}
# Methods of this package: name, options.
OURS = {
    "diloco": ("diloco", {"sync_interval": INTERVAL}),
    "streaming_diloco": ("streaming_diloco", OVERLAPPED),
    "streaming_diloco, ef+sign": (
        "streaming_diloco",
        OVERLAPPED | {"compress": "ef+sign"},
    ),
    "diloco, ef+sign at every step": (
        "diloco",
        {"sync_interval": 1, "compress": "ef+sign"},
    ),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run, not yet compiled.

    Attributes:
      name: unique in the run.
      lower: returns what compiles.
      calls: how often it runs in a period of `INTERVAL` steps.
      held_bytes: that a device holds of the run's state besides its arguments.
      outer_bytes: of the run's outer state, of one device.
      outer_memory: where it is, "device" or "pinned_host".
    """

    name: str
    lower: Callable[[], Any]
    calls: int
    held_bytes: int = 0
    outer_bytes: int = 0
    outer_memory: str = ""


class Job:
    """MaxText's step of all regions for slices that are not there.

    Attributes:
      config: MaxText's.
      mesh: MaxText's, of the slices' devices.
      carry: MaxText's train state with a leading axis of regions: shapes, dtypes and
        shardings.
      batch: of one step, leaves `[R, B, L]`.
    """

    def __init__(self, options: dict[str, Any]):
        """Set MaxText up; `options` are those of its command line."""
        import jax
        import maxtext
        from maxtext.configs import pyconfig
        from maxtext.trainers.diloco import diloco
        from maxtext.trainers.pre_train import train, train_compile
        from maxtext.utils import sharding

        base = Path(maxtext.__file__).parent / "configs" / "base.yml"
        words = [f"{name}={value}" for name, value in options.items()]
        self.config = pyconfig.initialize(["train", str(base), *words])
        # MaxText's cache needs a client, which there is none of here.
        jax.config.update("jax_enable_compilation_cache", False)
        self.mesh = train_compile.get_topology_mesh(self.config)

        arguments, _, self.shardings, _, graph = train_compile.get_shaped_inputs(
            self.mesh, self.config
        )
        self.state, self.batch = arguments
        of_params, self.shardings = sharding.maybe_update_params_sharding_with_opt(
            self.config, self.shardings
        )

        self.num_regions = self.config.num_diloco_replicas
        regional = diloco.add_diloco_to_sharding(self.shardings)
        self.carry = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(
                (self.num_regions, *x.shape), x.dtype, sharding=where
            ),
            self.state,
            regional,
        )

        # Of one region: `step(state, batch) -> (state, metrics)`.
        self.step = functools.partial(
            train.train_step, graph, self.config, regional, of_params
        )

    @property
    def compiler_options(self) -> dict[str, Any]:
        """MaxText's own option `compile_xla_flags`, as its `train_compile` reads it."""
        from maxtext.utils import max_utils

        return max_utils.parse_libtpu_flags_to_dict(self.config.compile_xla_flags)

    @property
    def num_params(self) -> int:
        """Parameters of one region."""
        import jax

        leaves = jax.tree.leaves(params_of(self.state))
        return sum(math.prod(x.shape) for x in leaves)

    def scanned_step(self, carry: Any, batch: Any) -> tuple[Any, Any]:
        """Do one step of all regions, as `RegionSync.window` takes it."""
        import jax
        from flax.linen import logical_axis_rules

        with logical_axis_rules(self.config.logical_axis_rules):
            mapped = jax.vmap(
                lambda state, one: self.step(state, one), spmd_axis_name="diloco"
            )
            return mapped(carry, batch)

    def without_syncs(self) -> Iterator[Program]:
        """List MaxText's step of all regions, alone."""

        import jax

        shardings = jax.tree.map(lambda x: x.sharding, self.carry)
        step = jax.jit(
            self.scanned_step, donate_argnums=0, out_shardings=(shardings, None)
        )

        def lower() -> Any:
            with jax.set_mesh(self.mesh):
                return step.lower(self.carry, self.batch)

        yield Program("step", lower, INTERVAL)

    def maxtexts_own(self) -> Iterator[Program]:
        """List MaxText's own program with its DiLoCo, as its `train_compile` does."""
        import jax
        from flax.linen import logical_axis_rules
        from maxtext.trainers.diloco import diloco
        from maxtext.utils import sharding

        state, shardings, _ = diloco.build_abstract_diloco_state(
            self.config, self.state, self.shardings, self.mesh
        )
        step = jax.jit(
            diloco.build_diloco_train_step(self.config, self.step, mesh=self.mesh),
            in_shardings=(
                shardings,
                sharding.get_input_data_sharding(self.config, self.mesh),
                None,
            ),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )

        def lower() -> Any:
            rules = logical_axis_rules(self.config.logical_axis_rules)
            with jax.set_mesh(self.mesh), self.mesh, rules:
                return step.lower(state, self.batch, None)

        outer = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            (state.params, state.outer_opt_state[0]),
            (shardings.params, shardings.outer_opt_state[0]),
        )
        yield Program(
            "step",
            lower,
            INTERVAL,
            outer_bytes=device_bytes(outer),
            outer_memory="device",
        )

    def by_region_sync(self, name: str, options: dict[str, Any]) -> Iterator[Program]:
        """List the programs of a window with one of this package's methods."""
        import jax

        import cocodc_jax as cc

        method = cc.methods.get(name, **options)
        transport = cc.Transport("program", overlap="yes")
        sync = cc.RegionSync(
            method, params_of(self.carry), self.num_regions, transport=transport
        )
        window = sync.window(self.scanned_step, params_of, self.carry)
        made = sync.program.abstract().sync

        assert made is not None
        outer_memory = jax.tree.leaves(made.outer)[0].sharding.memory_kind
        periods = INTERVAL // options["sync_interval"]

        def lowering(listed: LoweredProgram) -> Callable[[], Any]:
            traced = listed.program.trace
            return lambda: traced(*listed.arguments).lower(lowering_platforms=("tpu",))

        listed_programs = window.list_programs(self.carry, self.batch)
        has_windows = any("start fragment" in one.name for one in listed_programs)
        for listed in listed_programs:
            # A window has inner steps, and more beside them.
            if listed.name == "inner steps" and has_windows:
                continue
            yield Program(
                listed.name,
                lowering(listed),
                periods if listed.sent_bytes or not listed.num_steps else INTERVAL,
                held_bytes((self.carry, made.arrays), listed.arguments),
                device_bytes(made.outer),
                outer_memory,
            )


def params_of(carry: Any) -> Any:
    """Pick the model's parameters out of MaxText's train state."""
    from flax import nnx

    return nnx.filter_state(
        carry,
        lambda path, variable: path[0] == "model" and isinstance(variable, nnx.Param),
    )


def device_bytes(tree: Any) -> int:
    """Return one device's bytes of shapes with shardings."""
    import jax

    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def held_bytes(state: Any, arguments: Any) -> int:
    """Return what a device holds of a run's state besides a program's arguments."""
    import jax

    def kind(x: Any) -> tuple:
        return x.shape, str(x.dtype), x.sharding.shard_shape(x.shape)

    passed = (x for x in jax.tree.leaves(arguments) if getattr(x, "sharding", None))
    taken = collections.Counter(map(kind, passed))
    held = []
    for x in jax.tree.leaves(state):
        if taken[kind(x)] > 0:
            taken[kind(x)] -= 1
        elif x.sharding.memory_kind != "pinned_host":
            held.append(x)
    return device_bytes(held)


def compile_one(
    program: Program, num_chips: int, compiler_options: dict[str, Any]
) -> dict[str, Any]:
    """Compile a program; return what it needs of a device and moves between slices."""
    import jax

    from cocodc_jax.aot import hlo
    from cocodc_jax.aot.collectives import BETWEEN_SLICES, collectives
    from cocodc_jax.aot.costs import peak_bytes
    from cocodc_jax.aot.job import needed_bytes

    began_s = time.perf_counter()
    record: dict[str, Any] = {"name": program.name, "calls": program.calls}
    try:
        compiled = program.lower().compile(compiler_options=compiler_options)
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        return record | {"refused": str(error).splitlines()[0], "peak_bytes": needed}

    memory = compiled.memory_analysis()
    module = hlo.parse(compiled.as_text())
    sent = [
        one
        for one in collectives(module, {"region": 1, "fsdp": num_chips})
        if BETWEEN_SLICES in one.axes
    ]
    return record | {
        "seconds": round(time.perf_counter() - began_s, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes,
        "held_bytes": program.held_bytes,
        "peak_bytes": peak_bytes(memory, program.held_bytes),
        "between_bytes": sum(
            one.num_bytes * one.times * calls_of(one.name, module, program.calls)
            for one in sent
        ),
        "num_messages": len(sent),
        "spans": all(one.spans for one in sent) if sent else None,
    }


def calls_of(name: str, module: Module, calls: int) -> int:
    """Return how often an instruction runs in a period.

    What stands under a condition runs at the step of a sync, once a period.
    """
    at_every_step: set[str] = set()
    new = {module.entry}
    while new:
        at_every_step |= new
        new = {
            callee
            for computation in new
            for instruction in module.computations[computation].instructions
            if instruction.opcode != "conditional"
            for callees in instruction.called.values()
            for callee in callees
        } - at_every_step

    is_at_every_step = any(
        name in module.computations[computation].by_name
        for computation in at_every_step
    )
    return calls if is_at_every_step else 1


def summarise(
    method: str, programs: list[Program], records: list[dict[str, Any]], hbm_bytes: int
) -> dict[str, Any]:
    """Return a method's row."""
    largest = max(records, key=lambda record: record["peak_bytes"])
    sending = [record for record in records if record.get("between_bytes")]
    return {
        "method": method,
        "argument_bytes": largest.get("argument_bytes"),
        "temp_bytes": largest.get("temp_bytes"),
        "peak_bytes": largest["peak_bytes"],
        "fits": largest["peak_bytes"] <= hbm_bytes,
        "outer_bytes": programs[0].outer_bytes,
        "outer_memory": programs[0].outer_memory,
        "between_bytes": sum(record["between_bytes"] for record in sending),
        "spans": all(record["spans"] for record in sending) if sending else None,
        "programs": records,
    }


def main(words: list[str]) -> None:
    """Compile the methods, print a table, and write the results."""
    if not words or "=" in words[0]:
        raise SystemExit(f"the first argument is the file of the result, not {words}")
    result, *rest = words
    for word in rest:
        if "=" not in word:
            raise SystemExit(f"{word!r} is no OPTION=VALUE of MaxText's, nor --only=")

    chosen = [word.removeprefix("--only=") for word in rest if "--only=" in word]
    overrides = dict(word.split("=", 1) for word in rest if not word.startswith("--"))
    options = OPTIONS | overrides
    options.setdefault("dcn_diloco_parallelism", options["compile_topology_num_slices"])
    os.environ |= Target.parse("v5p:2x2x1").environment()

    from cocodc_jax.chips import CHIPS

    jobs: dict[bool, Job] = {}

    def job(is_streaming: bool = False) -> Job:
        if is_streaming not in jobs:
            more = STREAMING if is_streaming else {}
            jobs[is_streaming] = Job(options | more)
        return jobs[is_streaming]

    methods = {
        "no syncs": lambda: job().without_syncs(),
        "MaxText's DiLoCo": lambda: job().maxtexts_own(),
        "MaxText's Streaming DiLoCo": lambda: job(True).maxtexts_own(),
    }
    for name, (method, settings) in OURS.items():
        methods[f"`{name}`"] = functools.partial(
            lambda *of: job().by_region_sync(*of), method, settings
        )

    chip = options["compile_topology"].split("-")[0].removeprefix("tpu")
    hbm_bytes = CHIPS[chip].hbm_bytes
    rows: dict[str, Any] = {}
    if chosen and Path(result).exists():
        before = json.loads(Path(result).read_text())
        if before["options"] == overrides:
            rows = {row["method"]: row for row in before["rows"]}

    for name, listed in methods.items():
        if chosen and not re.search(chosen[0], name):
            continue
        programs = list(listed())
        num_chips = job().mesh.size // job().num_regions
        records = []
        for program in programs:
            records.append(compile_one(program, num_chips, job().compiler_options))
            print(f"{name}: {json.dumps(records[-1])}", file=sys.stderr, flush=True)
        rows[name] = summarise(name, programs, records, hbm_bytes)
        about = {
            "model": options.get("model_name", "default"),
            "slices": options["compile_topology_num_slices"],
            "slice": options["compile_topology"],
            "num_devices": job().mesh.size,
            "num_params": job().num_params,
            "hbm_bytes": hbm_bytes,
            "interval": INTERVAL,
            "options": overrides,
        }
        about["rows"] = [rows[name] for name in methods if name in rows]
        Path(result).write_text(json.dumps(about, indent=1) + "\n")

    print("| method | arguments | temporaries | peak | outer state | between slices |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows.values():
        cells = [row[f"{x}_bytes"] for x in ("argument", "temp", "peak", "outer")]
        sizes = [f"{x / 1e9:.2f} GB" for x in (*cells, row["between_bytes"])]
        print(f"| {row['method']} | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
