"""Training loops around a program: steps, records, evaluation, checkpoints."""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.train.checkpoint import CheckpointError as CheckpointError
    from cocodc_jax.train.checkpoint import Checkpoints as Checkpoints
    from cocodc_jax.train.evaluate import make_evaluate as make_evaluate
    from cocodc_jax.train.finite import NonFiniteLossError as NonFiniteLossError
    from cocodc_jax.train.hooks import Cadence as Cadence
    from cocodc_jax.train.hooks import Hooks as Hooks
    from cocodc_jax.train.hooks import Result as Result
    from cocodc_jax.train.loop import train as train
    from cocodc_jax.train.run_steps import run_steps as run_steps

__getattr__, __dir__ = attach(__name__)
