"""Transformations for stale, rare or compressed updates; they need jax and optax only.

- `delay_compensation`: correct a gradient for its delay. `curvature` has the curvatures
  that it takes, `secant` chooses their weight, `dc_asgd` has the recipes for
  asynchronous SGD.
- `mix`: a merge with a weight for each parameter.
- `outer`: outer optimizers that Optax lacks.
- `compression`: pairs of encode and decode with true sizes, error feedback, `parse`.
- `decoupled`, `lion`: combine the messages of all regions to one update (DeMo, Lion).
- `muon`, `mt_adam`: inner optimizers, for a transformer's tree and with a long memory.

The sign is the same everywhere: updates are gradient-like, old minus new, and descent
is minus. Whatever is made here refuses an argument that is out of range, or of another
kind, by a ValueError that names it. Modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.transforms import (
        compression,
        curvature,
        dc_asgd,
        decoupled,
        error_feedback,
        heloco,
        lion,
        low_rank,
        mix,
        mt_adam,
        muon,
        outer,
        power_sgd,
        quantize,
        secant,
        snoo,
        sparsify,
        statistical,
        threshold,
    )
    from cocodc_jax.transforms.compensation import (
        DelayCompensationState,
        adam_second_moment,
        delay_compensation,
    )
    from cocodc_jax.transforms.compressor import Compressor, message_bytes
    from cocodc_jax.transforms.curvature import Curvature

__all__ = [
    "Compressor",
    "Curvature",
    "DelayCompensationState",
    "adam_second_moment",
    "compression",
    "curvature",
    "dc_asgd",
    "decoupled",
    "delay_compensation",
    "error_feedback",
    "heloco",
    "lion",
    "low_rank",
    "message_bytes",
    "mix",
    "mt_adam",
    "muon",
    "outer",
    "power_sgd",
    "quantize",
    "secant",
    "snoo",
    "sparsify",
    "statistical",
    "threshold",
]

__getattr__, __dir__ = attach(__name__)
