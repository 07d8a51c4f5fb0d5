"""A plan of faults, as a TOML file, and the story that its seed draws from it.

    seed = 1            # One seed, one story.
    regions = 4
    via = false         # true: through a folder, in place of sockets.
    min_regions = 3     # Default: more than half, so that no two parts go on.
    gap_s = 2.0         # Mean time between two faults, once all regions merge again.
    hang_s = 120.0      # Until then all regions must merge with one another again.
    dead_after_s = 6.0
    program = ""        # Module that trains a region; default: `experiments.train`.

    [faults]            # How many of each kind.
    kill = 10           # SIGKILL; the region starts again.
    freeze = 10         # SIGSTOP, short or longer than dead_after_s, then SIGCONT.
    cut = 5             # The network is cut in two, or from one region to another.
    clock = 5           # A region's wall clock jumps by up to an hour, and back.
    folder = 0          # With via: see `FOLDER_FAULTS`.
    second_life = 0     # With via: a region is frozen, started elsewhere, and thawed.

The story does not depend on the run: order, regions, lengths and gaps of the faults are
drawn before it begins.

Another `program` is run with the words after `--` and the flags `--workdir`,
`--region_id`, `--regions`, `--region_addresses` or `--via`, `--key_file`,
`--dead_after_s` and `--min_regions`. It trains until SIGTERM, and then exits with code
75. In WORKDIR/region_N it writes `syncs.jsonl`, which has a line for each merge with
`fragment`, `start_step`, `apply_step`, `regions` and a `digest` of the outer fragment,
and may write `joins.jsonl` and `metrics.jsonl`. `plain_loop.py` is an example.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import random
import shutil
import tomllib
from collections.abc import Mapping
from typing import Any

from .. import commands

KINDS = ("kill", "freeze", "cut", "clock", "folder", "second_life")
_OF_FOLDERS = ("folder", "second_life")
# Faults of the folder of --via:
#   pipes     named pipes and links with names of messages, which are opened
#   strangers thousands of files whose names have a wrong tag
#   emptied   all messages are deleted
#   away      the folder is missing for some time
#   garbled   bytes of all messages are changed
FOLDER_FAULTS = ("pipes", "strangers", "emptied", "away", "garbled")
_MAX_CLOCK_S = 3600.0
_LEAST_S = 0.5
# Longest faults, in times of dead_after_s: messages in a folder are kept for three.
_LONGEST = {"freeze": 3.0, "cut": 2.0, "clock": 1.5, "folder": 1.0, "second_life": 4.0}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a story.

    Attributes:
      number: its place in the story, from 0.
      kind: one of `KINDS`.
      gap_s: seconds to wait before it, once all regions merge again.
      seconds: its length; for a kill, until the region starts again.
      regions: the affected ones; for a cut, one part, or sender and receiver.
      detail: for a folder, one of `FOLDER_FAULTS`; for a cut, "apart" or "one way"; for
        a clock, the seconds by which it jumps.
    """

    number: int
    kind: str
    gap_s: float
    seconds: float
    regions: tuple[int, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan of faults; see the module."""

    seed: int = 0
    regions: int = 4
    via: bool = False
    min_regions: int = 0
    gap_s: float = 2.0
    hang_s: float = 120.0
    dead_after_s: float = 6.0
    program: str = ""
    faults: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not 2 <= self.regions <= 64:
            raise ValueError(f"regions={self.regions} must be 2 to 64")
        if not 0 <= self.min_regions <= self.regions:
            raise ValueError(
                f"min_regions={self.min_regions} must be 1 to {self.regions}, or 0 for "
                "more than half"
            )

        for name in ("gap_s", "hang_s", "dead_after_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")

        for kind, num in self.faults.items():
            if kind not in KINDS:
                raise ValueError(f"faults has {kind!r}; use {', '.join(KINDS)}")
            if not isinstance(num, int) or isinstance(num, bool) or num < 0:
                raise ValueError(f"faults.{kind}={num!r} must be 0 or more")

        if not self.num_faults:
            raise ValueError("faults has none; give some kinds a number above 0")
        for kind in _OF_FOLDERS:
            if self.faults.get(kind) and not self.via:
                raise ValueError(f"faults.{kind} needs via = true")

        if self.faults.get("cut") and self.via:
            raise ValueError("faults.cut needs sockets; leave out via, or the cuts")

    @property
    def num_faults(self) -> int:
        """Number of faults in the story."""
        return sum(self.faults.values())

    @property
    def least(self) -> int:
        """The least number of regions with which a part goes on."""
        return self.min_regions or self.regions // 2 + 1

    def check_possible(self) -> None:
        """Refuse a program that does not exist, and cuts without network namespaces."""
        if self.program and not _is_module(self.program):
            raise ValueError(
                f"program={self.program!r} is no module that Python finds; name one, "
                "such as experiments.faults.plain_loop"
            )
        if self.faults.get("cut") and (os.geteuid() or shutil.which("ip") is None):
            raise ValueError(
                "faults.cut needs network namespaces: run it as root, with iproute2 "
                "installed, or leave the cuts out"
            )

    def story(self) -> list[Fault]:
        """Return the faults in order, as the seed draws them."""
        draw = random.Random(f"chaos {self.seed}")
        kinds = [kind for kind in KINDS for _ in range(self.faults.get(kind, 0))]
        draw.shuffle(kinds)
        return [self._draw(draw, number, kind) for number, kind in enumerate(kinds)]

    def _draw(self, draw: random.Random, number: int, kind: str) -> Fault:
        gap_s = draw.uniform(0.2, 1.8) * self.gap_s
        regions: tuple[int, ...] = (draw.randrange(self.regions),)
        seconds = draw.uniform(_LEAST_S, 3.0)
        detail = ""

        if kind in _LONGEST:
            longest_s = _LONGEST[kind] * self.dead_after_s
            # Half of them are too short to be taken for a death.
            least_s, most_s = draw.choice(
                [(_LEAST_S, longest_s / 4), (longest_s / 4, longest_s)]
            )
            seconds = draw.uniform(least_s, most_s)

        if kind == "cut":
            detail = draw.choice(("apart", "one way"))
            num = 2
            if detail == "apart":
                num = draw.randint(1, self.regions // 2)
            regions = tuple(draw.sample(range(self.regions), num))
        elif kind == "clock":
            detail = f"{draw.uniform(-_MAX_CLOCK_S, _MAX_CLOCK_S):.1f}"
        elif kind == "folder":
            detail = draw.choice(FOLDER_FAULTS)
            regions = ()

        return Fault(number, kind, round(gap_s, 2), round(seconds, 2), regions, detail)


def read(path: str | pathlib.Path) -> Plan:
    """Read a plan, or raise a `ValueError` that names what is wrong in it."""
    try:
        table: dict[str, Any] = tomllib.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise ValueError(
            f"plan={str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"plan={str(path)!r} is no TOML: {error}") from error

    fields = {field.name: field for field in dataclasses.fields(Plan)}
    for name, value in table.items():
        if name not in fields:
            raise ValueError(
                f"plan={str(path)!r} has {name!r}; it may have {', '.join(fields)}"
            )
        kind = {"faults": dict, "via": bool, "program": str}.get(name, int)
        if name.endswith("_s"):
            kind = (int, float)
        if not isinstance(value, kind) or (kind is not bool and value is True):
            raise ValueError(f"plan={str(path)!r}: {name}={value!r} is of another kind")

    try:
        return Plan(**table)
    except ValueError as error:
        raise ValueError(f"plan={str(path)!r}: {error}") from error


def _is_module(name: str) -> bool:
    """Return whether `python -m` finds a module."""
    try:
        return importlib.util.find_spec(commands.module_of(name)) is not None
    except (ImportError, ValueError):
        return False
