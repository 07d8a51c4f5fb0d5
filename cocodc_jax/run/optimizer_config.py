"""The inner optimizer of a run, and its learning rate."""

from __future__ import annotations

import dataclasses

import optax

from cocodc_jax.methods import Method
from cocodc_jax.transforms.muon import muon

OPTIMIZERS = ("adamw", "muon", "sgd")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer: clip, AdamW (or another), warm-up and cosine.

    Attributes:
      inner_optimizer: adamw, muon or sgd (no moments and no clip, for directions that
        a method has made already); empty is the method's own.
      inner_lr: peak learning rate of the inner optimizer.
      sign_lr_fraction: learning rate of methods that step by a sign, as a fraction of
        inner_lr.
      weight_decay: decoupled weight decay of the inner optimizer.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      grad_clip: largest global norm of a gradient; 0 does not clip.
      warmup_steps: inner steps of linear warm-up from 0.
      final_lr_fraction: learning rate at the last step as a fraction of inner_lr.
    """

    inner_optimizer: str = ""
    inner_lr: float = 4e-4
    sign_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    grad_clip: float = 1.0
    warmup_steps: int = 1000
    final_lr_fraction: float = 0.1

    def __post_init__(self):
        """Check the numbers.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        if self.inner_optimizer not in ("", *OPTIMIZERS):
            raise ValueError(
                f"inner_optimizer={self.inner_optimizer!r} is unknown; use one of "
                f"{OPTIMIZERS}"
            )
        for name in ("inner_lr", "sign_lr_fraction"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("weight_decay", "grad_clip", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(
                f"final_lr_fraction={self.final_lr_fraction} must be in [0, 1]"
            )

    def learning_rate(self, steps: int, method: Method | None = None) -> optax.Schedule:
        """Linear warm-up, then cosine down to `final_lr_fraction` at `steps`."""
        peak = self.inner_lr
        if method is not None and method.inner.steps_by_sign:
            peak *= self.sign_lr_fraction
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=peak,
            warmup_steps=self.warmup_steps,
            decay_steps=steps,
            end_value=peak * self.final_lr_fraction,
        )

    def build(
        self, steps: int, method: Method | None = None
    ) -> optax.GradientTransformation:
        """Return the optimizer of a run of so many steps of `method`, None for any."""
        rate = self.learning_rate(steps, method)
        name = self.inner_optimizer or (method.inner.optimizer if method else "adamw")
        if name == "sgd":
            return optax.chain(
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        if name == "muon":
            steps_by = muon(rate, self.weight_decay, b1=self.beta1, b2=self.beta2)
        else:
            steps_by = optax.adamw(
                rate, self.beta1, self.beta2, weight_decay=self.weight_decay
            )
        clip = optax.clip_by_global_norm(self.grad_clip)
        return optax.chain(clip if self.grad_clip else optax.identity(), steps_by)
