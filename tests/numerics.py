"""Comparison of two compiled programs, which processors round differently.

Only the same compiled program gives the same bits twice. Another program may keep a
product unrounded before it is added, or sum in another order, on one processor and not
on the next.
"""

import jax
import jax.numpy as jnp
import numpy as np


def assert_within_ulps(actual, expected, ulps=16):
    """Compare trees: floats to `ulps` units in the last place of a leaf's largest.

    A sum is rounded at the size of its terms, not at that of their difference. Python's
    floats count as float32, which schedules take them from; all else must be equal.
    """

    def check(x, y):
        x, y = (np.asarray(z, np.float32 if type(z) is float else None) for z in (x, y))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_equal(x, y)
            return

        largest = np.max(np.abs(y), where=np.isfinite(y), initial=0)
        unit = float(np.spacing(largest.astype(x.dtype)))
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=0, atol=ulps * unit
        )

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(check, actual, expected)


def assert_within(actual, expected, tolerance):
    """Compare trees: leaves to `tolerance` of the largest number of each."""

    def check(x, y):
        y = np.asarray(y, float)
        atol = tolerance * np.abs(y).max()
        np.testing.assert_allclose(np.asarray(x, float), y, rtol=0, atol=atol)

    jax.tree.map(check, actual, expected)


def assert_all_close(actual, expected, rtol=1e-7, atol=0.0):
    """Compare the arrays of two trees of one structure, as NumPy compares two."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol),
        actual,
        expected,
    )
