"""One method over one network: a run in the lab, and the simulator's prediction."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shutil
import statistics
import threading
from collections.abc import Sequence
from typing import Any

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.netlab import children
from cocodc_jax.network import exchanges
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.network.workload import Workload
from cocodc_jax.run import timeline
from cocodc_jax.run.config import dumps
from cocodc_jax.sync.method import Method

from .. import commands
from .cases import Network, Stretch

RESULT, LOG = "result.json", "log.txt"
_GRACE_S = 20.0  # the lab's own, to end its regions in order, is shorter
# Collectives of the lab's processes; compressed messages are gathered.
REDUCE = {"direct": "direct", "ring": "gloo"}
GATHER = {"direct": "direct_gather", "ring": "gloo_gather"}
# Syncs are sent one after the other, as in training.
SHARING = "fifo"
# The methods compared by default.
USUAL = ("data_parallel", "diloco", "streaming_diloco", "cocodc")


class LabRunError(RuntimeError):
    """A run in the lab failed."""


class StoppedError(Exception):
    """This program was asked to stop."""


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

    Syncs count that start after it and before the last step. In full intervals, these
    are as many as are waited for.
    """
    last, step_s = timeline.num_steps, max(region_step_s(timeline, first_step))
    syncs = [s for s in timeline.syncs if first_step <= s.start_step < last]
    if not syncs:
        return Pace(step_s, None, None)
    stall_s = sum(s.mean_stall_s for s in syncs) / (last - first_step) * 100
    return Pace(
        step_s, stall_s, statistics.fmean(s.arrival_s - s.start_s for s in syncs)
    )


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
    def from_json(cls, value: dict[str, Any]) -> Measured:
        """Inverse of `dataclasses.asdict`, after JSON."""
        lists = {n: tuple(x) for n, x in value.items() if isinstance(x, list)}
        fields: dict[str, Any] = value | lists | {"pace": Pace(**value["pace"])}
        return cls(**fields)


def lab_command(network: Network, folder: pathlib.Path, train: Sequence[str]):
    """Return the command of a run whose files go to `folder`."""
    lab = (*commands.python_m("wan"), *network.flags, f"--logdir={folder / 'net'}")
    run = (*commands.python_m("train"), *train, f"--workdir={folder / 'run'}")
    return [*lab, "--", *run]


def measured(
    command: Sequence[str],
    folder: pathlib.Path,
    stretch: Stretch,
    limit_s: float,
    links: str | None = None,
) -> Measured:
    """Return the measurements of the run in `folder`; run it if it is not done."""
    if before := held(command, folder, links):
        return Measured.from_json(before["measured"])
    shutil.rmtree(folder, ignore_errors=True)  # What a run that failed has left.
    folder.mkdir(parents=True)
    _run(command, folder / LOG, limit_s)
    result = read(folder, stretch)
    measured = dataclasses.asdict(result)
    entry = {"command": list(command), "links": links, "measured": measured}
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
    group, is_late = children.Group(_GRACE_S), threading.Event()
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
        raise LabRunError(f"exit code {code}: {last_line(log)}")


def last_line(log: pathlib.Path) -> str:
    """Return the last line of a log, preferably of an error."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["it printed nothing"])[-1].strip()


def read(folder: pathlib.Path, stretch: Stretch) -> Measured:
    """Read a finished run's files."""
    run = folder / "run"
    try:
        found = timeline.read(run, stretch.first_step)
        whole = timeline.read(run)
    except ValueError as error:
        raise LabRunError(str(error)) from error
    summary = read_table(run / "summary.json")
    traffic = read_table(folder / "net" / "traffic.json")
    sent, steps = summary["bytes_sent_per_region"], summary["steps"]
    sizes = {sync.fragments[0]: sync.bytes_sent[0] for sync in whole.syncs}
    return Measured(
        pace=pace(found),
        region_step_s=region_step_s(found),
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
    found = simulate_method(
        network.topology,
        Workload(run.fragment_bytes, step_s, host_bytes_per_s=host_bytes_per_s),
        method,
        stretch.last_step,
        reduce_or_gather[all_reduce],
        order=range(network.topology.num_regions),  # gloo takes them as they come
        sharing=SHARING,
    )
    return pace(found, stretch.first_step), max(found.bytes_sent)
