"""Virtual devices and compiled programs for every test, set before JAX starts."""

import os
import shutil
import tempfile

import jax
from hypothesis import settings

# The same examples every time: a suite that fails now and then teaches nobody.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Eight for region, data and model axes of a test mesh, one for the outer mesh.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 9)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests compile the same programs, and so do the commands that they run: one cache
# for all workers and commands. Whoever makes it, the first process, takes it down.
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_own_cache = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    _own_cache = os.environ[_CACHE] = tempfile.mkdtemp(prefix="cocodc_xla_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_unconfigure():
    """Takes the cache down at the end."""
    if _own_cache:
        shutil.rmtree(_own_cache, ignore_errors=True)
