"""Kauldron's own trainer, `kd.train.Trainer`, with a small Linen model."""

import re
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from kauldron import kd
from kauldron.train.checkpoint_state import CheckpointState

PACKAGES = ("kauldron",)
WIDTH = 16
REGION_BATCH = 8
NUM_LAYERS = 2
NUM_BATCHES = 32


class Net(nn.Module):
    """A residual tower."""

    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        """Return predictions `[B, 2]`."""
        x = nn.Dense(WIDTH, name="embedding")(x)
        for i in range(NUM_LAYERS):
            x = x + nn.tanh(nn.Dense(WIDTH, name=f"layer_{i}")(x))
        return nn.Dense(2, name="head")(x)


# --- The lines of the page.


class Regions(nn.Module):
    """A model in every region: parameters `[R, ...]`, and a batch for all of them."""

    model: nn.Module
    num_regions: int
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        """Return the predictions of all regions, in the order of the batch."""
        x = x.reshape(self.num_regions, -1, *x.shape[1:])
        of_regions = nn.vmap(
            lambda model, x: model(x),
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": False},
        )
        y = of_regions(self.model, x)
        return y.reshape(-1, *y.shape[2:])


def start():
    """Return one region's first parameters."""
    trainer = make_trainer(None, 1, 1, tempfile.mkdtemp())
    return jax.tree.map(lambda x: x[0], trainer.init_state(skip_optimizer=True).params)


def unit_of(path: str) -> int:
    """Return the place of a leaf in the network: embedding, layers, head."""
    if layer := re.search(r"layer_(\d+)/", path):
        return 1 + int(layer[1])
    return 0 if "embedding" in path else 1 + NUM_LAYERS


def batch_of(step: int, region: int) -> dict[str, np.ndarray]:
    """Make one region's batch of one step."""
    rng = np.random.default_rng((step, region))
    x = rng.normal(size=(REGION_BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :2])}


def loss(params, batch: dict) -> jax.Array:
    """Return the loss of one region, as `kd.losses.L2` computes it."""
    y = Net().apply({"params": params["model"]}, batch["x"])
    return jnp.mean((y - batch["y"]) ** 2)


class Examples:
    """The examples of all steps and regions, in this order, as a data source."""

    def __init__(self):
        batches = [batch_of(i, r) for i in range(NUM_BATCHES) for r in range(2)]
        self.all = {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}

    def __len__(self):
        """Return how many there are."""
        return len(self.all["x"])

    def __getitem__(self, index):
        """Return one."""
        return {name: x[index] for name, x in self.all.items()}


class Writer(kd.train.metric_writer.NoopWriter):
    """Keeps the losses of a training."""

    losses: list = []  # noqa: RUF012

    def write_step_metrics(self, *, step, aux, **options):
        """Keep one."""
        with jax.transfer_guard("allow"):
            losses = aux.compute(flatten=False).loss_values
            self.losses.append(float(losses["l2"]))


def make_trainer(tx, num_regions, num_steps, folder, **options):
    """Make Kauldron's trainer."""
    data = kd.data.py.DataSource(
        data_source=Examples(),
        shuffle=False,
        batch_size=2 * REGION_BATCH,
        num_workers=0,
    )
    return kd.train.Trainer(
        train_ds=data,
        model=Regions(model=Net(), num_regions=num_regions),
        optimizer=tx,
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
        num_train_steps=NUM_BATCHES,
        stop_after_steps=num_steps,
        log_metrics_every=1,
        writer=Writer(),
        profiler=kd.inspect.Profiler(first_profile=None, every_secs=None),
        workdir=folder,
        **options,
    )


def train(tx, num_regions, num_steps, folder=None):
    """Train by Kauldron's own loop; without regions one model has the full batch.

    Kauldron saves before a step: with a folder it does one more, and the saved state
    is returned, unless the run resumed from a save.

    Returns parameters, the optimizer's state and losses.
    """
    options = {}
    is_first = False
    if folder is not None:
        folder = Path(folder)
        is_first = not folder.exists()
        saves = [num_steps] if is_first else []
        options["checkpointer"] = kd.ckpts.Checkpointer(
            save_interval_steps=1000, save_on_steps=saves
        )
        num_steps += is_first

    workdir = folder or tempfile.mkdtemp()
    Writer.losses.clear()
    trainer = make_trainer(tx, num_regions or 1, num_steps, workdir, **options)

    state, _ = trainer.train()
    if is_first:
        state = CheckpointState(
            trainer.init_state(), trainer._chrono, iter(trainer.train_ds)
        )
        state, *_ = trainer.checkpointer.restore(state)

    params = state.params
    if num_regions is None:
        params = jax.tree.map(lambda x: x[0], params)
    return params, state.opt_state, list(Writer.losses)
