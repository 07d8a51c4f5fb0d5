"""The inner optimizer of a run, and its learning rate schedule."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import optax

from cocodc_jax.fields import check_choices, check_least, one_of
from cocodc_jax.methods import Method
from cocodc_jax.transforms.mt_adam import mt_adam
from cocodc_jax.transforms.muon import B2, muon
from cocodc_jax.transforms.numerics import check_finite, check_positive

OPTIMIZERS = ("adamw", "mt_adam", "muon", "sgd")
_ADAM_B2 = 0.999
# Arguments of each optimizer besides its learning rate and weight decay.
_OF_ADAM = ("beta1", "beta2", "grad_clip")
_SLOW = ("slow_beta", "slow_weight", "fast_weight")
_GOES_BY = {"adamw": _OF_ADAM, "mt_adam": _OF_ADAM + _SLOW, "muon": _OF_ADAM, "sgd": ()}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The inner optimizer: clipping, AdamW (or another), warm-up and cosine decay.

    Muon steps by sqrt(out / in) times a polar factor, AdamW by about the learning rate
    in every number, so that their best learning rates differ; see `transforms.muon`.

    Attributes:
      inner_optimizer: adamw, mt_adam (AdamW with a second, slow momentum), muon or sgd
        (without moments and clipping, for methods that compute update directions);
        empty is the method's default.
      inner_lr: peak learning rate of the inner optimizer.
      sign_lr_fraction: learning rate of methods that step by a sign, as a fraction of
        inner_lr.
      weight_decay: decoupled weight decay of the inner optimizer.
      beta1: decay of the first moment.
      beta2: decay of the second moment; default 0.999, with Muon 0.99.
      slow_beta: decay of mt_adam's slow momentum; beta1 is that of the fast one.
      slow_weight: weight of the slow momentum in a step of mt_adam.
      fast_weight: weight of the fast momentum; the rest to 1 is the gradient's.
      grad_clip: maximum global norm of a gradient; 0 does not clip.
      warmup_steps: inner steps of linear warm-up from 0.
      final_lr_fraction: learning rate at the last step as a fraction of inner_lr.
    """

    inner_optimizer: str = one_of(OPTIMIZERS, "")
    inner_lr: float = 4e-4
    sign_lr_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float | None = None
    slow_beta: float = 0.999
    slow_weight: float = 0.2
    fast_weight: float = 0.7
    grad_clip: float = 1.0
    warmup_steps: int = 1000
    final_lr_fraction: float = 0.1

    def __post_init__(self):
        check_choices(self, inner_optimizer=("", *OPTIMIZERS))
        for name, value in dataclasses.asdict(self).items():
            check_finite(name, value)
        check_least(self, 0, "weight_decay", "grad_clip", "warmup_steps")
        for name in ("inner_lr", "sign_lr_fraction"):
            check_positive(name, getattr(self, name))
        for name in ("beta1", "beta2", "slow_beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be in [0, 1)")

        weights = (self.fast_weight, self.slow_weight)
        if min(weights) < 0 or sum(weights) > 1:
            raise ValueError(
                f"fast_weight={self.fast_weight} and slow_weight={self.slow_weight} "
                "must be at least 0 and add up to 1 at most"
            )
        if not 0 <= self.final_lr_fraction <= 1:
            raise ValueError(
                f"final_lr_fraction={self.final_lr_fraction} must be in [0, 1]"
            )

    @property
    def follows_length(self) -> bool:
        """Whether the learning rate depends on the number of steps of the run."""
        return self.final_lr_fraction != 1

    def learning_rate(self, steps: int, method: Method | None = None) -> optax.Schedule:
        """Return linear warm-up, then cosine down to `final_lr_fraction` at `steps`."""
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

    def name(self, method: Method | None = None) -> str:
        """Return the name of the optimizer for `method`, None for any method."""
        return self.inner_optimizer or (method.inner.optimizer if method else "adamw")

    def second_moment_decay(self, method: Method | None = None) -> float:
        """Return `beta2`, or the optimizer's default."""
        if self.beta2 is not None:
            return self.beta2
        return B2 if self.name(method) == "muon" else _ADAM_B2

    def build(
        self, steps: int, method: Method | None = None
    ) -> optax.GradientTransformation:
        """Return the optimizer for so many steps of `method`, None for any."""
        name = self.name(method)
        rate = self.learning_rate(steps, method)
        b2 = self.second_moment_decay(method)

        if name == "sgd":
            return optax.chain(
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        if name == "mt_adam":
            optimizer = mt_adam(
                rate,
                (self.beta1, self.slow_beta),
                (self.fast_weight, self.slow_weight),
                b2,
                weight_decay=self.weight_decay,
            )
        else:
            make = muon if name == "muon" else optax.adamw
            optimizer = make(rate, weight_decay=self.weight_decay, b1=self.beta1, b2=b2)

        clip = optax.identity()
        if self.grad_clip:
            clip = optax.clip_by_global_norm(self.grad_clip)
        return optax.chain(clip, optimizer)


def check_taken(
    arguments: Mapping[str, Any], optimizers: Iterable[str], steps_by_sign: bool
) -> None:
    """Refuse arguments that none of the optimizers uses, or none of the methods.

    Args:
      arguments: values by name.
      optimizers: names of the runs' inner optimizers.
      steps_by_sign: whether any of the methods steps by a sign.
    """
    optimizers = sorted(set(optimizers))
    if "sign_lr_fraction" in arguments and not steps_by_sign:
        raise ValueError(
            f"sign_lr_fraction={arguments['sign_lr_fraction']} has no meaning for "
            "methods that do not step by a sign; leave it out"
        )

    taken = {name for optimizer in optimizers for name in _GOES_BY[optimizer]}
    for name in (*_OF_ADAM, *_SLOW):
        if name in arguments and name not in taken:
            raise ValueError(
                f"{name}={arguments[name]} has no meaning for the inner optimizer "
                f"{' or '.join(optimizers)}; leave it out"
            )
