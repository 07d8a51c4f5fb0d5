"""What all tests of models share."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles():
    """The time here is compiling, and what is compiled runs for microseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
