"""Compile the programs of a tiny run for a machine, and print what crosses regions.

`python overlap.py TARGET SLICES METHOD=OPTIONS...`, OPTIONS as JSON; prints a line of
JSON: for each method a list of `[program, kind, spans, bytes, host_bytes]`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import BETWEEN_SLICES, collectives
from cocodc_jax.aot.targets import Target
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sharding.mesh import REGION, make_mesh

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
        program = RegionProgram(
            loss_fn,
            optax.sgd(0.1),
            methods.get(method, **json.loads(options)),
            SHAPES,
            NUM_REGIONS,
            mesh=mesh,
            param_specs=P("data"),
            transport=Transport("program"),
        )
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


if __name__ == "__main__":
    main(*sys.argv[1:])
