"""How long exchanges of this framework take over a network, and are expected to.

A vector of float32 crosses between CPU devices of several processes as a fragment does
in training: averaged by either all-reduce, or gathered.
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

# By the names of the runtime; what `cocodc_jax.network` calls them.
COLLECTIVES = {
    "direct": "direct",
    "ring": "gloo",
    "direct_gather": "direct_gather",
    "ring_gather": "gloo_gather",
}


def outer_devices() -> Mesh:
    """Return an inner mesh of one CPU device a process, which is its outer one too."""
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
    """Return the seconds of each exchange, by the clock of this process."""
    send().block_until_ready()
    taken = []
    for _ in range(repeats):
        time.sleep(pause_s)
        began = time.perf_counter()
        send().block_until_ready()
        taken.append(time.perf_counter() - began)
    return taken


def predict(name: str, num_bytes: int, links: LinkState) -> dict[str, float]:
    """Predicts the seconds of an exchange."""
    kind = COLLECTIVES[name]
    seconds_of, _ = MODELS[kind].exchange(links, kind, num_bytes)
    at_once = max(seconds_of([0.0] * links.num_regions))
    predicted = collective_cost(links, kind, num_bytes).seconds
    return {"predicted_s": predicted, "at_once_s": at_once}
