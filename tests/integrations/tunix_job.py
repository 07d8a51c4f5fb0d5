"""Tunix's own trainer, `PeftTrainer`, with its Llama 3, very small."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import hooks, peft_trainer
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

PACKAGES = ("google-tunix",)
VOCABULARY = 64
LENGTH = 16
REGION_BATCH = 4
NUM_LAYERS = 2


def make_model() -> nnx.Module:
    """Make Tunix's model, with other initial values.

    Its own ones, zeros among them, leave an MLP without a gradient, and have a norm of
    a small embedding that amplifies the last bits of two programs.
    """
    config = ModelConfig(
        num_layers=NUM_LAYERS,
        vocab_size=VOCABULARY,
        embed_dim=32,
        hidden_dim=64,
        num_heads=2,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = Llama3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def first(x):
        if x.ndim == 1:
            return jnp.ones_like(x)
        return jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(first, nnx.state(model, nnx.Param)))
    return model


GRAPH, _ = nnx.split(make_model())


def start() -> nnx.State:
    """Return one region's first parameters."""
    return nnx.state(make_model(), nnx.Param)


def unit_of(path: str) -> int:
    """Return the place of a leaf in the network: embedding, layers, norm, head."""
    if layer := re.search(r"layers/(\d+)/", path):
        return 1 + int(layer[1])
    names = {"embedder": 0, "final_norm": 1 + NUM_LAYERS, "lm_head": 2 + NUM_LAYERS}
    return names[path.split("/")[0]]


def batch_of(step: int, region: int) -> dict[str, np.ndarray]:
    """Make one region's batch of one step, as Tunix's loss takes it."""
    rng = np.random.default_rng((step, region))
    first = rng.integers(0, VOCABULARY, (REGION_BATCH, 1), np.int32)
    tokens = (first + np.arange(LENGTH, dtype=np.int32)) % VOCABULARY
    mask = np.ones_like(tokens, bool)

    return {
        "input_tokens": tokens,
        "input_mask": mask,
        "positions": np.asarray(build_positions_from_mask(mask)),
        "attention_mask": np.asarray(make_causal_attn_mask(mask)),
    }


def loss(params: nnx.State, batch: dict) -> jax.Array:
    """Tunix's own loss of one region."""
    return peft_trainer._default_loss_fn(nnx.merge(GRAPH, params), **batch)


# --- The lines of the page.


def stacked_model(model: nnx.Module, num_regions: int) -> nnx.Module:
    """Return a model whose parameters have a leading axis of regions."""
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: jnp.stack([x] * num_regions), state)
    return nnx.merge(graph, state)


def mean_loss(num_regions: int):
    """Return a loss of all regions' model, on a batch for all of them."""

    def loss_fn(model, input_tokens, input_mask, positions, attention_mask):
        graph, params = nnx.split(model)

        def of_region(params, *inputs):
            return peft_trainer._default_loss_fn(nnx.merge(graph, params), *inputs)

        inputs = input_tokens, input_mask, positions, attention_mask
        inputs = [x.reshape(num_regions, -1, *x.shape[1:]) for x in inputs]
        return jax.vmap(of_region)(params, *inputs).mean()

    return loss_fn


class Losses(hooks.TrainingHooks):
    """Keeps the losses of a training."""

    def __init__(self):
        self.losses = []

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        """Keep one."""
        self.losses.append(float(train_loss))

    def _nothing(self, *args):
        """Do nothing at all other events."""

    on_train_start = on_train_end = on_train_step_start = _nothing
    on_eval_step_start = on_eval_step_end = _nothing


def train(tx, num_regions, num_steps, folder=None):
    """Train by Tunix's own loop; without regions on the batches of all of them.

    Returns parameters, the optimizer's state and losses.
    """
    model = make_model()
    if num_regions is not None:
        model = stacked_model(model, num_regions)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000,
        max_steps=num_steps,
        checkpoint_root_directory=None if folder is None else str(folder),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1000),
        data_sharding_axis=(),
    )
    trainer = peft_trainer.PeftTrainer(model, tx, config)
    if num_regions is not None:
        trainer.with_loss_fn(mean_loss(num_regions))
    watch = Losses()
    trainer.with_training_hooks(watch)

    regions = range(num_regions or 2)
    batches = [
        {
            name: np.concatenate([batch_of(step, r)[name] for r in regions])
            for name in batch_of(0, 0)
        }
        for step in range(num_steps)
    ]
    trainer.train(batches)
    return nnx.state(model, nnx.Param), trainer.optimizer.opt_state, watch.losses
