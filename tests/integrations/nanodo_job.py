"""The loop of the recipe for NanoDO, with a model of its shape.

NanoDO is in no package registry. The model and the checkpoints are those of
`docs/recipes/nanodo_loop.py`.
"""

import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.linen import meta
from flax.training.train_state import TrainState

sys.path.append(str(Path(__file__).parents[2] / "docs" / "recipes"))

from nanodo.model import DoConfig, TransformerDo  # noqa: E402

PACKAGES = ()
VOCABULARY = 16
LENGTH = 11
REGION_BATCH = 4
NUM_LAYERS = 2
MODEL = TransformerDo(DoConfig(D=16, H=2, L=LENGTH, N=NUM_LAYERS, V=VOCABULARY, F=64))


def start():
    """Return one region's first parameters."""
    tokens = np.zeros((1, LENGTH), np.int32)
    return meta.unbox(MODEL.init(jax.random.key(0), tokens)["params"])


def unit_of(path: str) -> int:
    """Return the place of a leaf in the network: two embeddings, layers, norm."""
    if layer := re.search(r"blocks_(\d+)/", path):
        return 2 + int(layer[1])
    names = {"embed": 0, "pos_embed": 1, "LayerNorm_0": 2 + NUM_LAYERS}
    return names[path.split("/")[0]]


def batch_of(step: int, region: int) -> np.ndarray:
    """Make one region's batch of one step, `[B, L + 1]`."""
    rng = np.random.default_rng((step, region))
    first = rng.integers(0, VOCABULARY, (REGION_BATCH, 1), np.int32)
    return (first + np.arange(LENGTH + 1, dtype=np.int32)) % VOCABULARY


def loss(params, tokens) -> jax.Array:
    """Return the loss of one region, as NanoDO's loop computes it."""
    logits = MODEL.apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@jax.jit
def train_step(state: TrainState, tokens):
    """Do NanoDO's step, with regions or without."""

    def loss_fn(params):
        if tokens.ndim == 2:
            return loss(params, tokens)
        return jax.vmap(loss)(params, tokens).mean()

    value, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), value


def train(tx, num_regions, num_steps, folder=None):
    """Train; without regions on the batches of all of them.

    Returns parameters, the optimizer's state and losses.
    """
    params = start()
    if num_regions is not None:
        params = jax.tree.map(lambda x: jnp.stack([x] * num_regions), params)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    joined = np.concatenate if num_regions is None else np.stack

    losses = []
    with ocp.CheckpointManager(folder or tempfile.mkdtemp()) as manager:
        if first := manager.latest_step() or 0:
            restore = ocp.args.StandardRestore(state)
            state = manager.restore(first, args=restore)
        for step in range(first, num_steps):
            tokens = joined([batch_of(step, r) for r in range(num_regions or 2)])
            state, value = train_step(state, tokens)
            losses.append(float(value))
        manager.save(num_steps, args=ocp.args.StandardSave(state))
    return state.params, state.opt_state, losses
