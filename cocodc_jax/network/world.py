"""Topologies by name and from files: regions of the world, YAML or JSON tables.

The round trips between cloud regions below are approximate: typical public figures for
large providers, written down from memory in 2025 and rounded to 5 ms. They are good for
planning and for demonstrations; measure your own before deciding on anything.
"""

import itertools
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from cocodc_jax._extras import extra
from cocodc_jax.files import read_text
from cocodc_jax.network.links import Link, LinkChange, Topology

with extra("train"):
    import yaml

# What `world` knows, and their round trips in milliseconds; row i holds the pairs
# (i, i+1), (i, i+2), ...
REGIONS = (
    "us-east",
    "us-west",
    "europe-west",
    "europe-central",
    "asia-south",
    "asia-southeast",
    "asia-northeast",
    "australia",
    "south-america",
)
_ROUND_TRIPS_MS = (
    (65, 70, 90, 190, 220, 150, 200, 115),
    (125, 145, 220, 165, 95, 140, 175),
    (25, 120, 175, 205, 255, 180),
    (110, 160, 225, 250, 205),
    (60, 125, 150, 300),
    (70, 95, 330),
    (110, 260),
    (310,),
)

Read = TypeVar("Read")

_UNUSED = Link(1.0, 0.0)  # the diagonal: no region sends to itself
_PAIR_KEYS = {"between", "from", "to"}
_LINK_KEYS = {"bandwidth_gbps", "latency_ms", "jitter_ms", "loss"}
_CHANGE_KEYS = {"start_s", "duration_s", "bandwidth_factor", "extra_latency_ms"}


def world(regions: tuple[str, ...], bandwidth_gbps: float) -> Topology:
    """Return cloud regions of the world, all pairs with the same bandwidth.

    >>> world(("us-east", "europe-west"), 1.0).links[0][1].latency_s
    0.035
    """
    for name in regions:
        if name not in REGIONS:
            raise ValueError(f"region {name!r} is unknown; known are {list(REGIONS)}")

    numbers = itertools.chain.from_iterable(_ROUND_TRIPS_MS)
    pairs = (frozenset[str](x) for x in itertools.combinations(REGIONS, 2))
    round_trip_ms = dict(zip(pairs, numbers, strict=True))

    def link(a: str, b: str) -> Link:
        return Link(bandwidth_gbps, round_trip_ms.get(frozenset((a, b)), 0) / 2 / 1000)

    links = tuple(tuple(link(a, b) for b in regions) for a in regions)
    return Topology(tuple(regions), links, line_gbps=bandwidth_gbps)


def load_topology(path: str | pathlib.Path) -> Topology:
    """Read a topology from a YAML file (JSON is YAML too).

    ```yaml
    regions: [paris, tokyo, dallas]
    default: {bandwidth_gbps: 1, latency_ms: 60, jitter_ms: 2, loss: 0}
    links:
      - {between: [paris, tokyo], latency_ms: 110}       # both directions
      - {from: dallas, to: tokyo, bandwidth_gbps: 0.5}   # one
    changes:
      - {start_s: 60, duration_s: 5, bandwidth_factor: 0}                   # outage
      - {from: paris, to: tokyo, start_s: 90, duration_s: 30, extra_latency_ms: 40}
    ```

    Raises:
      ValueError: naming the file and the entry that is wrong.
      OSError: if the file cannot be read.
    """
    return _read(path, parse_topology)


def load_changes(
    path: str | pathlib.Path, regions: Sequence[str]
) -> tuple[LinkChange, ...]:
    """Read a list of changes, written as `changes` in a file of links.

    ```yaml
    - {start_s: 20, duration_s: 5, bandwidth_factor: 0}       # outage of all links
    - {between: [region0, region2], start_s: 40, duration_s: 30, bandwidth_factor: 0.1}
    - {from: region1, start_s: 60, duration_s: 10, extra_latency_ms: 80}
    ```

    A `ValueError` names the file and the entry that is wrong.
    """

    def parse(changes: Any) -> tuple[LinkChange, ...]:
        if not isinstance(changes, list):
            raise ValueError(f"changes={changes!r} must be a list")
        return _changes(changes, list(regions))

    return _read(path, parse)


