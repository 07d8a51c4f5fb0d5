"""Transformations for stale, rare or compressed updates; they need only jax and optax.

- `delay_compensation`: correct a gradient for its delay. `curvature` has the curvatures
  that it takes, `secant` chooses their weight.
- `outer`, `primal_average`: outer optimizers that Optax lacks.
- `compression`: pairs of encode and decode with true sizes, error feedback, `parse`.
- `decoupled`, `lion`: combine the messages of all regions to one update (DeMo, Lion).
- `muon`, `mt_adam`: inner optimizers, for a transformer's tree and with a long memory.

The sign is the same everywhere: updates are gradient-like, old minus new, and descent
is minus. All factories raise a ValueError that names an argument of the wrong type or
out of range. Modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.transforms import compression as compression
    from cocodc_jax.transforms import curvature as curvature
    from cocodc_jax.transforms import decoupled as decoupled
    from cocodc_jax.transforms import error_feedback as error_feedback
    from cocodc_jax.transforms import heloco as heloco
    from cocodc_jax.transforms import lion as lion
    from cocodc_jax.transforms import low_rank as low_rank
    from cocodc_jax.transforms import mt_adam as mt_adam
    from cocodc_jax.transforms import muon as muon
    from cocodc_jax.transforms import outer as outer
    from cocodc_jax.transforms import power_sgd as power_sgd
    from cocodc_jax.transforms import primal_average as primal_average
    from cocodc_jax.transforms import quantize as quantize
    from cocodc_jax.transforms import secant as secant
    from cocodc_jax.transforms import sparsify as sparsify
    from cocodc_jax.transforms import statistical as statistical
    from cocodc_jax.transforms import threshold as threshold
    from cocodc_jax.transforms.compensation import (
        DelayCompensationState as DelayCompensationState,
    )
    from cocodc_jax.transforms.compensation import (
        adam_second_moment as adam_second_moment,
    )
    from cocodc_jax.transforms.compensation import (
        delay_compensation as delay_compensation,
    )
    from cocodc_jax.transforms.compressor import Compressor as Compressor
    from cocodc_jax.transforms.compressor import message_bytes as message_bytes
    from cocodc_jax.transforms.curvature import Curvature as Curvature

__getattr__, __dir__ = attach(__name__)
