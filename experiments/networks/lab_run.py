"""One method over one network: a run in the lab, and the simulator's prediction.

Also networks by name, and the steps of a method that are measured.
"""

import dataclasses
import math
import os
import pathlib
import shutil
import statistics
import threading
from collections.abc import Sequence
from typing import Any, Self

from cocodc_jax.files import read_regular, read_table, read_text, write_whole
from cocodc_jax.netlab import children, plan
from cocodc_jax.network import exchanges, gloo
from cocodc_jax.network.links import Topology
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.paths import expanded
from cocodc_jax.run import timeline
from cocodc_jax.run.config.train_config import dumps
from cocodc_jax.sync.method import Method

from .. import wan

LATENCY_MS = 50  # One way, for networks that are named by their Mbit/s.
# As fast as the lab can be, where only delays count.
WIDE = "wide"
WIDE_MBIT = 10_000
UNEQUAL = pathlib.Path(__file__).with_name("unequal.yaml")
# Steps to measure without intervals: an exchange at every step is slow, and the run
# without a network is the reference of all others.
EXCHANGE_STEPS = 20
ALONE_STEPS = 100
RESULT = "result.json"
LOG = "log.txt"
_GRACE_S = 20.0  # Longer than the lab's, which ends its regions in order.
# Collectives of the lab's processes; compressed messages are gathered.
REDUCE = {"direct": "direct", "ring": "gloo"}
GATHER = {"direct": "direct_gather", "ring": "gloo_gather"}
USUAL = ("data_parallel", "diloco", "streaming_diloco", "cocodc")  # The default.


class LabRunError(RuntimeError):
    """A run in the lab failed."""


class StoppedError(Exception):
    """This program was asked to stop."""


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

    path = None
    if text == "unequal":
        path = UNEQUAL
    elif not is_known:
        path = expanded(text, f"networks={text!r}")

    if path is None:
        mbit = WIDE_MBIT if text == WIDE else text
        flags = (
            f"--regions={num_regions}",
            f"--bandwidth_mbit={mbit}",
            f"--latency_ms={LATENCY_MS}",
        )
    else:
        flags = (f"--links={path}",)

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

    mtu = plan.usual_mtu_bytes(plan.conditions_over_time(topology.undisturbed)[0])
    links = None if path is None else read_text(path)
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


@dataclasses.dataclass(frozen=True)
class Pace:
    """The speed of the regions."""

    step_s: float  # Seconds per step of the slowest region, with waits.
    # Seconds of waiting for syncs in 100 steps, mean over regions; None without syncs,
    # as for methods that exchange at every step.
    stall_s: float | None
    # Mean seconds of a sync from its start to its arrival; None without syncs.
    sync_s: float | None


def region_step_s(timeline: Timeline, first_step: int = 0) -> tuple[float, ...]:
    """Return seconds per step of each region after `first_step`, with waits."""
    last = timeline.num_steps
    took = timeline.times_s(last) - timeline.times_s(first_step)
    return tuple((took / (last - first_step)).tolist())


def pace(timeline: Timeline, first_step: int = 0) -> Pace:
    """Return the pace after `first_step`.

    Syncs count if they start after it and before the last step. In full intervals, as
    many syncs start as are waited for.
    """
    last = timeline.num_steps
    step_s = max(region_step_s(timeline, first_step))
    syncs = [s for s in timeline.syncs if first_step <= s.start_step < last]
    if not syncs:
        return Pace(step_s, None, None)
    waited_s = sum(statistics.fmean(sync.stalls_s) for sync in syncs)
    stall_s = waited_s / (last - first_step) * 100
    sync_s = statistics.fmean(s.arrival_s - s.start_s for s in syncs)
    return Pace(step_s, stall_s, sync_s)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a run in the lab."""

    pace: Pace  # Of the measured steps.
    region_step_s: tuple[float, ...]  # Seconds per measured step of each region.
    # Bytes of one region's message for each fragment; of its one message for a method
    # that exchanges at every step; empty if nothing was sent.
    fragment_bytes: tuple[float, ...]
    # Bytes that one region sent in the full run, as the program counts.
    sent_bytes: int
    # Most bytes that a region sent over the network, with headers and the coordinator's
    # traffic.
    relayed_bytes: int

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`, after JSON."""
        lists = {n: tuple(x) for n, x in value.items() if isinstance(x, list)}
        fields: dict[str, Any] = value | lists | {"pace": Pace(**value["pace"])}
        return cls(**fields)


