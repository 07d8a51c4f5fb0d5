"""Link model, cost of collectives, timeline simulator and planner.

- `simulate`: run a schedule of `cocodc_jax.sync` over a `Topology` and return a
  `Timeline`; `simulate_method` does the same for a method.
- `make_plan`: choose tau, N, H and K for a network, with reasons; `place`: assign
  pipeline stages to sites.
- `world`: round trips between cities; `load_topology`: read links from a file.

The package is independent of devices, models, data and reports. Names are imported
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.network.collectives import collective_cost
    from cocodc_jax.network.links import Link, LinkChange, Topology, uniform
    from cocodc_jax.network.placement import Pipeline, place
    from cocodc_jax.network.plan import Job, NetworkPlan, make_plan
    from cocodc_jax.network.simulator import simulate, simulate_method
    from cocodc_jax.network.timeline import SyncRecord, Timeline
    from cocodc_jax.network.trace import write_trace
    from cocodc_jax.network.workload import Workload
    from cocodc_jax.network.world import load_topology

__all__ = [
    "Job",
    "Link",
    "LinkChange",
    "NetworkPlan",
    "Pipeline",
    "SyncRecord",
    "Timeline",
    "Topology",
    "Workload",
    "collective_cost",
    "load_topology",
    "make_plan",
    "place",
    "simulate",
    "simulate_method",
    "uniform",
    "write_trace",
]

__getattr__, __dir__ = attach(__name__)
