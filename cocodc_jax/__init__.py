"""Cross-region training in JAX: one model, several data centres, a slow network.

- `cocodc_jax.transforms`: delay compensation, compressors and outer optimizers as
  Optax transformations, for any JAX code.
- `cocodc_jax.methods`: CoCoDC, DiLoCo, data parallel and twenty more, as values.
- `cocodc_jax.RegionProgram` and `cocodc_jax.run_steps`: a method around your own loss.
- `cocodc_jax.run`: complete runs, from a configuration to files, as the programs do.

All but the last need JAX and Optax alone. If another package is missing, the error
names the extra that brings it. Names and subpackages (`cocodc_jax.models`) are imported
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach, modules_of, typed_imports

if TYPE_CHECKING:
    from cocodc_jax import methods
    from cocodc_jax._version import __version__
    from cocodc_jax.core.optimizer import (
        sync_axes,
        sync_metrics,
        sync_shardings,
        synchronized,
    )
    from cocodc_jax.exchange.transport import Transport
    from cocodc_jax.program.region_program import RegionProgram
    from cocodc_jax.sharding.mesh import make_mesh, use_cpu_devices
    from cocodc_jax.sync.cutting import cut
    from cocodc_jax.sync.model_state import ModelState
    from cocodc_jax.sync.needs import UserInputs
    from cocodc_jax.sync.regions import Regions
    from cocodc_jax.train.checkpoint import Checkpoints
    from cocodc_jax.train.run_steps import run as run_steps
    from cocodc_jax.transforms.compensation import adam_second_moment

__all__ = [
    "Checkpoints",
    "ModelState",
    "RegionProgram",
    "Regions",
    "UserInputs",
    "Transport",
    "__version__",
    "adam_second_moment",
    "cut",
    "make_mesh",
    "methods",
    "run_steps",
    "sync_axes",
    "sync_metrics",
    "sync_shardings",
    "synchronized",
    "use_cpu_devices",
]

__getattr__, __dir__ = attach(
    __name__, typed_imports(__name__) | modules_of(__path__, packages=True)
)
