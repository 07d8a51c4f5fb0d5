"""A grid file: flags of every row, groups of products, seeds, and the tuned flags.

It is TOML; `experiments/grids/example.toml` explains it by example. A value that is a
list is an axis, and a group is the product of its axes. An axis of tables, under any
name, sets several flags at once.

Successive halving tunes with short runs of all settings, and longer runs of the best.
Rung i trains the remaining settings for r_i steps over the tuning seeds, each a full
run whose learning rate ends at r_i. Of the n settings that compete under one key, the
best max(w, ceil(keep n)) go on; after the last rung the best w win (Jamieson and
Talwalkar, arXiv 1502.07943, without its doubling of the budget). The winners are
trained anew with the final seeds, which had no part in any choice.
"""

import dataclasses
import difflib
import functools
import itertools
import math
import os
import pathlib
import statistics
import tomllib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from cocodc_jax import models
from cocodc_jax.fields import COUNT_OR_WORD
from cocodc_jax.files import read_text
from cocodc_jax.paths import without_tilde
from cocodc_jax.run.config.method_config import ARGUMENTS
from cocodc_jax.run.config.presets import PRESETS, with_warmup
from cocodc_jax.run.config.train_config import LEAVES, TrainConfig

from ..program import about
from .rows import setting_key

KEYS = ("base", "groups", "halving", "published", "seeds", "tuned")
Flags = dict[str, Any]
T = TypeVar("T")
_LAST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration of the grid, which several seeds train."""

    name: str  # Group and flags, in words.
    config: TrainConfig  # Resolved; its seed has no meaning.
    # Whether all tuned flags are as the method, the preset and the base flags have
    # them.
    published: bool

    @functools.cached_property
    def key(self) -> str:
        """A key that is equal for equal settings, whatever their group."""
        return setting_key(self.config.to_json())

    @property
    def cost_per_step(self) -> float:
        """Multiplications of a step, up to a factor that all settings share."""
        return self.config.tokens_per_step * models.num_params(self.config.model)

    def at(self, steps: int) -> Self:
        """Return the setting with another number of steps."""
        with about(f"{self.name}, at a rung"):
            config = self.config.replace(steps=steps)
        return dataclasses.replace(self, config=config)


@dataclasses.dataclass(frozen=True)
class Halving:
    """How the best of the settings are found."""

    rungs: tuple[int, ...]  # Inner steps of the runs of each rung, increasing.
    tuning_seeds: tuple[int, ...]  # Of the rungs.
    final_seeds: tuple[int, ...]  # Of the winners; others than the tuning seeds.
    # Share of the settings under one key that goes on to the next rung.
    keep: float = 0.5
    # Flags that settings must have in common to compete. By default all that are not
    # tuned, so that each cell of the table has a winner.
    by: tuple[str, ...] = ()
    winners: int = 1  # Settings of each key that get the final seeds.

    def __post_init__(self):
        rungs = _listed(self.rungs)
        if not _are_whole(rungs) or rungs != sorted(set(rungs)) or rungs[0] < 1:
            raise ValueError(
                f"rungs={rungs!r} must be increasing whole numbers of steps, of at "
                "least 1, such as [100, 400]"
            )
        if type(self.keep) is not float or not 0 < self.keep < 1:
            raise ValueError(f"keep={self.keep!r} must be in (0, 1)")
        if type(self.winners) is not int or self.winners < 1:
            raise ValueError(
                f"winners={self.winners!r} must be a whole number of at least 1"
            )

        for name in ("tuning_seeds", "final_seeds"):
            check_seeds(name, getattr(self, name))
        if both := sorted({*self.tuning_seeds} & {*self.final_seeds}):
            raise ValueError(
                f"final_seeds={list(self.final_seeds)} must be others than "
                f"tuning_seeds, which have {both} too: a figure on a seed that chose "
                "it is too good"
            )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Read a table of a grid file."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        needed = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
        if odd := sorted((table.keys() - fields.keys()) | (needed - table.keys())):
            raise ValueError(
                f"[halving] has missing or unknown keys {odd}; it has {list(fields)}"
            )
        lists = {n: tuple(v) for n, v in table.items() if isinstance(v, list)}
        return cls(**{**table, **lists})

    def survivors(self, num: int, rung: int) -> int:
        """Return how many of `num` settings under one key remain after a rung.

        >>> halving = Halving((10, 20, 40), (8,), (9,))
        >>> [halving.survivors(n, i) for i, n in enumerate((9, 5, 3))]
        [5, 3, 1]
        """
        if rung == len(self.rungs) - 1:
            return min(num, self.winners)
        return min(num, max(self.winners, math.ceil(self.keep * num)))

    def counts(self, num: int) -> list[int]:
        """Return how many settings under one key each rung trains.

        No setting is trained if there is no choice.

        >>> Halving((10, 20, 40), (8,), (9,)).counts(9)
        [9, 5, 3]
        >>> Halving((10, 20, 40), (8,), (9,)).counts(1)
        [0, 0, 0]
        """
        counts = []
        for rung in range(len(self.rungs)):
            counts.append(num if num > self.winners else 0)
            num = self.survivors(num, rung)
        return counts


def check_seeds(name: str, seeds: Any) -> tuple[int, ...]:
    """Return the seeds, if they are different whole numbers."""
    seeds = _listed(seeds)
    ok = _are_whole(seeds) and len(set(seeds)) == len(seeds)
    if not ok or not 0 <= min(seeds) <= max(seeds) <= _LAST_SEED:
        raise ValueError(
            f"{name}={seeds!r} must be a list of whole numbers from 0 to {_LAST_SEED}, "
            "each once, such as [0, 1]"
        )
    return tuple(seeds)


def _listed(values: Any) -> Any:
    """Return a tuple as the list that a file has it as."""
    return list(values) if isinstance(values, tuple) else values


def _are_whole(values: Any) -> bool:
    is_list = isinstance(values, list) and len(values) > 0
    return is_list and all(type(value) is int for value in values)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The content of a grid file, after all checks."""

    # Distinct, in the order of the file; the published ones are among them.
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]  # Of the final figures.
    tuned: tuple[str, ...]  # Flags whose best values are searched.
    # How they are searched; None trains every setting with every seed.
    halving: Halving | None


