"""A process of `test_processes.py`: `worker.py ADDRESS NUM_PROCESSES PROCESS FORM`."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from tests.region_sync import regression as plain

NUM_STEPS = 12
METHOD = (
    "streaming_diloco",
    {"sync_interval": 6, "num_fragments": 2, "delay_steps": 2},
)


def train(form, process):
    """Train this process's region, or all regions in one program over processes."""
    params = plain.make_params()
    step_fn, batch_of = plain.one_step, plain.batch_of
    if form == "processes":
        mesh = Mesh(np.array(jax.local_devices()[:2]), ("fsdp",))
        params = jax.device_put(params, NamedSharding(mesh, P()))

        def put(batch):
            return jax.tree.map(lambda x: x[process], batch)
    else:
        devices = [d for d in jax.devices() if d.id % jax.local_device_count() == 0]
        mesh = Mesh(np.array(devices), ("pods",))
        of_regions = NamedSharding(mesh, P("pods"))

        def put(tree):
            return jax.tree.map(
                lambda x: jax.make_array_from_callback(
                    x.shape, of_regions, np.asarray(x).__getitem__
                ),
                tree,
            )

        params = put(jax.tree.map(lambda x: np.stack([x] * 2), params))
        step_fn = jax.vmap(plain.one_step)

    step_fn = jax.jit(step_fn)
    name, options = METHOD
    sync = cc.RegionSync(cc.methods.get(name, **options), params, plain.NUM_REGIONS)
    state, opt_state = sync.init(params), plain.OPTIMIZER.init(params)
    for i in range(NUM_STEPS):
        params, opt_state = step_fn(params, opt_state, put(batch_of(i)))
        params, state = sync.after_step(params, state)

    own = params["head"].addressable_shards[0].data
    outer = sync.outer_params(state, params)["head"].addressable_shards[0].data
    return np.asarray(own).reshape(8, 2), np.asarray(outer)


if __name__ == "__main__":
    address, num_processes, process, form, path = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 3)
    jax.distributed.initialize(address, int(num_processes), int(process))
    np.savez(path, *train(form, int(process)))
