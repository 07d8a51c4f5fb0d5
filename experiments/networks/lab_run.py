"""One method over one network: a run in the lab, and its measurements."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Sequence
from typing import Any

from cocodc_jax.files import read_table, write_whole
from cocodc_jax.netlab import children
from cocodc_jax.network.timeline import Timeline
from cocodc_jax.run import timeline
from cocodc_jax.run.config import dumps

from .. import commands
from .cases import Network, Stretch
from .measure import Pace, pace, region_step_s

RESULT, LOG = "result.json", "log.txt"
_GRACE_S = 20.0  # the lab's own, to end its regions in order, is shorter


class LabRunError(RuntimeError):
    """A run in the lab failed."""


class StoppedError(Exception):
    """This program was asked to stop."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a run in the lab.

    Attributes:
      pace: of the measured steps.
      region_step_s: seconds per measured step of each region.
      fragment_bytes: bytes of one region's message for each fragment; of its one
        message for a method that exchanges at every step; empty if nothing was sent.
      sent_bytes: bytes that one region sent in the full run, as the program counts.
      relayed_bytes: most bytes that a region sent over the network, with headers and
        the coordinator's traffic.
    """

    pace: Pace
    region_step_s: tuple[float, ...]
    fragment_bytes: tuple[float, ...]
    sent_bytes: int
    relayed_bytes: int

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Measured:
        """Inverse of `dataclasses.asdict`, after JSON."""
        return cls(
            Pace(**value["pace"]),
            tuple(value["region_step_s"]),
            tuple(value["fragment_bytes"]),
            value["sent_bytes"],
            value["relayed_bytes"],
        )


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
    """Return the measurements of the run in `folder`; run it if it is not done.

    Raises:
      LabRunError: if the run failed, with its last line of output.
      StoppedError: after SIGINT or SIGTERM, when the run has ended.
    """
    before = held(command, folder, links)
    if before is not None:
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
    _check_same(command, value["command"], folder)
    if value.get("links", links) != links:
        raise ValueError(
            f"workdir: {folder} holds a result over links that their file has no more; "
            "name another folder or delete it"
        )
    return value


def _check_same(command: Sequence[str], before: Sequence[str], folder: pathlib.Path):
    if list(command) != list(before):
        odd = sorted(set(command) ^ set(before))
        raise ValueError(
            f"workdir: {folder} holds the result of another command (they differ in "
            f"{' '.join(odd)}); name another folder or delete it"
        )


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
    """Read a finished run's files.

    Raises:
      LabRunError: if they lack some of the measured steps.
    """
    run = folder / "run"
    try:
        found = timeline.read(run, stretch.first_step)
        whole = timeline.read(run)
    except ValueError as error:
        raise LabRunError(str(error)) from error
    summary = json.loads((run / "summary.json").read_text())
    traffic = json.loads((folder / "net" / "traffic.json").read_text())
    sent, steps = summary["bytes_sent_per_region"], summary["steps"]
    return Measured(
        pace=pace(found),
        region_step_s=region_step_s(found),
        fragment_bytes=_fragment_bytes(whole) or ((sent / steps,) if sent else ()),
        sent_bytes=sent,
        relayed_bytes=max(sum(row) for row in traffic["sent_bytes"]),
    )


def _fragment_bytes(whole: Timeline) -> tuple[float, ...]:
    sizes = {sync.fragments[0]: sync.bytes_sent[0] for sync in whole.syncs}
    return tuple(sizes[fragment] for fragment in sorted(sizes))
