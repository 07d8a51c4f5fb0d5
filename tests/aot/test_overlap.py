"""Messages between regions begin before the inner steps and end after them.

Read from the scheduled programs of accelerators that are not there: four regions, each
a TPU slice of 2 x 2. The control exchanges gradients at every step, and hides nothing.
A process of its own compiles them, `python test_overlap.py TARGET SLICES
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

NUM_REGIONS, NUM_STEPS, WIDTH = 4, 2, 256
SHAPES = {"a": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
SHAPES |= {"b": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}


def loss_fn(params, batch, key):
    """Of two layers."""
    x = jnp.tanh(batch @ params["a"]) @ params["b"]
    return jnp.mean((x - batch) ** 2), {}


def main(name, slices, *cases):
    target = Target.parse(name, int(slices))
    devices = target.devices()
    mesh = make_mesh(NUM_REGIONS, len(devices) // NUM_REGIONS, devices=devices)
    shape = {axis: int(size) for axis, size in mesh.shape.items()}
    if target.slices > 1:
        shape[REGION] //= target.slices
    found = {}
    for case in cases:
        method, options = case.split("=", 1)
        made = methods.get(method, **json.loads(options))
        program = RegionProgram(
            loss_fn, optax.sgd(0.1), made, SHAPES, NUM_REGIONS, mesh=mesh,
            param_specs=P("data"), transport=Transport("program"),
        )  # fmt: skip
        batches = jax.ShapeDtypeStruct((NUM_STEPS, NUM_REGIONS, 64, WIDTH), jnp.float32)
        found[case] = rows = []
        for each in program.list_programs(batches):
            if not each.num_steps:
                continue
            lowered = each.program.trace(*each.arguments).lower(
                lowering_platforms=(target.chip.platform,)
            )
            compiled = lowered.compile()
            host_bytes = compiled.memory_analysis().host_argument_size_in_bytes
            for one in collectives(hlo.parse(compiled.as_text()), shape):
                if {REGION, BETWEEN_SLICES} & set(one.axes):
                    rows.append(
                        (each.name, one.kind, one.spans, one.num_bytes, host_bytes)
                    )
    print(json.dumps(found))


# A fragment is a layer of 256 x 256 numbers; windows are of 2 steps.
OPTIONS = dict(sync_interval=8, num_fragments=2, delay_steps=2)
NUM_VALUES = 256 * 256
CASES = [
    f"streaming_diloco={json.dumps(OPTIONS)}",
    f"streaming_diloco={json.dumps(OPTIONS | dict(compress='int8'))}",
    "data_parallel={}",
]


def compiled(target, slices):
    """What each case sends between regions, in programs that hold inner steps."""
    env = os.environ | Target.parse(target, slices).environment()
    words = [sys.executable, __file__, target, str(slices), *CASES]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [found[case] for case in CASES]


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
