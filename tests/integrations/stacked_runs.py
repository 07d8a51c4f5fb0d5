"""Runs of trainers that own their step, with `cc.stacked` as their optimizer.

    python tests/integrations/stacked_runs.py {tunix,kauldron,levanter,nanodo} FOLDER

A child of `test_stacked_trainers.py`. Each trainer's job gives a loss of one region and
its own loop; the common parts are here. Every run leaves its last parameters in
`FOLDER/RUN.npz`, and other figures in `FOLDER/facts.json`.

It runs by its path: a package that Levanter requires installs a package `tests`, which
hides this folder.
"""

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc

NUM_REGIONS = 2
NUM_STEPS = 13
SAVED_AT = 6
INTERVAL = 4
DELAY = 1
ALPHA = 0.5
OUTER_LR = 0.4
MOMENTUM = 0.9
SGD = optax.sgd(0.1)
# Two programs round differently, which Adam's division amplifies unless eps is large.
ADAM = optax.adamw(0.01, eps=1e-3)
SAME = {"sync_interval": INTERVAL, "num_fragments": 2, "delay_steps": DELAY}


def streaming(**options):
    """Make the method of the plain loop."""
    return cc.methods.get(
        "streaming_diloco",
        mixing_alpha=ALPHA,
        outer_lr=OUTER_LR,
        outer_momentum=MOMENTUM,
        **SAME,
        **options,
    )


def numbers(params) -> dict[str, np.ndarray]:
    """Return parameters on the host, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
        for path, x in leaves
    }


def in_all(tree):
    """Return a tree with a leading axis of equal regions."""
    return jax.tree.map(lambda x: jnp.stack([x] * NUM_REGIONS), tree)


def of_each(function):
    """Return a function of all regions as one program for each, and not as one."""
    compiled = jax.jit(function)

    def mapped(*trees):
        results = [
            compiled(*jax.tree.map(lambda x: x[region], trees))  # noqa: B023
            for region in range(NUM_REGIONS)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return mapped


def of_all(function):
    """Return a function of all regions as one program."""
    return jax.jit(jax.vmap(function))


def plain_streaming(job, mapped=of_all):
    """Train by Streaming DiLoCo (arXiv 2501.18512, algorithm 2), in NumPy.

    Fragment k, every second of the model's units, starts at the steps that are k H / K
    modulo H. Only the gradient and Adam's step are JAX's.
    """
    gradient = mapped(jax.grad(job.loss))
    update = mapped(ADAM.update)
    tree = in_all(job.start())
    state = jax.vmap(ADAM.init)(tree)
    structure = jax.tree.structure(tree)
    outer = {path: x[0].astype(np.float64) for path, x in numbers(tree).items()}
    units = {path: unit_of_values(job, path, x) for path, x in outer.items()}
    momentum = {path: np.zeros_like(x) for path, x in outer.items()}
    in_flight = {}

    for step in range(1, NUM_STEPS + 1):
        batches = [job.batch_of(step - 1, region) for region in range(NUM_REGIONS)]
        batch = jax.tree.map(lambda *x: np.stack(x), *batches)
        updates, state = update(gradient(tree, batch), state, tree)
        params = numbers(optax.apply_updates(tree, updates))

        k, means = in_flight.pop(step, (None, {}))
        for path, mean in means.items():
            is_merged = units[path] % 2 == k
            speed = MOMENTUM * momentum[path] + mean
            stepped = outer[path] - OUTER_LR * (mean + MOMENTUM * speed)
            momentum[path] = np.where(is_merged, speed, momentum[path])
            outer[path] = np.where(is_merged, stepped, outer[path])
            mixed = ALPHA * params[path] + (1 - ALPHA) * outer[path][None]
            params[path] = np.where(is_merged, mixed, params[path]).astype(np.float32)
        tree = structure.unflatten([params[path] for path in outer])

        for k in range(2):
            if step % INTERVAL == k * INTERVAL // 2:
                means = {
                    path: outer[path] - x.mean(0, dtype=np.float64)
                    for path, x in params.items()
                }
                in_flight[step + DELAY] = k, means
    return tree


def unit_of_values(job, path: str, x: np.ndarray) -> np.ndarray:
    """Return the unit that each value of a leaf is in, broadcastable to the leaf.

    A job says it of a leaf; of one that stacks layers, of all layers on axis 0.
    """
    units = np.asarray(job.unit_of(path))
    return units.reshape(units.shape + (1,) * (x.ndim - units.ndim))


def run(name: str, folder: Path) -> None:
    """Do all runs of one trainer."""
    job = importlib.import_module(f"{name}_job")  # Beside this file.
    facts = {"trainer": name}

    def keep(run: str, params) -> None:
        np.savez(folder / f"{run}.npz", **numbers(params))

    def train(run: str, method, inner, **options) -> None:
        tx = cc.stacked(inner, method, NUM_REGIONS)
        params, opt_state, losses = job.train(tx, NUM_REGIONS, NUM_STEPS, **options)
        keep(run, params)
        sent = cc.sync_metrics(opt_state)["bytes_sent"]
        facts[run] = {"losses": losses, "bytes_sent": int(sent)}

    keep("start", in_all(job.start()))
    params, _, _ = job.train(SGD, None, NUM_STEPS)
    keep("data_parallel", in_all(params))
    keep("plain", plain_streaming(job))
    if name == "levanter":  # For regions that are jobs: one program rounds otherwise.
        keep("plain_of_each", plain_streaming(job, of_each))

    averaging = {"sync_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    train("diloco", cc.methods.get("diloco", **averaging), SGD)
    train("streaming", streaming(), ADAM)
    train("cocodc", cc.methods.get("cocodc", **SAME), ADAM)
    train("one_bit", streaming(compress="ef+sign"), ADAM)

    # Its own checkpoints, with a fragment in flight.
    checkpoints = folder / "checkpoints"
    tx = cc.stacked(ADAM, streaming(compress="ef+sign"), NUM_REGIONS)
    _, opt_state, _ = job.train(tx, NUM_REGIONS, SAVED_AT, folder=checkpoints)
    facts["in_flight"] = int(cc.sync_metrics(opt_state)["fragments_in_flight"])
    train("resumed", streaming(compress="ef+sign"), ADAM, folder=checkpoints)

    names = (*job.PACKAGES, "jax", "flax", "optax", "orbax-checkpoint", "cocodc_jax")
    facts["versions"] = {name: metadata.version(name) for name in names}
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
