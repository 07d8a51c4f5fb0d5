"""What is the same for every rule of the ablation: sizes, seeds and grids."""

from __future__ import annotations

import dataclasses

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.transforms.numerics import check_rate

from . import rules


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and grids of the ablation, the same for every rule.

    Attributes:
      model: preset of `cocodc_jax.models`.
      steps: inner steps of each run.
      regions: M.
      sync_interval: H.
      num_fragments: K.
      batch_per_region: sequences per region and step.
      sequence_length: tokens per sequence.
      warmup_steps: of the inner learning rate, constant afterwards.
      eval_every: steps between evaluations.
      eval_sequences: validation sequences, the same ones at all times.
      test_seeds: reported.
      tuning_seeds: for the choice of outer learning rate and strength.
      inner_lrs: peak inner learning rates, each tried with all of the following.
      outer_lrs: tried for a rule without strength.
      outer_lrs_with_strength: tried with each strength of a rule that has one.
      trials: runs that are trained side by side.
    """

    model: str = "smoke"
    steps: int = 400
    regions: int = 4
    sync_interval: int = 20
    num_fragments: int = 4
    batch_per_region: int = 4
    sequence_length: int = 32
    warmup_steps: int = 40
    eval_every: int = 20
    eval_sequences: int = 128
    test_seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    tuning_seeds: tuple[int, ...] = (100,)
    inner_lrs: tuple[float, ...] = (rules.INNER_LR,)
    outer_lrs: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.4)
    outer_lrs_with_strength: tuple[float, ...] = (0.4, 0.7, 1.1)
    trials: int = 6

    def __post_init__(self):
        """Check what nothing else does."""
        for name in ("steps", "trials", "regions", "eval_every", "eval_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        rates = ("inner_lrs", "outer_lrs", "outer_lrs_with_strength")
        for name in ("test_seeds", "tuning_seeds", *rates):
            if not getattr(self, name):
                raise ValueError(f"{name}=() is empty; name at least one")
        for name in ("test_seeds", "tuning_seeds"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} names one twice")
        for name in rates:
            for rate in getattr(self, name):
                check_rate(name, rate)
        shared = set(self.test_seeds) & set(self.tuning_seeds)
        if shared:
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} holds test seeds {sorted(shared)}; "
                "what was tuned on cannot be reported on"
            )
        if self.steps % self.eval_every:
            raise ValueError(
                f"eval_every={self.eval_every} must divide steps={self.steps}, so that "
                "the end is evaluated"
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be at least 0 and less than "
                f"steps={self.steps}"
            )
        staggered(self.sync_interval, self.num_fragments)
        if self.model not in models.PRESETS:
            raise ValueError(
                f"model={self.model!r} is unknown; use one of {list(models.PRESETS)}"
            )
        if self.num_fragments > self.transformer.num_layers:
            raise ValueError(
                f"num_fragments={self.num_fragments} must be at most the "
                f"{self.transformer.num_layers} blocks of model={self.model}"
            )
        self.data(0)  # Which checks its own.

    @property
    def transformer(self) -> models.TransformerConfig:
        """The model."""
        return models.get(self.model)

    @property
    def optimizer(self) -> OptimizerConfig:
        """Inner AdamW; a constant rate, so that a step means the same at all times.

        Trials with another of `inner_lrs` scale its updates (`simulate`).
        """
        return OptimizerConfig(
            inner_lr=rules.INNER_LR,
            warmup_steps=self.warmup_steps,
            beta2=0.99,
            final_lr_fraction=1.0,
        )

    def data(self, seed: int) -> DataConfig:
        """Return the text of one seed."""
        return DataConfig(
            sequence_length=self.sequence_length,
            batch_per_region=self.batch_per_region,
            seed=seed,
        )
