"""Generalized primal averaging (GPA): steps taken ahead of an average of the iterates.

A base optimizer takes a step d from y; a pseudo-gradient is old minus new, g = -d. Two
sequences begin where training does:

    z <- z - g                              the base optimizer's own
    x <- mu_x x + (1 - mu_x) z              its average, which is evaluated
    y  = mu_y x + (1 - mu_y) z              where the next step starts

With e = z - x, all that is kept beside x, that is

    a = e - g;   x <- x + (1 - mu_x) a;   e <- mu_x a;   y = x + (1 - mu_y) e

At mu_x = 0 the three are one, and the base optimizer is left as it is. At mu_x = mu_y
= mu, y moves by Nesterov's momentum m with learning rate 1 - mu, and e = -mu m.

Source: Defazio, Mishchenko, Raman, Shi and Xiao, arXiv 2512.17131; read from the
authors' code (facebookresearch/optimizers, `gpa`). Derived here: the form with e.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from cocodc_jax.transforms.layers import nodes_of
from cocodc_jax.transforms.numerics import (
    cast_like,
    check_between,
    check_unit_interval,
    fill_holes,
    match_holes,
)


class PrimalAverageState(NamedTuple):
    """State of `primal_average`."""

    ahead: optax.Updates  # e = z - x, a tree like the parameters, new minus old.


def primal_average(
    eval_interpolation: float | jax.Array = 0.9967,
) -> optax.GradientTransformation:
    """Average the base optimizer's sequence exponentially.

    Args:
      eval_interpolation: mu_x, weight of the average in the new one, in [0, 1); at 0
        it is the base optimizer's last point.

    Returns:
      A transformation from g, a pseudo-gradient measured from `primal_start`, to the
      step of x to add; its `params` are x.

    >>> import jax.numpy as jnp
    >>> average, x = primal_average(0.5), jnp.zeros(1)
    >>> state = average.init(x)
    >>> for g in (4.0, 2.0):  # z = -4, then -6;  x = -2, then -4
    ...     step, state = average.update(jnp.array([g]), state)
    ...     x = x + step
    ...     print(x, state.ahead)
    [-2.] [-2.]
    [-4.] [-2.]
    """
    check_unit_interval("eval_interpolation", eval_interpolation)

    def init_fn(params):
        return PrimalAverageState(optax.tree.zeros_like(params))

    def update_fn(updates, state, params=None):
        moved = jax.tree.map(lambda e, g: e - g, state.ahead, updates)
        step = jax.tree.map(lambda a: (1 - eval_interpolation) * a, moved)
        ahead = jax.tree.map(lambda a: eval_interpolation * a, moved)

        step = cast_like(step, updates)
        return step, PrimalAverageState(cast_like(ahead, state.ahead))

    return optax.GradientTransformation(init_fn, update_fn)


def primal_start(
    train_interpolation: float | jax.Array = 0.7,
) -> Callable[[optax.Params, optax.OptState], optax.Params]:
    """Make `start(params, state) -> params`, the point y that training goes on from.

        y = x + (1 - mu_y) e

    Args:
      train_interpolation: mu_y, weight of the average in y, in [0, 1].

    >>> import jax.numpy as jnp
    >>> state = PrimalAverageState(jnp.array([-2.0]))
    >>> print(primal_start(0.75)(jnp.array([-4.0]), state))
    [-4.5]
    """
    check_between("train_interpolation", train_interpolation, 0, 1)

    def start(params, state):
        nodes = nodes_of(PrimalAverageState, state)
        if len(nodes) != 1:
            raise ValueError(
                f"state holds {len(nodes)} states of primal_average, but primal_start "
                "uses one: pass the state of that transformation"
            )

        ahead = nodes[0].ahead

        def lead(x, e):
            return (x + (1 - train_interpolation) * e).astype(x.dtype)

        points = jax.tree.map(lead, match_holes(ahead, params), ahead)
        return fill_holes(ahead, points, params)

    return start
