"""A grid file: flags of every row, groups of products, seeds, and what is tuned.

TOML; `experiments/grids/example.toml` explains it by example. A value that is a list is
an axis, and a group is the product of its axes. An axis of tables, under any name, sets
several flags at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import os
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cocodc_jax import models
from cocodc_jax.run.config import LEAVES, TrainConfig
from cocodc_jax.run.leaves import COUNT_OR_WORD
from cocodc_jax.run.method_config import ARGUMENTS
from cocodc_jax.run.presets import PRESETS, with_warmup

from ..program import about
from .halving import Halving, check_seeds
from .rows import setting_key

KEYS = ("base", "groups", "halving", "published", "seeds", "tuned")
Flags = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration of the grid, which several seeds train."""

    name: str  # Group and flags, for people.
    config: TrainConfig  # Resolved; its seed means nothing.
    # Whether everything that is tuned is as the method, the preset and the base flags
    # have it.
    published: bool

    @functools.cached_property
    def key(self) -> str:
        """What tells this setting from others, whatever group it came from."""
        return setting_key(self.config.to_json())

    @property
    def cost_per_step(self) -> float:
        """Multiplications of a step, up to a factor that all settings share."""
        return self.config.tokens_per_step * models.num_params(self.config.model)

    def at(self, steps: int) -> Setting:
        """Return the setting with another number of steps."""
        with about(f"{self.name}, at a rung"):
            config = self.config.replace(steps=steps)
        return dataclasses.replace(self, config=config)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a grid file says, checked."""

    # Distinct, in the order of the file; the published ones are among them.
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]  # Of the final figures.
    tuned: tuple[str, ...]  # Flags that the best values are looked for.
    # How they are looked for; None trains every setting with every seed.
    halving: Halving | None


def read(path: str | os.PathLike[str]) -> Grid:
    """Read a grid file and check every row of it."""
    try:
        table = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"grid={str(path)!r} is no TOML file: {error}") from error
    return from_table(table)


def from_table(table: Mapping[str, Any]) -> Grid:
    """Return the grid of a table as a grid file has it; see `read`."""
    if odd := sorted(table.keys() - set(KEYS)):
        raise ValueError(f"grid has unknown keys {odd}; it may have {list(KEYS)}")
    for key in ("base", "halving"):
        if not isinstance(table.get(key, {}), dict):
            raise ValueError(f"{key}={table[key]!r} must be a table, as [{key}]")
    if type(table.get("published", True)) is not bool:
        raise ValueError(f"published={table['published']!r} must be true or false")
    groups = table.get("groups", {})
    if not isinstance(groups, dict) or not groups:
        raise ValueError("grid has no groups; write at least one, as [groups.NAME]")
    tuned, halving = _names("tuned", table.get("tuned", ())), None
    if "halving" in table:
        halving = Halving.from_table(table["halving"])
        if "seeds" in table:
            raise ValueError(
                f"seeds={table['seeds']} has no meaning beside [halving], which has "
                "tuning_seeds and final_seeds; leave it out"
            )
        _names("by", halving.by)
        if not tuned:
            raise ValueError(
                "[halving] has nothing to choose between; name the flags that it "
                'tunes: tuned = ["outer_lr", ...]'
            )
    seeds = halving.final_seeds if halving else table.get("seeds", [0])
    start, adds = _base_config(table.get("base", {})), table.get("published", True)
    settings: dict[str, Setting] = {}
    for group, axes in groups.items():
        for setting in _settings(start, group, axes, tuned, adds):
            known = settings.setdefault(setting.key, setting)
            if setting.published and not known.published:
                settings[setting.key] = dataclasses.replace(known, published=True)
    grid = Grid(tuple(settings.values()), check_seeds("seeds", seeds), tuned, halving)
    for steps in halving.rungs if halving else ():
        for setting in grid.settings:
            setting.at(steps)
    return grid


def _names(key: str, names: Any) -> tuple[str, ...]:
    """Return names of flags."""
    if not isinstance(names, list | tuple):
        raise ValueError(
            f'{key}={names!r} must be a list of names of flags, such as ["outer_lr"]'
        )
    for name in names:
        _check_name(name, key)
    return tuple(names)


def _base_config(base: Mapping[str, Any]) -> TrainConfig:
    """Return the preset with the base flags, for whichever method takes them."""
    leaves = dict(base)
    preset = leaves.pop("preset", "tiny")
    with about("base"):
        checked = {name: _checked(name, value) for name, value in leaves.items()}
        where = {n: checked.pop(n) for n in ARGUMENTS if n in checked}
        if type(preset) is not str or preset not in PRESETS:
            raise ValueError(
                f"preset={preset!r} is unknown; use one of {sorted(PRESETS)}"
            )
        start = PRESETS[preset]
        return start.where(**where).replace(**with_warmup(start, checked))


def _settings(
    start: TrainConfig, group: str, axes: Any, tuned: Sequence[str], adds: bool
) -> Iterator[Setting]:
    """Yield the settings of a group; `adds` the published one that each belongs to."""
    if not isinstance(axes, dict):
        raise ValueError(f"groups.{group}={axes!r} must be a table of flags")
    seen: set[str] = set()
    for number, flags in enumerate(_product(group, axes), 1):
        published = {n: v for n, v in flags.items() if n not in tuned}
        both = [published, flags] if adds and published != flags else [flags]
        names = [f"{group}: " + " ".join(f"{n}={x[n]}" for n in x) for x in both]
        with about(f"groups.{group}, row {number} ({names[-1]})"):
            found = [
                Setting(name, _config(start, x), x == published)
                for name, x in zip(names, both, strict=True)
            ]
        for setting in found:
            if setting.key not in seen or setting.published:
                seen.add(setting.key)
                yield setting


def _product(group: str, axes: Mapping[str, Any]) -> Iterator[Flags]:
    """Yield the flags of every row of a group, the last axis fastest."""
    choices = [_choices(group, name, values) for name, values in axes.items()]
    for parts in itertools.product(*choices):
        flags: Flags = {}
        for part in parts:
            if twice := sorted(flags.keys() & part.keys()):
                raise ValueError(f"groups.{group} sets {twice[0]} twice in one row")
            flags |= part
        yield flags


def _choices(group: str, name: str, values: Any) -> list[Flags]:
    listed = values if isinstance(values, list) else [values]
    if not listed:
        raise ValueError(f"groups.{group}.{name}=[] is an axis without values")
    if all(isinstance(value, dict) for value in listed):
        return [dict(value) for value in listed]
    return [{name: value} for value in listed]


def _config(start: TrainConfig, flags: Flags) -> TrainConfig:
    """Return the resolved configuration of a row."""
    leaves = {name: _checked(name, value) for name, value in flags.items()}
    if "preset" in leaves:
        raise ValueError(
            f"preset={leaves['preset']!r} is a base flag: sizes are compared in grids "
            "of their own"
        )
    return start.replace(**leaves).resolve()


def _check_name(name: Any, where: str) -> None:
    if type(name) is not str or name not in LEAVES:
        near = difflib.get_close_matches(str(name), LEAVES, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{where}: {name!r} is no flag of a run{hint}")


def _checked(name: str, value: Any) -> Any:
    """Return the value of a flag, of the flag's type."""
    if name == "preset":
        return value
    if name == "seed":
        raise ValueError(f"seed={value} is not a flag of a row; use seeds = [...]")
    _check_name(name, f"{name}={value!r}")
    kind = LEAVES[name].type
    if kind == COUNT_OR_WORD:
        is_right = type(value) in (int, str)
    else:
        is_right = type(value) is kind or (kind is float and type(value) is int)
    if not is_right:
        what = "a whole number or a word" if kind == COUNT_OR_WORD else kind.__name__
        raise ValueError(f"{name}={value!r} must be of type {what}")
    return float(value) if kind is float else value
