"""The hash of a traced program depends on its computation, not on names."""

import jax
import jax.numpy as jnp

from tests.jaxprs import digest

X = jnp.arange(3.0)


def hash_of(function):
    return digest(jax.make_jaxpr(function)(X))


def scaled_sum(factor, name):
    """A program with a scan and a compiled function inside, under some name."""

    def step(total, x):
        return total + x, factor * total

    step.__name__ = name
    return lambda x: jax.lax.scan(jax.jit(step), 0.0, x)


def test_a_hash_does_not_depend_on_names():
    assert hash_of(scaled_sum(2.0, "step")) == hash_of(scaled_sum(2.0, "renamed"))


def test_a_hash_depends_on_numbers_inside_a_scan():
    assert hash_of(scaled_sum(2.0, "step")) != hash_of(scaled_sum(3.0, "step"))


def test_a_hash_depends_on_the_order_of_equations():
    one = hash_of(lambda x: (jnp.sin(x), jnp.cos(x)))
    other = hash_of(lambda x: (jnp.cos(x), jnp.sin(x))[::-1])
    assert one != other


def test_a_hash_depends_on_closed_over_arrays():
    ones, twos = (jnp.full(3, value) for value in (1.0, 2.0))
    assert hash_of(lambda x: x + ones) != hash_of(lambda x: x + twos)
