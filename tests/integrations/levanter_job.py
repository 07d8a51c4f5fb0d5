"""Levanter's own trainer, `levanter.trainer.Trainer`, with its Llama, very small."""

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import haliax as hax
import jax
import numpy as np
from haliax import Axis
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

PACKAGES = ("marin-levanter", "marin-haliax", "equinox")
VOCABULARY = 64
LENGTH = 16
REGION_BATCH = 4
NUM_LAYERS = 4
NUM_BATCHES = 16

# Layers are scanned, and stacked along axis 0, as is Levanter's default.
CONFIG = LlamaConfig(
    max_seq_len=LENGTH,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=NUM_LAYERS,
    num_heads=2,
    num_kv_heads=2,
    initializer_range=0.2,
    gradient_checkpointing=False,
)
Vocab = Axis("vocab", VOCABULARY)
Position = Axis("position", LENGTH)


def start():
    """Return one region's first parameters."""
    return CONFIG.build(Vocab, key=jax.random.key(0))


def unit_of(path: str) -> int | np.ndarray:
    """Return the place of a leaf in the network: embedding, layers, norm, head.

    Of a leaf that stacks layers, the places of all of them.
    """
    if re.search(r"layers/", path):
        return 1 + np.arange(NUM_LAYERS)
    names = {"embeddings": 0, "transformer": 1 + NUM_LAYERS, "lm_head": 2 + NUM_LAYERS}
    return names[path.split("/")[0]]


def batch_of(step: int, region: int) -> np.ndarray:
    """Make one region's batch of one step, `[B, L]`."""
    rng = np.random.default_rng((step, region))
    first = rng.integers(0, VOCABULARY, (REGION_BATCH, 1), np.int32)
    return (first + np.arange(LENGTH, dtype=np.int32)) % VOCABULARY


def next_token_loss(model, example, *, key=None):
    """Levanter's own loss, as its `train_lm` passes it to the trainer."""
    return model.compute_next_token_loss(example, key=key)


def loss(model, tokens: np.ndarray) -> jax.Array:
    """Return the loss of one region."""
    tokens = hax.named(tokens, ("batch", Position))
    example = hax.vmap(LmExample.causal, "batch")(tokens)
    return next_token_loss(model, example).scalar()


# --- The lines of the page.


def stacked_model(make_model, Region: Axis):
    """Return a model whose arrays have a leading axis of equal regions."""
    return hax.vmap(lambda region: make_model(), Region)(hax.arange(Region))


def mean_loss(loss_fn, Region: Axis):
    """Return a loss of all regions' model, on a batch for all of them."""

    def divided(x):
        batch = x.resolve_axis("batch")
        rest = batch.resize(batch.size // Region.size)
        return x.unflatten_axis("batch", (Region, rest))

    def of_regions(model, example, *, key=None):
        def of_region(model, example):
            return loss_fn(model, example, key=key)

        examples = hax.tree_util.tree_map(divided, example)
        return hax.vmap(of_region, Region)(model, examples).mean()

    return of_regions


class Losses:
    """Keeps the losses of a training; after it Levanter calls all hooks once more."""

    def __init__(self):
        self.by_step = {}

    def __call__(self, info):
        """Keep one."""
        self.by_step[info.step] = float(info.loss)


def examples(regions: Iterable[int]) -> ListAsyncDataset:
    """Return the examples of all steps and some regions, in this order."""
    rows = np.concatenate(
        [batch_of(step, r) for step in range(NUM_BATCHES) for r in regions]
    )
    return ListAsyncDataset([LmExample.causal(hax.named(x, Position)) for x in rows])


def make_config(num_steps: int, batch_size: int, folder: Path) -> TrainerConfig:
    """Make Levanter's configuration."""
    checkpointer = CheckpointerConfig(
        base_path=str(folder), save_interval=None, keep=None
    )
    return TrainerConfig(
        id="run",
        tracker=NoopConfig(),
        log_dir=folder / "logs",
        log_jaxprs=False,
        log_xla_hlo=False,
        train_batch_size=batch_size,
        num_train_steps=num_steps,
        checkpointer=checkpointer,
        require_accelerator=False,
    )


def train(
    tx, num_regions, num_steps, folder=None, *, make_trainer=Trainer, regions=(0, 1)
):
    """Train by Levanter's own loop; without `num_regions` one model has every batch.

    With a folder Levanter saves its last state there, and goes on from it.

    Args:
      make_trainer: Levanter's `Trainer`, or a class that derives from it.
      regions: whose batches the model has.

    Returns parameters, the optimizer's state and losses.
    """
    loss_fn = next_token_loss
    make_model = start
    if num_regions is not None:
        Region = Axis("region", num_regions)
        loss_fn = mean_loss(loss_fn, Region)
        make_model = functools.partial(stacked_model, start, Region)

    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = make_config(num_steps, len(regions) * REGION_BATCH, Path(folder))

        trainer = stack.enter_context(make_trainer(config, tx, loss_fn))
        watch = Losses()
        trainer.add_hook(watch)
        state = trainer.initial_state(jax.random.PRNGKey(0), model_init=make_model)
        loader = trainer.data_loader(examples(regions))
        state = trainer.train(state, loader.iter_from_step(int(state.step))).state
    return state.model, state.opt_state, [*watch.by_step.values()]
