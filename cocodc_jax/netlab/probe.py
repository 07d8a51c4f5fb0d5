"""Measured and predicted times of this framework's exchanges over a network.

A float32 vector crosses between CPU devices of several processes as a fragment does in
training: averaged by either all-reduce, or gathered.
"""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from cocodc_jax.engine import between_hosts, collectives, mesh, transfer
from cocodc_jax.engine.mesh import outer_rows, outer_sharding
from cocodc_jax.network.collectives import MODELS, collective_cost
from cocodc_jax.network.links import LinkState

# From the runtime's names to those of `cocodc_jax.network`.
COLLECTIVES = {
    "direct": "direct",
    "ring": "gloo",
    "direct_gather": "direct_gather",
    "ring_gather": "gloo_gather",
}


def outer_devices() -> Mesh:
    """Return a mesh of one CPU device of each process, inner and outer at once."""
    first = {d.process_index: d for d in reversed(jax.devices("cpu"))}
    return mesh.make_mesh(len(first), devices=[first[k] for k in sorted(first)])


def make_exchange(name: str, outer: Mesh, num_values: int) -> Callable[[], jax.Array]:
    """Make a function that sends a vector of every process over the network."""
    num = outer.size
    everywhere = outer_sharding(outer)
    rows = transfer.put(np.ones((num, num_values), np.float32), outer_rows(outer))

    kind, _, is_gathered = name.partition("_")
    if is_gathered:
        gather = functools.partial(
            collectives.gather_from_processes, everywhere=everywhere, kind=kind
        )
        return functools.partial(jax.jit(gather, out_shardings=everywhere), rows)

    shape = jax.ShapeDtypeStruct((num_values,), np.float32)
    average = between_hosts.make_combine(None, everywhere, shape, all_reduce=kind)
    weights = transfer.put(np.full(num, 1 / num, np.float32), everywhere)
    mean = jax.jit(lambda *arrays: average(*arrays)[0], out_shardings=everywhere)

    return functools.partial(mean, rows, weights)


def measure(send: Callable[[], jax.Array], repeats: int, pause_s: float) -> list[float]:
    """Return the seconds of each exchange, by this process's clock, after a warm-up."""
    send().block_until_ready()
    exchanges_s = []
    for _ in range(repeats):
        time.sleep(pause_s)
        start_s = time.perf_counter()
        send().block_until_ready()
        exchanges_s.append(time.perf_counter() - start_s)
    return exchanges_s


def predict(name: str, num_bytes: int, links: LinkState) -> dict[str, float]:
    """Return the predicted seconds of an exchange.

    `predicted_s` is for regions that start it at different times, `at_once_s` for those
    that start together.
    """
    kind = COLLECTIVES[name]
    seconds_of, _ = MODELS[kind].exchange(links, kind, num_bytes)
    at_once = max(seconds_of([0.0] * links.num_regions))
    predicted = collective_cost(links, kind, num_bytes).seconds
    return {"predicted_s": predicted, "at_once_s": at_once}