def measured(
    command: Sequence[str],
    folder: pathlib.Path,
    stretch: Stretch,
    limit_s: float,
    links: str | None = None,
) -> Measured:
    """Return the measurements of the run in `folder`; run it first if necessary."""
    if before := held(command, folder, links):
        return Measured.from_json(before["measured"])
    shutil.rmtree(folder, ignore_errors=True)  # The remains of a run that failed.
    folder.mkdir(parents=True)
    _run(command, folder / LOG, limit_s)
    result = read(folder, stretch)
    entry: dict[str, Any] = {"command": list(command), "links": links}
    entry["measured"] = dataclasses.asdict(result)
    write_whole(folder / RESULT, dumps(entry))

    return result


def held(
    command: Sequence[str], folder: pathlib.Path, links: str | None = None
) -> dict[str, Any] | None:
    """Return the result in a folder; None without one."""
    if not (folder / RESULT).exists():
        return None
    value = read_table(folder / RESULT)
    if differs := sorted({*command} ^ {*value["command"]}):
        raise ValueError(
            f"workdir: {folder} holds the result of another command (they differ in "
            f"{' '.join(differs)}); name another folder or delete it"
        )
    if value.get("links", links) != links:
        raise ValueError(
            f"workdir: {folder} holds a result over links that their file has no more; "
            "name another folder or delete it"
        )

    return value


def _run(command: Sequence[str], log: pathlib.Path, limit_s: float) -> None:
    group = children.Group(_GRACE_S)
    is_late = threading.Event()
    signals: list[int] = []

    def stop(code: int) -> None:
        signals.append(code)
        group.stop()

    def give_up() -> None:
        is_late.set()
        group.stop()

    timer = threading.Timer(limit_s, give_up)
    with children.on_signals(stop):
        group.start(command, dict(os.environ), log)
        timer.start()
        code = group.wait()
        timer.cancel()

    if signals:
        raise StoppedError
    if is_late.is_set():
        raise LabRunError(f"not done after {limit_s:g} s; see {log}")
    if code:
        lines = read_regular(log).decode(errors="replace").splitlines()
        errors = [line for line in lines if "rror" in line]
        last = (errors or lines or ["it printed nothing"])[-1].strip()
        raise LabRunError(f"exit code {code}: {last}")


def read(folder: pathlib.Path, stretch: Stretch) -> Measured:
    """Read a finished run's files."""
    run = folder / "run"
    try:
        warm = timeline.read(run, stretch.first_step)
        whole = timeline.read(run)
    except ValueError as error:
        raise LabRunError(str(error)) from error

    summary = read_table(run / "summary.json")
    traffic = read_table(folder / "net" / "traffic.json")
    sent = summary["bytes_sent_per_region"]
    steps = summary["steps"]
    sizes = {sync.fragments[0]: sync.bytes_sent[0] for sync in whole.syncs}

    return Measured(
        pace=pace(warm),
        region_step_s=region_step_s(warm),
        fragment_bytes=tuple(x for _, x in sorted(sizes.items()))
        or ((sent / steps,) if sent else ()),
        sent_bytes=sent,
        relayed_bytes=max(sum(row) for row in traffic["sent_bytes"]),
    )


def check(method: Method) -> None:
    """Refuse a method that several processes cannot run."""
    why = method.sync.only_in_program if method.sync else None
    if method.num_regions is not None:
        why = "it is for a single region"
    if method.sync is None and method.per_step is None:
        why = "it exchanges nothing"
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
    simulated = simulate_method(
        network.topology,
        Workload(run.fragment_bytes, step_s, host_bytes_per_s=host_bytes_per_s),
        method,
        stretch.last_step,
        reduce_or_gather[all_reduce],
        order=range(network.topology.num_regions),  # gloo takes them as they come
        sharing="fifo",  # one after the other, as in training
    )

    return pace(simulated, stretch.first_step), max(simulated.bytes_sent)
