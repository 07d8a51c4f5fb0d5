"""Cross-region training in JAX: one model, several data centres, a slow network.

- `cocodc_jax.transforms`: delay compensation, compressors and outer optimizers as
  Optax transformations, for any JAX code.
- `cocodc_jax.methods`: CoCoDC, DiLoCo, data parallel and twenty-six more, as values.
- `cocodc_jax.RegionProgram` and `cocodc_jax.run_steps`: a method around your own loss.
- `cocodc_jax.RegionSync`: one line after the step of any trainer.
- `cocodc_jax.run`: complete runs, from a configuration to files, as in the programs.

All but the last need JAX and Optax alone. If another package is missing, the error
names the extra that brings it. Names and subpackages (`cocodc_jax.models`) are imported
when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach, modules_of

if TYPE_CHECKING:
    from cocodc_jax import methods as methods
    from cocodc_jax._version import __version__ as __version__
    from cocodc_jax.core.optimizer import sync_axes as sync_axes
    from cocodc_jax.core.optimizer import sync_metrics as sync_metrics
    from cocodc_jax.core.optimizer import sync_shardings as sync_shardings
    from cocodc_jax.core.optimizer import synchronized as synchronized
    from cocodc_jax.core.stacked import mean_of_regions as mean_of_regions
    from cocodc_jax.core.stacked import stacked as stacked
    from cocodc_jax.elastic.place import Place as Place
    from cocodc_jax.elastic.place import Timing as Timing
    from cocodc_jax.engine.mesh import make_mesh as make_mesh
    from cocodc_jax.engine.mesh import use_cpu_devices as use_cpu_devices
    from cocodc_jax.engine.transport import Transport as Transport
    from cocodc_jax.program.region_program import RegionProgram as RegionProgram
    from cocodc_jax.region_sync.after_step import RegionSync as RegionSync
    from cocodc_jax.sync.cutting import cut as cut
    from cocodc_jax.sync.inner_state import merge_opt_state as merge_opt_state
    from cocodc_jax.sync.model_state import ModelState as ModelState
    from cocodc_jax.sync.needs import UserInputs as UserInputs
    from cocodc_jax.sync.regions import Regions as Regions
    from cocodc_jax.train.checkpoint import Checkpoints as Checkpoints
    from cocodc_jax.train.run_steps import run_steps as run_steps
    from cocodc_jax.transforms.compensation import (
        adam_second_moment as adam_second_moment,
    )

__getattr__, __dir__ = attach(__name__, modules_of(__path__, packages=True))
