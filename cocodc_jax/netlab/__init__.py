"""The network lab: an emulated wide-area network under unmodified programs.

    import pathlib

    from cocodc_jax import netlab
    from cocodc_jax.network import Link, uniform

    topology = uniform(2, Link(bandwidth_gbps=0.1, latency_s=0.05))
    plan = netlab.make_plan(topology, ["hostname"], pathlib.Path("logs"))
    exit_code = netlab.run(plan)

Every region has a network namespace of its own. A relay in user space carries packets
between them (`shaper` decides when each arrives). `missing` lists what this machine
lacks. `probe` measures exchanges over any network.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.netlab.launch import LabError, run
    from cocodc_jax.netlab.plan import Plan, make_plan
    from cocodc_jax.netlab.region import missing
    from cocodc_jax.netlab.shaper import Conditions, Shaper

__all__ = ["Conditions", "LabError", "Plan", "Shaper", "make_plan", "missing", "run"]

__getattr__, __dir__ = attach(__name__)
