"""What the simulator says of a run in the lab, from what the run was given."""

from __future__ import annotations

import math

from cocodc_jax.network.simulator import Workload, simulate
from cocodc_jax.network.syncs import AUTO, Schedule
from experiments.method_config import MethodConfig
from experiments.networks.cases import Network, Stretch
from experiments.networks.lab_run import Measured
from experiments.networks.measure import Pace, pace

# How the lab's processes average; compressed messages are gathered.
REDUCE = {"direct": "direct", "ring": "gloo"}
GATHER = {"direct": "direct_gather", "ring": "gloo_gather"}
# One sync after another, as the runtime sends them.
SHARING = "fifo"


def schedule(method: MethodConfig, num_fragments: int) -> Schedule:
    """The schedule of a method as the simulator knows it.

    Args:
      method: a name of `network.syncs.METHODS`, and its numbers.
      num_fragments: that the run has sent.

    Raises:
      ValueError: for a method or a number that the simulator does not know.
    """
    given = method.arguments
    if given.get("syncs_per_interval") == AUTO:
        raise ValueError(
            f"syncs_per_interval={AUTO!r} is measured while a run goes on, and the "
            "simulator needs a number; give one"
        )
    interval = given.get("sync_interval", 1)
    slots = None
    if "syncs_per_interval" in given:  # Where none is given, the method knows.
        built = method.build().schedule
        assert built is not None
        slots = interval // built.slot_steps
    # The simulator has no delay of a whole interval.
    longest = min(given.get("max_delay_steps") or interval, interval - 1)
    delay = given.get("delay_steps", 0)
    return Schedule(method.method, num_fragments, interval, delay, slots, longest)


def host_bytes_per_s(run: Measured, expected: Pace) -> float:
    """Bytes of messages that hosts prepare a second, besides what the network takes.

    Args:
      run: with an exchange at every step, over a network that takes little.
      expected: of it by the simulator, for hosts that take no time at all.
    """
    (num_bytes,) = run.fragment_bytes
    besides_s = run.pace.step_s - expected.step_s
    return num_bytes / besides_s if besides_s > 0 else math.inf


def predict(
    network: Network,
    method: MethodConfig,
    stretch: Stretch,
    run: Measured,
    step_s: tuple[float, ...],
    all_reduce: str,
    host_bytes_per_s: float = math.inf,
) -> tuple[Pace, float]:
    """The pace that the simulator expects, and the bytes of the whole run.

    Args:
      network: links of the lab.
      method: name and numbers.
      stretch: the steps looked at.
      run: whose messages' bytes are taken, and nothing else.
      step_s: seconds of a step of each region without a network.
      all_reduce: "direct" or "ring".
      host_bytes_per_s: of messages, see the function of this name.

    Returns:
      The pace, and what the region that sends most puts on the network.
    """
    is_compressed = method.build().compressor is not None
    found = simulate(
        network.topology,
        Workload(run.fragment_bytes, step_s, host_bytes_per_s=host_bytes_per_s),
        schedule(method, len(run.fragment_bytes)),
        stretch.last_step,
        (GATHER if is_compressed else REDUCE)[all_reduce],
        order=range(network.topology.num_regions),  # gloo takes them as they come
        sharing=SHARING,
    )
    return pace(found, stretch.first_step), max(found.bytes_sent)
