"""Virtual devices for every test, set before JAX starts its backends."""

import jax
from hypothesis import settings

# The same examples every time: a suite that fails now and then teaches nobody.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Eight for region, data and model axes of a test mesh, one for the outer mesh.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 9)
jax.config.update("jax_numpy_rank_promotion", "raise")
