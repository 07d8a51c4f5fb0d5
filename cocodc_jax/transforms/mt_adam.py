"""Adam with momenta of several time scales and the raw gradient (MT-DAO).

    u_j  <- b_j u_j + (1 - b_j) g           fast and slow, j = 1 .. J
    v    <- b2 v + (1 - b2) g^2
    step  = ((1 - sum_j w_j) g + sum_j w_j u_j / (1 - b_j^t))
            / (sqrt(v / (1 - b2^t)) + eps)

The gradient and the fast momentum keep the step responsive, the slow one remembers (see
`methods/mt_dao.py`). One momentum of weight 1 is Adam, one of less is quasi-hyperbolic
Adam (arXiv 1810.06801).

Source: MT-DAO, Iacob, Jovanovic et al., arXiv 2510.05361; the formula and 0.999 (0.99
to 0.995 in short runs) from a digest, a bias correction for each momentum and the
weights below from the authors' public code, where they are an example.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.transforms.numerics import (
    check_unit_interval,
    descend,
    safe_sqrt,
    wide_zeros,
    widen,
)

_ROUNDING = 1e-6  # Of a sum of weights that should be 1.


def mt_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1s: Sequence[float | jax.Array] = (0.9, 0.999),
    weights: Sequence[float] = (0.7, 0.2),
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 1e-4,
) -> optax.GradientTransformation:
    """Build AdamW with momenta of several time scales.

    Args:
      learning_rate: a number or a schedule.
      b1s: b_j, decay of each momentum, in [0, 1).
      weights: w_j of each; 1 minus their sum is the raw gradient's.
      b2: decay of the second moment.
      eps: added to its root.
      weight_decay: decoupled, in units of the learning rate.

    Returns:
      A transformation to the step to add; `update` needs `params`.
    """
    return optax.chain(
        scale_by_mt_adam(b1s, weights, b2, eps),
        optax.add_decayed_weights(weight_decay),
        descend(learning_rate),
    )


def scale_by_mt_adam(
    b1s: Sequence[float | jax.Array] = (0.9, 0.999),
    weights: Sequence[float] = (0.7, 0.2),
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
) -> optax.GradientTransformation:
    """Scale gradients as `mt_adam` says; arguments as there.

    Returns:
      A transformation whose state is an `optax.ScaleByAdamState` with `mu` a tuple of
      momenta, in the order of `b1s`, so code that looks for Adam's moments finds them.

    >>> import jax.numpy as jnp
    >>> transform = scale_by_mt_adam((0.5, 0.75), (0.5, 0.25), b2=0.0, eps=0.0)
    >>> state = transform.init(jnp.zeros(1))
    >>> for gradient in (2.0, 1.0):  # second: 0.25 + 0.5 * 4 / 3 + 0.25 * 10 / 7
    ...     step, state = transform.update(jnp.array([gradient]), state)
    ...     print(step.round(4), state.mu)
    [1.] (Array([1.], dtype=float32), Array([0.5], dtype=float32))
    [1.2738] (Array([1.], dtype=float32), Array([0.625], dtype=float32))
    """
    b1s = tuple(b1s)
    weights = tuple(weights)
    if len(b1s) != len(weights) or not all(w >= 0 for w in weights):
        raise ValueError(
            f"weights={weights} must be one for each of b1s={b1s}, none below 0"
        )
    if sum(weights) > 1 + _ROUNDING:
        raise ValueError(
            f"weights={weights} must add up to 1 at most; the rest is the gradient's"
        )

    for decay in b1s:
        check_unit_interval("b1s", decay)
    check_unit_interval("b2", b2)
    rest = 1 - sum(weights)
    rest = rest if rest > _ROUNDING else 0.0

    def init_fn(params) -> optax.ScaleByAdamState:
        # In bfloat16, 0.999 of a momentum would be rounded back to it.
        mu = tuple(jax.tree.map(wide_zeros, params) for _ in b1s)
        nu = jax.tree.map(wide_zeros, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update_fn(updates, state, params=None):
        count = optax.safe_increment(state.count)
        wide = jax.tree.map(widen, updates)
        momenta = tuple(
            optax.tree.update_moment(wide, u, b, 1)
            for u, b in zip(state.mu, b1s, strict=True)
        )

        nu = optax.tree.update_moment_per_elem_norm(wide, state.nu, b2, 2)
        corrected = [
            optax.tree.bias_correction(u, b, count)
            for u, b in zip(momenta, b1s, strict=True)
        ]

        def step(g, v, *us):
            mixed = sum(w * u for w, u in zip(weights, us, strict=True))
            mixed = mixed + rest * widen(g) if rest else mixed
            return (mixed / (safe_sqrt(v) + eps)).astype(g.dtype)

        scaled = jax.tree.map(
            step, updates, optax.tree.bias_correction(nu, b2, count), *corrected
        )
        mu, nu = optax.tree.cast_like((momenta, nu), (state.mu, state.nu))
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)
