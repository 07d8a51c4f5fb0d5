"""The simulator's prediction for a run in the lab."""

from __future__ import annotations

import math

from cocodc_jax.network import exchanges
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.method import Method

from .cases import Network, Stretch
from .lab_run import Measured
from .measure import Pace, pace

# Collectives of the lab's processes; compressed messages are gathered.
REDUCE = {"direct": "direct", "ring": "gloo"}
GATHER = {"direct": "direct_gather", "ring": "gloo_gather"}
# Syncs are sent one after the other, as in training.
SHARING = "fifo"


# The methods compared by default.
USUAL = ("data_parallel", "diloco", "streaming_diloco", "cocodc")


def check(method: Method) -> None:
    """Refuse a method that several processes cannot run."""
    why = method.sync.only_in_program if method.sync else None
    if method.num_regions is not None:
        why = "it is for a single region"
    if why:
        raise ValueError(
            f"methods={method.name} cannot be run by several processes: {why}"
        )


def host_bytes_per_s(run: Measured, expected: Pace) -> float:
    """Return the bytes of messages that hosts prepare in a second."""
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
    """Return the predicted pace, and the bytes of the full run."""
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
