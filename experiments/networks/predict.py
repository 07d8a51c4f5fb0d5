"""What the simulator says of a run in the lab, from what the run was given."""

from __future__ import annotations

import math

from cocodc_jax.network import exchanges
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.method import Method

from .cases import Network, Stretch
from .lab_run import Measured
from .measure import Pace, pace

# How the lab's processes average; compressed messages are gathered.
REDUCE = {"direct": "direct", "ring": "gloo"}
GATHER = {"direct": "direct_gather", "ring": "gloo_gather"}
# One sync after another, as the runtime sends them.
SHARING = "fifo"


# Compared where nothing is said.
USUAL = ("data_parallel", "diloco", "streaming_diloco", "cocodc")


def check(method: Method) -> None:
    """Refuse a method that has no place in a lab of processes.

    Raises:
      ValueError: saying why.
    """
    why = method.sync.only_in_program if method.sync else None
    if method.num_regions is not None:
        why = "it is for one region"
    if why:
        raise ValueError(
            f"methods={method.name} cannot be run by several processes: {why}"
        )


def host_bytes_per_s(run: Measured, expected: Pace) -> float:
    """Return the bytes of messages that hosts prepare a second besides the network.

    Args:
      run: with an exchange at every step, over a network that takes little.
      expected: of it by the simulator, for hosts that take no time at all.
    """
    (num_bytes,) = run.fragment_bytes
    besides_s = run.pace.step_s - expected.step_s
    return num_bytes / besides_s if besides_s > 0 else math.inf


def predict(
    network: Network,
    method: Method,
    stretch: Stretch,
    run: Measured,
    step_s: tuple[float, ...],
    all_reduce: str,
    host_bytes_per_s: float = math.inf,
) -> tuple[Pace, float]:
    """Return the pace that the simulator expects, and the bytes of the whole run.

    Args:
      network: links of the lab.
      method: which.
      stretch: the steps looked at.
      run: whose messages' bytes are taken, and nothing else.
      step_s: seconds of a step of each region without a network.
      all_reduce: "direct" or "ring".
      host_bytes_per_s: of messages, see the function of this name.

    Returns:
      The pace, and what the region that sends most puts on the network.
    """
    reduce_or_gather = GATHER if exchanges.is_gathered(method) else REDUCE
    found = exchanges.simulate_method(
        network.topology,
        Workload(run.fragment_bytes, step_s, host_bytes_per_s=host_bytes_per_s),
        method,
        stretch.last_step,
        reduce_or_gather[all_reduce],
        order=range(network.topology.num_regions),  # gloo takes them as they come
        sharing=SHARING,
    )
    return pace(found, stretch.first_step), max(found.bytes_sent)
