"""Messages between regions begin before the inner steps and end after them.

Read from the scheduled programs of accelerators that are not there: four regions, each
a TPU slice of 2 x 2. The control exchanges gradients at every step, and hides nothing.
A process of its own compiles them, `python test_overlap.py TARGET SLICES REGIONS MODEL
METHOD=OPTIONS...`; it prints a line of JSON: for each method a list of `[program, kind,
spans, bytes, host_bytes]`.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import BETWEEN_SLICES, collectives
from cocodc_jax.aot.targets import Target
from cocodc_jax.engine.mesh import REGION, make_mesh
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram

NUM_REGIONS = 4
NUM_STEPS = 2
WIDTH = 256
VOCABULARY = 151_936  # As in Qwen 3; tables of a few thousand rows stay on TensorCores.


def shape_of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense_loss(params, batch, key):
    """Of two layers."""
    x = jnp.tanh(batch @ params["a"]) @ params["b"]
    return jnp.mean((x - batch) ** 2), {}


def table_loss(params, batch, key):
    """Of a layer after an embedding, in bfloat16."""
    x = params["table"].astype(jnp.bfloat16)[batch]
    y = jnp.tanh(x @ params["a"].astype(jnp.bfloat16))
    return jnp.mean((y - x).astype(jnp.float32) ** 2), {}


# Loss, parameters, their sharding, and the batches of the steps.
MODELS = {
    "dense": (
        dense_loss,
        {"a": shape_of(WIDTH, WIDTH), "b": shape_of(WIDTH, WIDTH)},
        P("data"),
        lambda regions: shape_of(NUM_STEPS, regions, 64, WIDTH),
    ),
    "table": (
        table_loss,
        {"table": shape_of(VOCABULARY, 1024), "a": shape_of(1024, 1024)},
        P(None, "data"),
        lambda regions: jax.ShapeDtypeStruct((NUM_STEPS, regions, 4, 512), jnp.int32),
    ),
}


def main(name, slices, num_regions, model, *cases):
    regions = int(num_regions)
    loss_fn, params, specs, batches_of = MODELS[model]
    target = Target.parse(name, int(slices))
    devices = target.devices()
    mesh = make_mesh(regions, len(devices) // regions, devices=devices)
    shape = {axis: int(size) for axis, size in mesh.shape.items()}
    if target.slices > 1:
        shape[REGION] //= target.slices

    rows_of = {}
    for case in cases:
        method, options = case.split("=", 1)
        made = methods.get(method, **json.loads(options))
        program = RegionProgram(
            loss_fn,
            optax.sgd(0.1),
            made,
            params,
            regions,
            mesh=mesh,
            param_specs=specs,
            transport=Transport("program"),
        )

        rows = []
        for listed in program.list_programs(batches_of(regions)):
            if not listed.num_steps:
                continue
            traced = listed.program.trace(*listed.arguments)
            lowered = traced.lower(lowering_platforms=(target.chip.platform,))
            compiled = lowered.compile()

            host_bytes = compiled.memory_analysis().host_argument_size_in_bytes
            for one in collectives(hlo.parse(compiled.as_text()), shape):
                if {REGION, BETWEEN_SLICES} & set(one.axes):
                    rows.append(
                        (listed.name, one.kind, one.spans, one.num_bytes, host_bytes)
                    )

        rows_of[case] = rows
    print(json.dumps(rows_of))


# A fragment is a layer of 256 x 256 numbers; windows are of 2 steps.
OPTIONS = dict(sync_interval=8, num_fragments=2, delay_steps=2)
NUM_VALUES = 256 * 256
CASES = [
    f"streaming_diloco={json.dumps(OPTIONS)}",
    f"streaming_diloco={json.dumps(OPTIONS | dict(compress='int8'))}",
    "data_parallel={}",
]


def compiled(target, slices, *, num_regions=NUM_REGIONS, model="dense", cases=CASES):
    """What each case sends between regions, in programs that hold inner steps."""
    env = os.environ | Target.parse(target, slices).environment()
    words = [sys.executable, __file__, target, str(slices), str(num_regions), model]
    done = subprocess.run(
        [*words, *cases], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows_of = json.loads(done.stdout.splitlines()[-1])
    return [rows_of[case] for case in cases]


def windows(rows):
    return {f"start fragment {k}, inner steps, merge": [] for k in (0, 1)} | {
        name: [row[1:] for row in rows if row[0] == name] for name, *_ in rows
    }


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_messages_between_slices_of_a_tpu_cross_while_it_computes():
    plain, encoded, control = (windows(rows) for rows in compiled("v5e:2x2", 4))
    for rows in plain.values():
        ((kind, spans, num_bytes, host_bytes),) = rows
        assert (kind, spans) == ("all-reduce", True)
        # Each chip receives its quarter, laid out in tiles.
        assert num_bytes == 4 * NUM_VALUES / 4
        # Of the outer parameters and the momentum, each chip's host has a quarter.
        assert host_bytes == 8 * NUM_VALUES / 4

    for rows in encoded.values():
        ((kind, spans, num_bytes, _),) = rows
        assert (kind, spans) == ("all-gather", True)
        # A byte a number and 4 bytes a block of 256; and the region's weight.
        message = NUM_VALUES + 4 * NUM_VALUES // 256 + 4
        assert message <= num_bytes <= message + 16

    assert any(row for rows in control.values() for row in rows)
    assert not any(spans for rows in control.values() for _, spans, *_ in rows)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_messages_cross_while_a_large_embedding_is_read():
    (plain,) = compiled("v5p:2x2x1", 2, num_regions=2, model="table", cases=CASES[:1])
    for rows in windows(plain).values():
        assert [row[:2] for row in rows] == [["all-reduce", True]]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="the compiler for GPUs is not installed",
)
def test_messages_between_gpus_cross_while_they_compute():
    plain, encoded, control = (windows(rows) for rows in compiled("h100:1", 1))
    for kind, cases in (("all-reduce", plain), ("all-gather", encoded)):
        for rows in cases.values():
            assert [row[:2] for row in rows] == [[kind, True]]
    assert any(row for rows in control.values() for row in rows)
    assert not any(spans for rows in control.values() for _, spans, *_ in rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
