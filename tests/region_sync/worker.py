"""A process of `test_processes.py`, and of an elastic region of several processes.

worker.py ADDRESS NUM_PROCESSES PROCESS FORM PATH [REGION REGION_ADDRESSES]
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.engine.transfer import whole
from tests.program.elastic.meeting import KEY, TIMING
from tests.region_sync import regression as plain

NUM_STEPS = 12
METHOD = (
    "streaming_diloco",
    {"sync_interval": 6, "num_fragments": 2, "delay_steps": 2},
)


def train(form, process):
    """Train this process's region, or all regions in one program over processes."""
    params = plain.make_params()
    step_fn = plain.one_step
    batch_of = plain.batch_of
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
    state = sync.init(params)
    opt_state = plain.OPTIMIZER.init(params)
    for i in range(NUM_STEPS):
        params, opt_state = step_fn(params, opt_state, put(batch_of(i)))
        params, state = sync.after_step(params, state)

    local = params["head"].addressable_shards[0].data
    outer = sync.outer_params(state, params)["head"].addressable_shards[0].data
    return np.asarray(local).reshape(8, 2), np.asarray(outer)


def train_elastic(place):
    """Train one region, whose parameters are sharded over all of its processes."""
    devices = [d for d in jax.devices() if d.id % jax.local_device_count() == 0]
    mesh = Mesh(np.array(devices), ("fsdp",))

    def put(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape, sharding, np.asarray(x).__getitem__
            ),
            tree,
        )

    params = plain.make_params()
    params = {
        "blocks": put(params["blocks"], P(None, "fsdp")),
        "head": put(params["head"], P("fsdp")),
    }
    step_fn = jax.jit(plain.one_step)
    opt_state = plain.OPTIMIZER.init(params)

    name, options = METHOD
    transport = cc.Transport("elastic", place=place)
    with cc.RegionSync(
        cc.methods.get(name, **options), params, plain.NUM_REGIONS, transport=transport
    ) as sync:
        params, state = sync.join(params, sync.init(params))
        while state.step < NUM_STEPS:
            batch = jax.tree.map(lambda x: x[place.region], plain.batch_of(state.step))
            params, opt_state = step_fn(params, opt_state, put(batch, P()))
            params, state = sync.after_step(params, state)
        outer = sync.outer_params(state, params)

    assert params["head"].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 2)
    return whole(params["head"]), whole(outer["head"])


if __name__ == "__main__":
    address, num_processes, process, form, path, *where = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 3)
    if int(num_processes) > 1:
        jax.distributed.initialize(address, int(num_processes), int(process))
    if form == "elastic":
        region = int(where[0])
        addresses = tuple(where[1].split(","))
        place = cc.Place(region, addresses, KEY, TIMING)
        np.savez(path, *train_elastic(place))
    else:
        np.savez(path, *train(form, int(process)))