def _read(path: str | pathlib.Path, parse: Callable[[Any], Read]) -> Read:
    try:
        return parse(yaml.safe_load(read_text(path)))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path}: {message}") from error


def parse_topology(table: Any) -> Topology:
    """Build a topology from the table that `load_topology` describes."""
    _check_keys("topology", table, {"regions", "default", "links", "changes"})
    regions = table.get("regions")
    if not isinstance(regions, list) or not regions:
        raise ValueError(f"regions={regions!r} must be a list of names")

    names = [str(name) for name in regions]
    ids = range(len(regions))
    default = table.get("default") or {}
    _check_keys("default", default, _LINK_KEYS)
    settings = {pair: dict(default) for pair in itertools.permutations(ids, 2)}

    for entry in table.get("links") or []:
        _check_keys("links", entry, _PAIR_KEYS | _LINK_KEYS)
        for source, target in _pairs("links", entry, names):
            if source is None or target is None:
                raise ValueError(f"links entry {entry!r} must name two regions")
            values = {k: v for k, v in entry.items() if k in _LINK_KEYS}
            settings[source, target].update(values)

    built = {pair: _link(names, pair, values) for pair, values in settings.items()}
    rows = tuple(tuple(built.get((i, j), _UNUSED) for j in ids) for i in ids)
    changes = _changes(table.get("changes") or [], names)
    return Topology(tuple(names), rows, changes)


def _check_keys(where: str, table: Any, known: Collection[str]) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{where}={table!r} must be a table")
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {sorted(known)}")


def _number(table: dict[str, Any], key: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}={value!r} must be a number")
    return float(value)


def _link(names: list[str], pair: tuple[int, int], table: dict[str, Any]) -> Link:
    try:
        return Link(
            _number(table, "bandwidth_gbps"),
            _number(table, "latency_ms") / 1000,
            _number(table, "jitter_ms", 0.0) / 1000,
            _number(table, "loss", 0.0),
        )
    except ValueError as error:
        where = f"link {names[pair[0]]} to {names[pair[1]]}"
        raise ValueError(f"{where}: {error}") from error


def _pairs(
    where: str, entry: dict[str, Any], names: list[str]
) -> list[tuple[int | None, int | None]]:
    """Return the ordered pairs an entry speaks of; None stands for every region."""

    def index(name: Any) -> int | None:
        if name is None:
            return None
        name = str(name)
        if name not in names:
            raise ValueError(f"{where}: region {name!r} is not among {names}")
        return names.index(name)

    if "between" not in entry:
        source = index(entry.get("from"))
        target = index(entry.get("to"))
        if source is not None and source == target:
            raise ValueError(f"{where}: {entry!r} must name two regions")
        return [(source, target)]

    ends = entry["between"]
    is_pair = isinstance(ends, list) and len(ends) == 2 and ends[0] != ends[1]
    if not is_pair or {"from", "to"} & entry.keys():
        raise ValueError(f"{where}: between={ends!r} must name two regions, alone")

    first = index(ends[0])
    second = index(ends[1])
    return [(first, second), (second, first)]


def _changes(entries: list[Any], names: list[str]) -> tuple[LinkChange, ...]:
    changes = []
    for entry in entries:
        _check_keys("changes", entry, _PAIR_KEYS | _CHANGE_KEYS)
        ends = _pairs("changes", entry, names)
        try:
            start_s = _number(entry, "start_s")
            duration_s = _number(entry, "duration_s")
            factor = _number(entry, "bandwidth_factor", 1.0)
            extra_s = _number(entry, "extra_latency_ms", 0.0) / 1000
            for source, target in ends:
                change = LinkChange(
                    start_s, duration_s, factor, extra_s, source, target
                )
                changes.append(change)
        except ValueError as error:
            raise ValueError(f"changes: {error}") from error

    return tuple(changes)
