"""What a traced program holds, for tests that count its equations."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Every equation of a jaxpr, and of the jaxprs inside."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