def read(path: str | os.PathLike[str]) -> Grid:
    """Read a grid file and check every row of it."""
    try:
        table = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"grid={str(path)!r} is no TOML file: {error}") from error
    return from_table(table)


def from_table(table: Mapping[str, Any]) -> Grid:
    """Return the grid of a grid file's table; see `read`."""
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

    tuned = _names("tuned", table.get("tuned", ()))
    halving = None
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
    start = _base_config(table.get("base", {}))
    adds = table.get("published", True)
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
    """Return the preset with the base flags, for those methods that take them."""
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
    """Yield the settings of a group; with `adds` also their published settings."""
    if not isinstance(axes, dict):
        raise ValueError(f"groups.{group}={axes!r} must be a table of flags")

    yielded: set[str] = set()
    for number, flags in enumerate(_product(group, axes), 1):
        published = {n: v for n, v in flags.items() if n not in tuned}
        both = [published, flags] if adds and published != flags else [flags]
        names = [f"{group}: " + " ".join(f"{n}={x[n]}" for n in x) for x in both]
        with about(f"groups.{group}, row {number} ({names[-1]})"):
            settings = [
                Setting(name, _config(start, x), x == published)
                for name, x in zip(names, both, strict=True)
            ]

        for setting in settings:
            if setting.key not in yielded or setting.published:
                yielded.add(setting.key)
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
    is_path = LEAVES[name].type is pathlib.Path
    kind = str if is_path else LEAVES[name].type
    if kind == COUNT_OR_WORD:
        is_right = type(value) in (int, str)
    else:
        is_right = type(value) is kind or (kind is float and type(value) is int)

    if not is_right:
        wanted = "a whole number or a word" if kind == COUNT_OR_WORD else kind.__name__
        raise ValueError(f"{name}={value!r} must be of type {wanted}")
    if is_path:
        return without_tilde(str(value))
    return float(value) if kind is float else value


def best(
    halving: Halving,
    rung: int,
    settings: Sequence[T],
    keys: Sequence[Hashable],
    losses: Sequence[Sequence[float | None]],
) -> list[T]:
    """Return the settings that go on, in their original order."""
    means = []
    for of_seeds in losses:
        finite = [math.inf if loss is None else loss for loss in of_seeds]
        means.append(statistics.fmean(finite))

    kept: set[int] = set()
    for key in dict.fromkeys(keys):
        rivals = [i for i, k in enumerate(keys) if k == key]
        rivals.sort(key=lambda i: (means[i], i))
        kept.update(rivals[: halving.survivors(len(rivals), rung)])
    return [setting for i, setting in enumerate(settings) if i in kept]
