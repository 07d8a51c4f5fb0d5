"""Link model, cost of collectives, timeline simulator and planner.

- `simulate`: run a schedule of `cocodc_jax.sync` over a `Topology` and return a
  `Timeline`; `simulate_method` does the same for a method.
- `make_plan`: choose tau, N, H and K for a network, with reasons; `place`: assign
  pipeline stages to sites.
- `world`: round trips between cities; `load_topology`: read links from a file.

The package is independent of devices, models, data and reports. Names are imported
when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.network.collectives import collective_cost as collective_cost
    from cocodc_jax.network.links import Link as Link
    from cocodc_jax.network.links import LinkChange as LinkChange
    from cocodc_jax.network.links import Topology as Topology
    from cocodc_jax.network.links import uniform as uniform
    from cocodc_jax.network.placement import Pipeline as Pipeline
    from cocodc_jax.network.placement import place as place
    from cocodc_jax.network.plan import Job as Job
    from cocodc_jax.network.plan import NetworkPlan as NetworkPlan
    from cocodc_jax.network.plan import make_plan as make_plan
    from cocodc_jax.network.simulator import simulate as simulate
    from cocodc_jax.network.simulator import simulate_method as simulate_method
    from cocodc_jax.network.timeline import SyncRecord as SyncRecord
    from cocodc_jax.network.timeline import Timeline as Timeline
    from cocodc_jax.network.trace import write_trace as write_trace
    from cocodc_jax.network.workload import Workload as Workload
    from cocodc_jax.network.world import load_topology as load_topology

__getattr__, __dir__ = attach(__name__)
