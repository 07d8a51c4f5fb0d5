"""What a method puts on a network: when, how large, and by which way across.

All of it is read off the method itself, a `cocodc_jax.sync.method.Method`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from cocodc_jax.network import crossings
from cocodc_jax.network.links import Topology
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.schedules import Schedule, staggered
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms.compressor import identity, message_bytes

# What a message's size is told of: the matrices of a transformer's block and its norms.
WIDTH = 1024
BLOCK = {
    "blocks/attention": (4, WIDTH, WIDTH),
    "blocks/up": (1, WIDTH, 4 * WIDTH),
    "blocks/down": (1, 4 * WIDTH, WIDTH),
    "blocks/norms": (2, WIDTH),
}


def schedule_of(method: Method) -> Schedule | None:
    """Return when a method exchanges something; None if it never does.

    What is exchanged at every step is one sync of everything at every step, which all
    wait for.
    """
    return staggered(1) if method.per_step else method.schedule


def is_gathered(method: Method) -> bool:
    """Tell whether each region gets every message, rather than their sum."""
    if method.per_step:
        return method.per_step.receive is not None
    if method.sync is None or method.schedule is None or method.schedule.is_by_region:
        return False
    outer = method.sync.outer
    if isinstance(outer, RegionalOuter) and outer.group != "all":
        return False
    return method.sync.message.compressor() is not None


def message_share(method: Method) -> float:
    """Return the bytes of one region's message over those of float32 parameters.

    Measured on a block of a transformer, with the first rank where ranks change, and
    with what moments add on average over the syncs.
    """
    shapes = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in BLOCK.items()}
    if method.per_step:
        num_bytes = method.per_step.num_bytes(shapes)
    elif method.sync is None or isinstance(method.sync.message, ByRings):
        return 1.0  # What rings pass on is told by their crossing.
    elif isinstance(method.sync.outer, RegionalOuter):
        num_bytes = _regional_bytes(method.sync, method.sync.outer, shapes)
    else:
        num_bytes = method.sync.message.num_bytes(shapes, 1)
    return num_bytes / message_bytes(shapes) + _moments_share(method)


def _moments_share(method: Method) -> float:
    """As `message_share`, of the optimizer that belongs to the method."""
    moments = method.sync and method.sync.moments
    if not moments:
        return 0.0
    num_first = 2 if method.inner.optimizer == "mt_adam" else 1
    every = ((num_first, moments.first), (1, moments.second))
    return sum(count / n for count, n in every if n)


def _regional_bytes(sync: Sync, outer: RegionalOuter, shapes: dict) -> int:
    compressor = sync.message.compressor() or identity()

    def message(part, key):
        state = outer.init(part, compressor)
        return outer.send(part, state, part, compressor, key)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    return message_bytes(jax.eval_shape(message, shapes, key))


def crossing(method: Method, collective: str | None = None) -> str | crossings.Crossing:
    """Return the way of a method's messages.

    Raises:
      ValueError: if a collective is given where the method leaves no choice.
    """
    way = None
    if method.sync is not None:
        outer, message = method.sync.outer, method.sync.message
        if method.sync.schedule.is_by_region:
            way = "ring"  # None of them is used.
        elif isinstance(outer, RegionalOuter) and outer.group == "pairs":
            way = crossings.in_pairs
        elif isinstance(outer, RegionalOuter) and outer.group == "ring":
            way = crossings.to_neighbours
        elif isinstance(message, ByRings):
            way = crossings.by_rings(message.num)
    if way is None:
        return collective or ("gather" if is_gathered(method) else "ring")
    if collective is not None:
        raise ValueError(
            f"collective={collective!r} has no meaning for method={method.name!r}, "
            "whose messages have a way of their own; leave it out"
        )
    return way


def simulate_method(
    topology: Topology,
    workload: Workload,
    method: Method,
    num_steps: int,
    collective: str | None = None,
    order: Sequence[int] | None = None,
    sharing: str = "fair",
    effective_rank: float | None = None,
) -> Timeline:
    """Simulate a method, see `simulator.simulate`.

    Raises:
      ValueError: as `simulate`, or if the method is for another number of regions or
        leaves no choice of a collective.
    """
    num = topology.num_regions
    if method.num_regions not in (None, num):
        raise ValueError(
            f"regions={num} must be {method.num_regions} for method={method.name!r}"
        )
    return simulate(
        topology,
        workload,
        schedule_of(method),
        num_steps,
        crossing(method, collective),
        order,
        sharing,
        effective_rank,
    )
