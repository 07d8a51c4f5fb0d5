"""Runs a story of faults against regions that train.

After each fault all regions must merge with one another again. A region that ends by
itself is started again, as a launcher does. At the end all are asked to stop.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cocodc_jax.elastic import objects
from cocodc_jax.files import append_line, open_regular, write_whole
from cocodc_jax.netlab import children
from cocodc_jax.run.exits import USAGE_ERROR
from cocodc_jax.run.taking_part import SYNCS_FILE

from .. import commands
from .judged import is_good, judge, report
from .kills import RefusedError
from .network import Network, pairs_of
from .plans import Fault, Plan

STORY_FILE = "story.json"
FAULTS_FILE = "told.jsonl"
RESULT_FILE = "plan.json"
REPORT_FILE = "report.md"
_POLL_S = 0.2
_START_S = 300.0
_STOP_S = 60.0
_STRANGERS = 2000


class _Syncs:
    """Follows a life's merges, and counts those with the messages of all regions."""

    def __init__(self, path: pathlib.Path, num_regions: int):
        self._path = path
        self._everyone = list(range(num_regions))
        self._at = 0
        self.num_full = 0

    def look(self) -> int:
        """Read new lines; return the number of merges with all regions' messages."""
        if self._path.exists():
            with open_regular(self._path) as file:
                file.seek(self._at)
                new = file.read()
            complete = new[: new.rfind(b"\n") + 1]
            self._at += len(complete)
            for line in complete.splitlines():
                with contextlib.suppress(ValueError):
                    regions = json.loads(line)["regions"]
                    self.num_full += regions == self._everyone

        return self.num_full


class _Life:
    """A region and its folder; a second life has another folder."""

    def __init__(self, region: children.Region, folder: pathlib.Path, num: int):
        self.process = region
        self.folder = folder
        self.syncs = _Syncs(folder / SYNCS_FILE, num)


