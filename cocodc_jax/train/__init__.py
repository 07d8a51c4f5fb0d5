"""Training loops around a program: steps, records, evaluation, checkpoints.

Names are imported lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.train.checkpoint import CheckpointError, Checkpoints
    from cocodc_jax.train.evaluate import make_evaluate
    from cocodc_jax.train.finite import NonFiniteLossError
    from cocodc_jax.train.hooks import Cadence, Hooks, Result
    from cocodc_jax.train.loop import train
    from cocodc_jax.train.run_steps import run as run_steps

__all__ = [
    "Cadence",
    "CheckpointError",
    "Checkpoints",
    "Hooks",
    "NonFiniteLossError",
    "Result",
    "make_evaluate",
    "run_steps",
    "train",
]

__getattr__, __dir__ = attach(__name__)
