"""Networks by name, and the steps of a method that are measured."""

import dataclasses
import math
import pathlib

from cocodc_jax.netlab import plan
from cocodc_jax.network import gloo
from cocodc_jax.network.links import Topology
from cocodc_jax.sync.method import Method

from .. import wan

LATENCY_MS = 50  # one way, of networks that are named by their Mbit/s
WIDE, WIDE_MBIT = "wide", 10_000  # as fast as the lab can be, where only delays count
UNEQUAL = pathlib.Path(__file__).with_name("unequal.yaml")
# Steps to measure without intervals: an exchange at every step is slow, and the run
# without a network is the reference of all others.
EXCHANGE_STEPS, ALONE_STEPS = 20, 100


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of the lab."""

    name: str  # Name in folders and tables.
    flags: tuple[str, ...]  # Flags of `experiments.wan`.
    topology: Topology  # The same network without packet headers, for the simulator.
    links: str | None = None  # Content of the file of links; None without one.


def network(text: str, num_regions: int) -> Network:
    """Return the network that a word names."""
    is_number = text.replace(".", "", 1).isdigit()
    is_known = is_number or text in (WIDE, "unequal")
    name = text if is_known else pathlib.Path(text).stem
    path = None if is_number or text == WIDE else pathlib.Path(text)
    if text == "unequal":
        path = UNEQUAL
    flags = (f"--links={path}",)
    if path is None:
        mbit = WIDE_MBIT if text == WIDE else text
        flags = (f"--bandwidth_mbit={mbit}", f"--latency_ms={LATENCY_MS}")
        flags = (f"--regions={num_regions}", *flags)
    values = wan.define_flags()
    values(["wan", *flags])
    try:
        if is_number and not 0 < float(text) < math.inf:
            raise ValueError("a bandwidth must be positive")
        topology = wan.build_topology(values)
    except ValueError as error:
        raise ValueError(
            f"networks: {text!r} is not a network ({error}); use Mbit/s, unequal, or a "
            "YAML file of links"
        ) from error
    if topology.num_regions != num_regions:
        raise ValueError(
            f"networks: {text!r} has {topology.num_regions} regions, but the run has "
            f"regions={num_regions}"
        )
    mtu = plan.usual_mtu_bytes(plan.conditions_over_time(topology)[0])
    links = None if path is None else path.read_text()
    return Network(name, flags, topology.scaled(gloo.payload_share(mtu)), links)


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The steps of a run that are measured."""

    first_step: int  # The first; by then every program is compiled.
    last_step: int  # The last step, also of the run.


def stretch(method: Method, log_every: int, num_intervals: int) -> Stretch:
    """Return the steps to measure: full intervals, or a fixed number without any."""
    if method.schedule is None:
        window = ALONE_STEPS if method.per_step is None else EXCHANGE_STEPS
        # Here the clock is read every `log_every` steps; regions that do not wait for
        # one another must all have compiled before.
        first = log_every * math.ceil(window / 2 / log_every)
        return Stretch(first, first + log_every * math.ceil(window / log_every))
    interval = method.schedule.sync_interval
    first = method.schedule.warm_up_steps
    return Stretch(first, first + num_intervals * interval)