class Teller:
    """The regions of a run, and the faults that affect them."""

    def __init__(self, plan: Plan, train: Sequence[str], workdir: pathlib.Path):
        self._plan = plan
        self._train = list(train)
        self._workdir = workdir
        self._via = workdir / "messages" if plan.via else None
        self._network: Network | None = None
        self._lives: dict[int, _Life] = {}
        self._retired: list[_Life] = []
        self.folders: list[pathlib.Path] = []
        self.ends: list[dict[str, Any]] = []
        self.is_stopped = False

    def stop(self, _: int = 0) -> None:
        """End the story early; for signal handlers."""
        self.is_stopped = True

    def tell(self, story: Sequence[Fault]) -> list[dict[str, Any]]:
        """Run all faults; return the result of each."""
        outcomes: list[dict[str, Any]] = []
        needs_network = any(fault.kind == "cut" for fault in story)
        with contextlib.ExitStack() as stack:
            if needs_network:
                network = Network(self._plan.regions)
                self._network = stack.enter_context(network)

            stack.callback(self._kill_all)
            addresses = children.free_addresses(self._plan.regions)
            self._addresses = self._network.addresses if self._network else addresses

            for region in range(self._plan.regions):
                self._lives[region] = self._life(region, self._workdir)
                self._lives[region].process.start()

            if not self._until_all_merge(_START_S):
                raise RefusedError("the regions did not begin to merge; see output.log")
            for fault in story:
                if self.is_stopped:
                    break
                outcome = self._one(fault)
                if self.is_stopped and outcome["merged_after_s"] is None:
                    break  # Before it was known what becomes of it.

                outcomes.append(outcome)
                append_line(self._workdir / FAULTS_FILE, outcome)
                print(json.dumps(outcome), file=sys.stderr, flush=True)

                is_mended = outcome["merged_after_s"] is not None
                if not is_mended and not self._until_all_merge(self._plan.hang_s):
                    break  # It does not mend.

            self.stops = self._ask_to_stop()

        return outcomes

    def _one(self, fault: Fault) -> dict[str, Any]:
        """Run a fault, and wait until all regions merge again."""
        self._wait(fault.gap_s)
        began_s = time.monotonic()
        act: Callable[[Fault], Mapping[str, Any]] = getattr(self, f"_{fault.kind}")
        outcome = act(fault)
        ended_s = time.monotonic()
        is_mended = self._until_all_merge(self._plan.hang_s)
        after_s = round(time.monotonic() - ended_s, 1) if is_mended else None

        return {
            **dataclasses.asdict(fault),
            "lasted_s": round(ended_s - began_s, 1),
            "merged_after_s": after_s,
            **outcome,
        }

    # Faults. Each returns once it is over, with what happened besides.

    def _kill(self, fault: Fault) -> Mapping[str, Any]:
        (region,) = fault.regions
        process = self._lives[region].process
        process.send(signal.SIGKILL)
        process.wait()
        self._wait(fault.seconds, but=region)
        process.start()
        return {}

    def _freeze(self, fault: Fault) -> Mapping[str, Any]:
        (region,) = fault.regions
        process = self._lives[region].process
        process.send(signal.SIGSTOP)
        self._wait(fault.seconds)
        process.send(signal.SIGCONT)
        return {}

    def _cut(self, fault: Fault) -> Mapping[str, Any]:
        assert self._network is not None
        pairs = pairs_of(fault.detail, fault.regions, self._plan.regions)
        self._network.cut(pairs)
        self._wait(fault.seconds)
        self._network.mend()
        return {}

    def _clock(self, fault: Fault) -> Mapping[str, Any]:
        (region,) = fault.regions
        path = self._clock_path(region)
        write_whole(path, fault.detail)
        self._wait(fault.seconds)
        path.unlink()
        return {}

    def _folder(self, fault: Fault) -> Mapping[str, Any]:
        assert self._via is not None
        key = objects.key_of(children.make_key(self._workdir).read_bytes())
        with _folder_fault(fault.detail, self._via, key):
            self._wait(fault.seconds)
        return {}

    def _second_life(self, fault: Fault) -> Mapping[str, Any]:
        """Freeze a region, start it elsewhere, thaw it: one of both lives must end."""
        (region,) = fault.regions
        first = self._lives[region]
        first.process.send(signal.SIGSTOP)
        second = self._life(region, self._workdir / f"life_{fault.number}")
        second.process.start()
        self._wait(fault.seconds, but=region)
        first.process.send(signal.SIGCONT)
        both = {"first": first, "second": second}
        begin_s = time.monotonic()

        codes = {}
        while not codes and time.monotonic() - begin_s < self._plan.hang_s:
            self._wait(_POLL_S, but=region)
            codes = {
                name: life.process.code
                for name, life in both.items()
                if life.process.code is not None
            }

        decided_s = round(time.monotonic() - begin_s, 1)
        stays = second if "first" in codes or not codes else first
        for life in both.values():
            if life is not stays:  # It is not started again.
                life.process.send(signal.SIGKILL)
                life.process.wait()
                self._retired.append(life)

        self._lives[region] = stays
        ended = {name: both[name].process.end() for name in codes}
        return {"ended": ended, "decided_after_s": decided_s if codes else None}

    # Regions.

    def _life(self, region: int, workdir: pathlib.Path) -> _Life:
        """Return a region that is not started yet, with its files in a folder."""
        where = [f"--region_addresses={','.join(self._addresses)}"]
        if self._via:
            self._via.mkdir(exist_ok=True)
            where = [f"--via={self._via}"]

        key = children.make_key(self._workdir)
        shifted = commands.python_m("faults.shifted")
        module = commands.module_of(self._plan.program or "experiments.train")
        command = [
            *(self._network.inside(region) if self._network else ()),
            *shifted,
            str(self._clock_path(region)),
            module,
            *self._train,
            f"--workdir={workdir}",
            *where,
            f"--key_file={key}",
            f"--region_id={region}",
        ]
        folder = workdir / f"region_{region}"
        self.folders.append(folder)
        process = children.Region(command, folder / "output.log")

        return _Life(process, folder, self._plan.regions)

    def _clock_path(self, region: int) -> pathlib.Path:
        return self._workdir / f"clock_{region}"

    def _wait(self, seconds: float, but: int | None = None) -> None:
        """Wait, and restart regions that end by themselves, except one."""
        end = time.monotonic() + seconds
        while True:
            for region, life in self._lives.items():
                if region != but and life.process.code is not None:
                    self._ended_by_itself(region, life)
            left_s = end - time.monotonic()
            if left_s <= 0 or self.is_stopped:
                return
            time.sleep(min(left_s, _POLL_S))

    def _ended_by_itself(self, region: int, life: _Life) -> None:
        end = life.process.end()
        if life.process.code in (0, USAGE_ERROR):
            raise RefusedError(f"region {region} ended with {end}")
        self.ends.append({"region": region, "ended": end})
        life.process.start()

    def _until_all_merge(self, limit_s: float) -> bool:
        """Wait until each region has a new merge with all regions' messages."""
        before = {r: life.syncs.look() for r, life in self._lives.items()}
        end = time.monotonic() + limit_s
        while any(
            life.syncs.look() <= before[region] for region, life in self._lives.items()
        ):
            if time.monotonic() > end or self.is_stopped:
                return False
            self._wait(_POLL_S)
        return True

    def _ask_to_stop(self) -> list[dict[str, Any]]:
        """Ask all regions to stop; return how each ended, and after how long."""
        begin_s = time.monotonic()
        running = dict(self._lives)
        for life in running.values():
            life.process.send(signal.SIGTERM)

        stops = []
        while running and time.monotonic() - begin_s < _STOP_S:
            for region in [r for r, x in running.items() if x.process.code is not None]:
                code = running.pop(region).process.code
                seconds = round(time.monotonic() - begin_s, 1)
                stops.append({"region": region, "code": code, "seconds": seconds})
            time.sleep(_POLL_S / 4)

        return stops + [{"region": r, "code": None} for r in running]

    def _kill_all(self) -> None:
        for life in [*self._lives.values(), *self._retired]:
            life.process.send(signal.SIGKILL)
            life.process.wait()


