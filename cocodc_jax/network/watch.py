"""Watches a run for what is faulty: a simulated one's links, anyone's steps."""

from __future__ import annotations

import numpy as np

from cocodc_jax.network.faults import Finding, Messages, Regions
from cocodc_jax.network.links import Topology
from cocodc_jax.network.timeline import Timeline


def pair_seconds(topology: Topology, num_bytes: float, time_s: float) -> np.ndarray:
    """Return a message's time between each pair, `[M, M]`, infinite in an outage."""
    links = topology.at(time_s)
    with np.errstate(divide="ignore"):
        return links.delay_s + num_bytes / links.bytes_per_s


def watch_links(topology: Topology, timeline: Timeline) -> list[tuple[float, Finding]]:
    """Name what is faulty of a simulated network, as syncs meet it."""
    watch, found = Messages(), []
    seen: set[tuple] = set()
    for sync in sorted(timeline.syncs, key=lambda sync: sync.start_s):
        sent = max(sync.bytes_sent) / max(topology.num_regions - 1, 1)
        now = watch.observe(pair_seconds(topology, sent, sync.start_s))
        new = [x for x in now if (x.kind, x.where) not in seen]
        found += [(sync.start_s, finding) for finding in new]
        seen = {(x.kind, x.where) for x in now}
    return found


def watch_steps(timeline: Timeline, floor: float = 0.5) -> list[tuple[int, Finding]]:
    """Name the regions whose steps have become slow, and after which step."""
    watch, found = Regions(floor=floor), []
    seen: set[int] = set()
    for step, seconds in timeline.stretches():
        now = watch.observe(seconds)
        found += [(step, x) for x in now if x.where[0] not in seen]
        seen = {x.where[0] for x in now}
    return found
