"""Regions that exchange something at every step, stacked as a gather gives them."""

import jax
import jax.numpy as jnp
import numpy as np


def exchange(made, *rounds):
    """What regions make of their gradients, `[M, n]` a round."""
    first = jnp.array(rounds[0], jnp.float32)
    state = jax.vmap(made.init)(first)
    out = []
    for gradients in rounds:
        message, state = jax.vmap(lambda g, s: made.send(g, s, None))(
            jnp.array(gradients, jnp.float32), state
        )
        out.append(np.asarray(made.receive(message)).tolist())
    return out
