"""A run's configuration: frozen dataclasses with one flag per leaf, and JSON."""

import dataclasses
import json
from typing import Any, Self

from cocodc_jax.data import DataConfig
from cocodc_jax.fields import Kind, Leaf, leaves_of
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.run.config.method_config import ARGUMENTS, WHERE_TAKEN, MethodConfig
from cocodc_jax.run.config.optimizer_config import OptimizerConfig
from cocodc_jax.run.config.run_config import RunConfig

# Fields without a flag: those that other sections set (the tokenizer, the run's seed),
# and those that hold the arguments of methods.
DERIVED = {
    "model": ("vocab_size",),
    "data": ("seed",),
    "method": ("arguments", WHERE_TAKEN),
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a run's numbers.

    Attributes:
      preset: the preset that it started from.
      run: how long and where.
      model: the transformer; the tokenizer sets its vocabulary.
      data: corpus, tokenizer and how regions share it.
      method: the method and its arguments.
      optimizer: the inner optimizer.
    """

    preset: str
    run: RunConfig
    model: TransformerConfig
    data: DataConfig
    method: MethodConfig
    optimizer: OptimizerConfig

    def __post_init__(self):
        if self.optimizer.warmup_steps >= self.run.steps:
            raise ValueError(
                f"warmup_steps={self.optimizer.warmup_steps} must be less than steps="
                f"{self.run.steps}"
            )
        if self.model.lora_rank and not self.run.init_from:
            raise ValueError(
                f"lora_rank={self.model.lora_rank} adapts a model that is there "
                "already; name its folder: init_from"
            )
        self._check_batch()

    def _check_batch(self) -> None:
        """Raise ValueError if the devices cannot divide the batch."""
        run = self.run
        batch = self.data.batch_per_region
        if any(batch % size for size in run.unequal(batch).batch_sizes):
            raise ValueError(
                f"batch_sizes={run.batch_sizes} must be divisors of batch_per_region="
                f"{batch}"
            )

        experts = f" * expert_axis={run.expert_axis}" if run.expert_axis > 1 else ""
        if batch % run.devices_per_batch:
            raise ValueError(
                f"batch_per_region={batch} must be a multiple of data_axis="
                f"{run.data_axis}{experts}, which shares it out"
            )
        if self.data.sequence_length % run.sequence_axis:
            raise ValueError(
                f"sequence_length={self.data.sequence_length} must be a multiple of "
                f"sequence_axis={run.sequence_axis}, which shares it out"
            )

        of_device = batch // run.devices_per_batch
        if of_device % run.accumulate_steps:
            divisors = [n for n in range(1, of_device + 1) if of_device % n == 0]
            raise ValueError(
                f"accumulate_steps={run.accumulate_steps} does not divide the "
                f"{of_device} sequences of a device (batch_per_region={batch} / "
                f"data_axis={run.data_axis}{experts}); use one of {divisors}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of all regions, if their batch sizes are equal."""
        of_region = self.data.batch_per_region * self.data.sequence_length
        return self.run.regions * of_region

    def replace(self, **leaves: Any) -> Self:
        """Return a copy with leaves replaced by name, in any section."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in leaves.items():
            if name not in LEAVES:
                raise ValueError(f"{name!r} is not a field of a run's configuration")
            sections.setdefault(LEAVES[name].section, {})[name] = value
        if "seed" in leaves:
            sections.setdefault("data", {})["seed"] = leaves["seed"]

        changed: dict[str, Any] = {}
        if "method" in sections:
            changed["method"] = self.method.replace(**sections.pop("method"))
        for section, values in sections.items():
            changed[section] = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **changed)

    def where(self, **arguments: Any) -> Self:
        """Return a copy with arguments for those methods that take them."""
        return dataclasses.replace(self, method=self.method.where(**arguments))

    def resolve(self) -> Self:
        """Return a copy with the method's defaults filled in, as recorded with runs."""
        beta2 = self.optimizer.second_moment_decay(self.method.build())
        return dataclasses.replace(
            self,
            method=self.method.resolve(),
            optimizer=dataclasses.replace(self.optimizer, beta2=beta2),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain nested values."""
        return dataclasses.asdict(self) | {"method": self.method.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Invert `to_json`; a field that is missing takes its default."""
        try:
            sections = {
                name: _from_dict(name, section, value.get(name))
                for name, section in SECTIONS.items()
            }
            wanted = ["preset", *SECTIONS]
            if value.keys() != set(wanted):
                raise ValueError(
                    f"configuration has keys {sorted(value)}, expected {wanted}"
                )
            return cls(preset=value["preset"], **sections)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"a value is of another type ({error})") from error

    def changes(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Return the values of both, by name, where two configurations differ."""
        mine = flat(self.to_json())
        theirs = flat(other.to_json())
        return {
            name: (mine.get(name), theirs.get(name))
            for name in mine | theirs
            if mine.get(name) != theirs.get(name)
        }

    def differences(self, other: Self) -> str:
        """Describe differences to `other`, as `name: mine, not theirs`."""
        pairs = self.changes(other).items()
        return "; ".join(f"{name}: {a}, not {b}" for name, (a, b) in pairs)


def kind_of(name: str) -> Kind:
    """Return the kind of a field; FREE for one without a flag, as the preset's name."""
    return LEAVES[name].kind if name in LEAVES else Kind.FREE


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of all sections of a configuration in plain values."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        fields |= value if isinstance(value, dict) else {name: value}
    return fields


SECTIONS: dict[str, Any] = {
    "run": RunConfig,
    "method": MethodConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "model": TransformerConfig,
}


def _leaves() -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for section, cls in SECTIONS.items():
        kind = Kind.MODEL if cls is TransformerConfig else Kind.COMPUTED
        of_section = leaves_of(section, cls, DERIVED.get(section, ()), kind)
        if cls is MethodConfig:
            of_section |= ARGUMENTS

        twice = sorted(leaves.keys() & of_section.keys())
        if twice:
            raise ValueError(f"two sections have a field {twice[0]!r}")
        leaves |= of_section
    return leaves


LEAVES = _leaves()


def _from_dict(name: str, cls: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"section {name!r} is {value!r}; it must be a table")
    if cls is MethodConfig:
        return MethodConfig.from_json(value)

    fields = dataclasses.fields(cls)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    wrong = sorted((value.keys() - names) | (needed - value.keys()))
    if wrong:
        raise ValueError(f"section {name!r} has missing or unknown fields: {wrong}")
    return cls(**value)


def dumps(value: Any) -> str:
    """Return JSON text in the format of a run's files."""
    return json.dumps(value, indent=2) + "\n"
