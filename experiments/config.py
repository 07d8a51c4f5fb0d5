"""A run's configuration: frozen dataclasses, one flag a leaf, JSON and back.

Leaf names are unique over the sections, because every leaf is a flag. The meaning of
each is in its class's docstring, which is also the flag's help text.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from typing import Any

from cocodc_jax.data import DataConfig
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.runtime.trainer import Cadence
from cocodc_jax.sync.regions import Regions
from experiments.method_config import MethodConfig
from experiments.optimizer_config import OptimizerConfig

# Fields that other sections decide: the tokenizer and the run's own seed.
DERIVED = {"model": ("vocab_size",), "data": ("seed",)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long and where.

    Attributes:
      steps: inner steps of the whole run.
      seed: of parameters, data order and dropout keys.
      regions: regions that train, M.
      step_times: time of one inner step of each region, in steps of the fastest, as
        1,1,2,4; empty is regions of one speed.
      batch_sizes: sequences per step of each region, as 8,8,4,4, each a divisor of
        batch_per_region; empty is batch_per_region for all.
      devices: devices to use for the regions; 0 takes all that help.
      data_axis: devices along each region's data axis (batch and FSDP).
      model_axis: devices along each region's model axis (tensor parallelism).
      exchange: program averages messages in a program of the inner mesh, outer on the
        outer mesh beside the inner steps; auto is outer with several processes.
      all_reduce: how messages cross between processes: direct, every region with every
        other at once, or ring, the backend's own.
      outer_lanes: outer meshes side by side, so many fragments can be on their way at
        once, each on connections of its own; at most num_fragments.
      stages: devices along each region's stage axis (a pipeline's stages).
      microbatches: parts that a pipeline cuts each region's batch into.
      random_routing: whether a pipeline hands activations on to the next stage of a
        random region (NoLoCo).
      step_seconds: least seconds of an inner step; above 0 the CPU plays an accelerator
        of that speed, with the host's cores free meanwhile.
      log_every: steps that one training record averages over.
      eval_every: steps between evaluations; 0 is at the end only.
      eval_batches: validation batches in one evaluation, a multiple of `regions`.
      checkpoint_every: steps between checkpoints; 0 is at the end only.
      keep_checkpoints: how many of the newest checkpoints to keep.
    """

    steps: int = 480
    seed: int = 0
    regions: int = 4
    step_times: str = ""
    batch_sizes: str = ""
    devices: int = 0
    data_axis: int = 1
    model_axis: int = 1
    exchange: str = "auto"
    all_reduce: str = "direct"
    outer_lanes: int = 1
    stages: int = 1
    microbatches: int = 1
    random_routing: bool = False
    step_seconds: float = 0.0
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 32
    checkpoint_every: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self):
        """Checks the numbers.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        for name in (
            "steps",
            "regions",
            "data_axis",
            "model_axis",
            "outer_lanes",
            "stages",
            "microbatches",
            "eval_batches",
            "keep_checkpoints",
        ):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("devices", self.devices, 0)
        _check_at_least("seed", self.seed, 0)
        if self.eval_batches % self.regions:
            raise ValueError(
                f"eval_batches={self.eval_batches} must be a multiple of regions="
                f"{self.regions}, which share them out"
            )
        self._check_pace()
        self.cadence  # noqa: B018  (its own checks)
        self.unequal(1)

    def _check_pace(self) -> None:
        if not 0 <= self.step_seconds < math.inf:
            raise ValueError(
                f"step_seconds={self.step_seconds} must be a time, or 0 for as fast as "
                "it goes"
            )
        if self.step_seconds and self.devices_per_region > 1:
            raise ValueError(
                f"step_seconds={self.step_seconds} goes with one device a region; "
                "leave out stages, data_axis and model_axis"
            )

    def unequal(self, batch_per_region: int) -> Regions:
        """The regions as a value.

        Args:
          batch_per_region: sequences per step of a region that `batch_sizes` does not
            tell of.

        Raises:
          ValueError: naming the flag, its value and what would be right.
        """
        times = _numbers("step_times", self.step_times, self.regions, float)
        sizes = _numbers("batch_sizes", self.batch_sizes, self.regions, int)
        return Regions(
            times or (1.0,) * self.regions, sizes or (batch_per_region,) * self.regions
        )

    @property
    def devices_per_region(self) -> int:
        """Devices that share one region."""
        return self.stages * self.data_axis * self.model_axis

    @property
    def is_pipelined(self) -> bool:
        """Whether a region's step is computed by a pipeline."""
        return self.stages > 1 or self.microbatches > 1 or self.random_routing

    @property
    def cadence(self) -> Cadence:
        """The loop's part of the run."""
        return Cadence(self.log_every, self.eval_every, self.checkpoint_every)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that fixes a run's numbers.

    Attributes:
      preset: the preset that it started from.
      run: how long and where.
      model: the transformer; its vocabulary follows from the tokenizer.
      data: corpus, tokenizer and how regions share it.
      method: which method and its numbers.
      optimizer: the inner optimizer.
    """

    preset: str
    run: RunConfig
    model: TransformerConfig
    data: DataConfig
    method: MethodConfig
    optimizer: OptimizerConfig

    def __post_init__(self):
        """Checks what sections say of one another.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        if self.optimizer.warmup_steps >= self.run.steps:
            raise ValueError(
                f"warmup_steps={self.optimizer.warmup_steps} must be less than steps="
                f"{self.run.steps}"
            )
        for size in self.run.unequal(self.data.batch_per_region).batch_sizes:
            if self.data.batch_per_region % size:
                raise ValueError(
                    f"batch_sizes={self.run.batch_sizes} must be divisors of "
                    f"batch_per_region={self.data.batch_per_region}"
                )
        if self.data.batch_per_region % self.run.data_axis:
            raise ValueError(
                f"batch_per_region={self.data.batch_per_region} must be a multiple of "
                f"data_axis={self.run.data_axis}, which shares it out"
            )

    def replace(self, **leaves: Any) -> TrainConfig:
        """A copy with leaves replaced by name, wherever they belong.

        Raises:
          ValueError: for a name that no section has, or a value that one refuses.
        """
        sections: dict[str, dict[str, Any]] = {}
        for name, value in leaves.items():
            if name not in LEAVES:
                raise ValueError(f"{name!r} is no field of a run's configuration")
            sections.setdefault(LEAVES[name].section, {})[name] = value
        if "seed" in leaves:
            sections.setdefault("data", {})["seed"] = leaves["seed"]
        return dataclasses.replace(
            self,
            **{
                section: dataclasses.replace(getattr(self, section), **values)
                for section, values in sections.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Plain nested values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainConfig:
        """Inverse of `to_json`; a field that was not there yet takes its default.

        Raises:
          ValueError: for an unknown key, or one without a default that is missing.
        """
        sections = {
            name: _from_dict(name, section, value.get(name))
            for name, section in SECTIONS.items()
        }
        unknown = set(value) - set(SECTIONS) - {"preset"}
        if unknown or "preset" not in value:
            raise ValueError(
                f"configuration has keys {sorted(value)}, "
                f"expected {['preset', *SECTIONS]}"
            )
        return cls(preset=value["preset"], **sections)

    def differences(self, other: TrainConfig) -> list[str]:
        """Where two configurations differ, as `name: mine, not theirs`."""
        found = []
        for section in SECTIONS:
            mine, theirs = getattr(self, section), getattr(other, section)
            for field in dataclasses.fields(mine):
                a, b = getattr(mine, field.name), getattr(theirs, field.name)
                if a != b:
                    found.append(f"{field.name}: {a}, not {b}")
        return found


SECTIONS: dict[str, Any] = {
    "run": RunConfig,
    "method": MethodConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "model": TransformerConfig,
}


# A number, or a word such as "auto".
COUNT_OR_WORD = int | str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One configurable number or name.

    Attributes:
      section: the section it belongs to.
      type: int, float, bool, str or `COUNT_OR_WORD`.
      help: what it means, with its unit.
    """

    section: str
    type: Any
    help: str


def _leaves() -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for section, cls in SECTIONS.items():
        notes = attribute_notes(cls)
        for field in dataclasses.fields(cls):
            if field.name in DERIVED.get(section, ()):
                continue
            if field.name in leaves:
                raise ValueError(f"two sections have a field {field.name!r}")
            leaves[field.name] = Leaf(section, _leaf_type(field), notes[field.name])
    return leaves


def attribute_notes(cls: type) -> dict[str, str]:
    """Reads the "Attributes" of a Google-style docstring: one source for the help."""
    text = inspect.cleandoc(cls.__doc__ or "").split("Attributes:\n", 1)[1]
    notes: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("    ") or not line.strip():
            notes[name].append(line.strip())
        else:
            name, _, note = line.strip().partition(": ")
            notes[name] = [note]
    return {name: " ".join(lines).strip() for name, lines in notes.items()}


def _leaf_type(field: dataclasses.Field) -> Any:
    text = str(field.type).removesuffix(" | None")
    plain = {"int": int, "float": float, "bool": bool, "int | str": COUNT_OR_WORD}
    if isinstance(field.type, type):
        return field.type
    return plain.get(text, str)


LEAVES = _leaves()


def _from_dict(name: str, cls: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"section {name!r} is {value!r}; it must be a table")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    needed = {n for n, field in fields.items() if field.default is dataclasses.MISSING}
    if odd := sorted((set(value) - set(fields)) | (needed - set(value))):
        raise ValueError(f"section {name!r} has missing or unknown fields: {odd}")
    return cls(**value)


def _numbers(name: str, text: str, count: int, kind: Callable) -> tuple:
    """Reads "1,1,2,4"; empty is ()."""
    if not text:
        return ()
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != count:
        raise ValueError(
            f"{name}={text!r} must be {count} numbers separated by commas, one for "
            "each region"
        )
    return values


def _check_at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def dumps(value: Any) -> str:
    """JSON text as all files of a run are written."""
    return json.dumps(value, indent=2) + "\n"