@contextlib.contextmanager
def _folder_fault(detail: str, folder: pathlib.Path, key: bytes) -> Iterator[None]:
    """Damage a folder of messages; at the end, undo damage that would stay.

    Args:
      detail: one of `plans.FOLDER_FAULTS`.
      folder: of the messages.
      key: of their names; regions open pipes with such names, but not strangers' files.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    strange: list[pathlib.Path] = []
    if detail in ("pipes", "strangers"):
        num = 16 if detail == "pipes" else _STRANGERS
        bases = names[-8:] or ["000-1-1-f-0"]
        for number in range(num):
            # The names of messages that are there, with other numbers.
            sender, boot, *rest = bases[number % len(bases)].lstrip(".").split("-")
            start = f"{sender}-{boot}-{10**9 + number:010}-{rest[1]}"
            tag = f"{number:016x}" if detail == "strangers" else objects.tag(key, start)
            strange.append(folder / f"{start}-{tag}")
            if detail == "strangers":
                strange[-1].write_bytes(b"strange")
            elif number % 2:
                strange[-1].symlink_to("/dev/zero")
            else:
                os.mkfifo(strange[-1])

        if detail == "pipes":  # In the place of messages that are there, too.
            for name in names[-8:]:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
                    os.mkfifo(folder / name)
                    strange.append(folder / name)
    elif detail == "emptied":
        for name in names:
            (folder / name).unlink(missing_ok=True)
    elif detail == "garbled":
        for name in names:
            with contextlib.suppress(OSError):
                content = bytearray((folder / name).read_bytes())
                num_bytes = len(content[len(content) // 2 :: 7])
                content[len(content) // 2 :: 7] = b"\0" * num_bytes
                (folder / name).write_bytes(content)

    away = folder.with_name(folder.name + "_away")
    if detail == "away":
        folder.rename(away)
    yield

    if detail == "away":
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)

    for path in strange:
        path.unlink(missing_ok=True)


def run(
    plan: Plan, train: Sequence[str], workdir: pathlib.Path, command: str
) -> dict[str, Any]:
    """Train and run the story; return the result, which is also written to a file."""
    story = plan.story()
    planned = {
        "plan": dataclasses.asdict(plan),
        "story": [dataclasses.asdict(fault) for fault in story],
    }
    write_whole(workdir / STORY_FILE, json.dumps(planned, indent=1) + "\n")

    flags = [
        f"--regions={plan.regions}",
        f"--dead_after_s={plan.dead_after_s}",
        f"--min_regions={plan.least}",
    ]
    if not plan.program:
        flags += ["--exchange=elastic", "--outer_digests", "--log_every=1"]
    teller = Teller(plan, [*train, *flags], workdir)
    began_s = time.monotonic()

    with children.on_signals(teller.stop):
        outcomes = teller.tell(story)

    hangs = [x for x in outcomes if x["merged_after_s"] is None]
    two_lives = [x for x in outcomes if x.get("decided_after_s", 0) is None]
    result = {
        "command": command,
        "plan": dataclasses.asdict(plan),
        "planned": len(story),
        "seconds": round(time.monotonic() - began_s, 1),
        "cores": os.cpu_count(),
        **judge(plan, teller.folders),
        "hangs": hangs,
        "two_lives": two_lives,
        "ended_by_themselves": teller.ends,
        "stops": teller.stops,
        "faults": outcomes,
    }
    result["held"] = is_good(result)
    write_whole(workdir / RESULT_FILE, json.dumps(result, indent=1) + "\n")
    write_whole(workdir / REPORT_FILE, report(result))

    return result
