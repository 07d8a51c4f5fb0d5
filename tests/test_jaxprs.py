"""A hash of a traced program is of what it computes, not of what it is called."""

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


def test_names_have_no_part_in_it():
    assert hash_of(scaled_sum(2.0, "step")) == hash_of(scaled_sum(2.0, "renamed"))


def test_a_number_inside_a_scan_does():
    assert hash_of(scaled_sum(2.0, "step")) != hash_of(scaled_sum(3.0, "step"))


def test_the_order_of_equations_does():
    one = hash_of(lambda x: (jnp.sin(x), jnp.cos(x)))
    other = hash_of(lambda x: (jnp.cos(x), jnp.sin(x))[::-1])
    assert one != other


def test_a_closed_over_array_does():
    ones, twos = (jnp.full(3, value) for value in (1.0, 2.0))
    assert hash_of(lambda x: x + ones) != hash_of(lambda x: x + twos)
