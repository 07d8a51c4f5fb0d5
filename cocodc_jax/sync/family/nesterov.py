"""The outer optimizer that most methods share."""

import optax


def nesterov(outer_lr: float, outer_momentum: float) -> optax.GradientTransformation:
    """Outer Nesterov: m <- mu m + Delta; theta^g <- theta^g - eta (Delta + mu m).

    Args:
      outer_lr: eta, positive.
      outer_momentum: mu, in [0, 1).

    Raises:
      ValueError: if one is out of range.
    """
    if outer_lr <= 0:
        raise ValueError(f"outer_lr={outer_lr} must be positive")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum={outer_momentum} must be in [0, 1)")
    return optax.sgd(outer_lr, outer_momentum or None, nesterov=outer_momentum > 0)
