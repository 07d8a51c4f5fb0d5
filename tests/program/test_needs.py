"""A new need is one entry of one table: here two that the package does not know."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync import needs
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.needs import Need

LR, DELAY = 0.05, 2


def of_batch(local, staged, outer, *, delay_steps, batch_mean):
    """Take the outer fragment, moved by the mean of what was trained on last."""
    assert staged is None  # Nobody asked for it.
    merged = jax.tree.map(lambda o, x: (o + batch_mean).astype(x.dtype), outer, local)
    return merged, {"batch_mean": batch_mean}


def of_progress(local, staged, outer, *, delay_steps, progress):
    """Take the outer fragment, and tell how far the region came by itself."""
    return outer, {"progress": progress}


BATCH_MEAN = Need(
    "Mean of the inputs of the last batch.",
    wants_batch=True,
    of_region=lambda seen: seen.batch["x"].mean(),
)
PROGRESS = Need(
    "Largest change of a parameter since the sync started.",
    keeps=(needs.STAGED,),
    of_region=lambda seen: jnp.stack(
        [abs(seen.local[name] - x).max() for name, x in seen.kept[needs.STAGED].items()]
    ).max(),
)


def make(tiny, rule):
    method = methods.get(
        "streaming_diloco", sync_interval=4, num_fragments=1, delay_steps=DELAY
    ).with_sync(merge=rule)
    return RegionProgram(
        tiny.loss_fn, optax.sgd(LR), method, tiny.make_params(), tiny.NUM_REGIONS
    )


def test_a_need_of_the_last_batch(tiny, monkeypatch):
    rule = Merge("of_batch", of_batch, needs=frozenset({"batch_mean"}))
    with pytest.raises(ValueError, match=r"needs \['batch_mean'\], which nothing here"):
        make(tiny, rule)
    monkeypatch.setitem(needs.NEEDS, "batch_mean", BATCH_MEAN)
    program = make(tiny, rule)
    state, outputs = tiny.finish(program, tiny.start(program), 4 + DELAY)
    (sync,) = [sync for output in outputs for sync in output.syncs]
    assert (sync.start_step, sync.apply_step) == (4, 6)
    # The steps of 6 trained on the batch of step 5; each region has its own mean.
    means = tiny.make_batch(5)["x"].mean(axis=(1, 2))
    assert len(set(means.tolist())) == tiny.NUM_REGIONS
    np.testing.assert_allclose(sync.metrics["batch_mean"], means, rtol=1e-5, atol=1e-7)
    outer = program.outer_params(state)["head"]
    local = np.asarray(state.region.params["head"])
    expected = np.asarray(outer)[None] + means[:, None, None]
    np.testing.assert_allclose(local, expected, rtol=1e-5, atol=1e-6)


def test_a_need_of_a_copy_in_flight(tiny, monkeypatch):
    """The copy is kept because an entry says so, and is in checkpoints like any."""
    monkeypatch.setitem(needs.NEEDS, "progress", PROGRESS)
    rule = Merge("of_progress", of_progress, needs=frozenset({"progress"}))
    program = make(tiny, rule)
    state, _ = tiny.finish(program, tiny.start(program), 4)
    (flight,) = state.sync.in_flight.values()
    assert set(flight.kept) == {"staged"}
    (abstract,) = program.abstract(state.sync.schedule).sync.in_flight.values()
    assert set(abstract.kept) == {"staged"}
    staged = tiny.host(state.region.params)
    progressed = run_alone(tiny, staged, first_step=4)
    _, outputs = tiny.finish(program, state, DELAY)
    (sync,) = [sync for output in outputs for sync in output.syncs]
    changes = jax.tree.map(
        lambda x, s: abs(x - s).reshape(tiny.NUM_REGIONS, -1).max(1), progressed, staged
    )
    came = np.max(jax.tree.leaves(changes), axis=0)
    np.testing.assert_allclose(sync.metrics["progress"], came, rtol=1e-4)


def run_alone(tiny, params, first_step):
    """`DELAY` steps of plain SGD in every region, without the package."""
    gradient = jax.vmap(jax.grad(lambda *args: tiny.loss_fn(*args)[0]), (0, 0, None))
    for step in range(first_step, first_step + DELAY):
        grads = gradient(params, tiny.make_batch(step), jax.random.key(0))
        params = jax.tree.map(lambda x, g: np.asarray(x - LR * g), params, grads)
    return params
