"""Cross-region training in JAX: one model, several data centres, a slow network.

- `cocodc_jax.transforms`: delay compensation, compressors and outer optimizers as
  Optax transformations, for anybody's JAX code.
- `cocodc_jax.methods`: CoCoDC, DiLoCo, data parallel and twenty more, as values.
- `cocodc_jax.RegionProgram` and `cocodc_jax.run`: a method around your own loss.
"""

from cocodc_jax.runtime.mesh import make_mesh, use_cpu_devices
from cocodc_jax.runtime.program import RegionProgram, run
from cocodc_jax.runtime.second_moment import adam_second_moment
from cocodc_jax.sync import methods

__all__ = [
    "RegionProgram",
    "adam_second_moment",
    "make_mesh",
    "methods",
    "run",
    "use_cpu_devices",
]
