"""A run's configuration: frozen dataclasses, one flag a leaf, JSON and back.

Leaf names are unique over the sections, because every leaf is a flag. The meaning of
each is in its class's docstring, which is also the flag's help text.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import optax

import cocodc_jax as cc
from cocodc_jax.data import DataConfig
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.runtime.trainer import Cadence
from cocodc_jax.sync.methods import Method, defaults

# Fields that other sections decide: the tokenizer and the run's own seed.
DERIVED = {"model": ("vocab_size",), "data": ("seed",)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long and where.

    Attributes:
      steps: inner steps of the whole run.
      seed: of parameters, data order and dropout keys.
      regions: regions that train, M.
      devices: devices to use for the regions; 0 takes all that help.
      data_axis: devices along each region's data axis (batch and FSDP).
      model_axis: devices along each region's model axis (tensor parallelism).
      log_every: steps that one training record averages over.
      eval_every: steps between evaluations; 0 is at the end only.
      eval_batches: validation batches in one evaluation, a multiple of `regions`.
      checkpoint_every: steps between checkpoints; 0 is at the end only.
      keep_checkpoints: how many of the newest checkpoints to keep.
    """

    steps: int = 480
    seed: int = 0
    regions: int = 4
    devices: int = 0
    data_axis: int = 1
    model_axis: int = 1
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
        self.cadence  # noqa: B018  (its own checks)

    @property
    def cadence(self) -> Cadence:
        """The loop's part of the run."""
        return Cadence(self.log_every, self.eval_every, self.checkpoint_every)


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """Which method, and its numbers; None is the method's own default.

    Attributes:
      method: data_parallel, diloco, streaming_diloco, cocodc or cocodc_paper.
      sync_interval: H, inner steps within which every fragment is synchronised.
      num_fragments: K, fragments the model is cut into.
      fragment_strategy: strided, sequential or balanced.
      delay_steps: tau, inner steps from a sync's start to its application.
      syncs_per_interval: N, syncs in one interval of adaptive transmission.
      transmission_score: pseudo_gradient, aged or drift.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: momentum of the outer optimizer.
      mixing_alpha: weight on the local fragment when a mean arrives.
      curvature: Hessian-vector approximation of the delay compensation.
      curvature_units: units the curvature is taken in.
      compensation_strength: lambda, weight of the compensation's correction.
    """

    method: str = "cocodc"
    sync_interval: int | None = None
    num_fragments: int | None = None
    fragment_strategy: str | None = None
    delay_steps: int | None = None
    syncs_per_interval: int | None = None
    transmission_score: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    mixing_alpha: float | None = None
    curvature: str | None = None
    curvature_units: str | None = None
    compensation_strength: float | None = None

    def __post_init__(self):
        """Builds the method once, so that its own checks run.

        Raises:
          ValueError: for an unknown method or a number it refuses.
        """
        self.build()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that this method takes, defaults filled in, others left out."""
        given = dataclasses.asdict(self)
        return {
            name: default if given.get(name) is None else given[name]
            for name, default in defaults(self.method).items()
        }

    def resolve(self) -> MethodConfig:
        """The same with the method's defaults written out: what a run is known by."""
        return dataclasses.replace(self, **self.arguments)

    def build(self) -> Method:
        """The method as a value."""
        return cc.methods.get(self.method, **self.arguments)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer: clip, AdamW, warm-up and cosine.

    Attributes:
      inner_lr: peak learning rate of the inner AdamW.
      weight_decay: decoupled weight decay of the inner AdamW.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      grad_clip: largest global norm of a gradient; 0 does not clip.
      warmup_steps: inner steps of linear warm-up from 0.
      final_lr_fraction: learning rate at the last step as a fraction of inner_lr.
    """

    inner_lr: float = 4e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    grad_clip: float = 1.0
    warmup_steps: int = 1000
    final_lr_fraction: float = 0.1

    def __post_init__(self):
        """Checks the numbers.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        if self.inner_lr <= 0:
            raise ValueError(f"inner_lr={self.inner_lr} must be positive")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("weight_decay", "grad_clip", "warmup_steps"):
            _check_at_least(name, getattr(self, name), 0)
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(
                f"final_lr_fraction={self.final_lr_fraction} must be in [0, 1]"
            )

    def learning_rate(self, steps: int) -> optax.Schedule:
        """Linear warm-up, then cosine down to `final_lr_fraction` at `steps`."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.inner_lr,
            warmup_steps=self.warmup_steps,
            decay_steps=steps,
            end_value=self.inner_lr * self.final_lr_fraction,
        )

    def build(self, steps: int) -> optax.GradientTransformation:
        """The optimizer of a run of so many steps."""
        clip = optax.clip_by_global_norm(self.grad_clip)
        return optax.chain(
            clip if self.grad_clip else optax.identity(),
            optax.adamw(
                self.learning_rate(steps),
                self.beta1,
                self.beta2,
                weight_decay=self.weight_decay,
            ),
        )


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
        """Inverse of `to_json`.

        Raises:
          ValueError: for a missing or unknown key.
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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One configurable number or name.

    Attributes:
      section: the section it belongs to.
      type: int, float, bool or str.
      help: what it means, with its unit.
    """

    section: str
    type: type
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


def _leaf_type(field: dataclasses.Field) -> type:
    text = str(field.type).removesuffix(" | None")
    plain = {"int": int, "float": float, "bool": bool}
    if isinstance(field.type, type):
        return field.type
    return plain.get(text, str)


LEAVES = _leaves()


def _from_dict(name: str, cls: Any, value: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(value, dict) or set(value) != fields:
        odd = sorted(set(value or ()) ^ fields)
        raise ValueError(f"section {name!r} has missing or unknown fields: {odd}")
    return cls(**value)


def _check_at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def dumps(value: Any) -> str:
    """JSON text as all files of a run are written."""
    return json.dumps(value, indent=2) + "\n"
