"""A merge with a new need gets it in a run, by one entry of the table.

CONTRIBUTING.md has a need of a value that a region kept.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax.methods import Method, Sync
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.needs import NEEDS, Need
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import staggered
from cocodc_jax.train.run_steps import run_steps as run

# Each region's gradient at steps 1 to 6; the last one is of another batch.
GRADIENTS = [(1.0, 3.0)] * 5 + [(1.0, 9.0)]


def merged_by(rule):
    """The two regions' parameter after step 6.

    From 0, steps of 0.5 times the gradient: -2 and -6 at step 4, when the sync starts;
    the outer parameter is then 0 - (2 + 6) / 2 = -4; and -3 and -12 at its merge.
    """
    sync = Sync(schedule=staggered(4, 1, 2), outer=nesterov(1.0, 0.0), merge=rule)
    method = Method(name="mine", sync=sync)
    params = {"w": np.zeros(1, np.float32)}
    sgd = optax.sgd(0.5, 0.0)  # With a trace, which is the gradient.
    loss = lambda x, batch, key: (jnp.sum(x["w"]) * batch.mean(), {})  # noqa: E731

    program = RegionProgram(loss, sgd, method, params, 2)
    state = program.init(params, jax.random.key(0))
    batches = iter(np.array(GRADIENTS, np.float32)[..., None])
    *_, (state, _) = run(program, state, batches, 6)

    return np.asarray(state.region.params["w"]).ravel().tolist()


def test_merges_without_a_new_need_by_hand():
    take = Merge("take", lambda local, staged, outer, **extra: (outer, {}))
    assert merged_by(take) == [-4, -4]
    stay = Merge("stay", lambda local, staged, outer, **extra: (local, {}))
    assert merged_by(stay) == [-3, -12]


def test_a_new_need_may_read_the_optimizer_states_of_all_regions(monkeypatch):
    find = lambda state, inputs: optax.tree_utils.tree_get(state, "trace")  # noqa: E731
    trace = Need(
        "The inner optimizer's trace of the fragment.",
        of_regions=find,
        of_region=lambda seen: seen.regional["trace"],
    )
    monkeypatch.setitem(NEEDS, "trace", trace)

    def apply(local, staged, outer, *, trace, **extra):
        return {"w": outer["w"] - trace["w"]}, {}

    assert merged_by(Merge("ahead", apply, frozenset({"trace"}))) == [-5, -13]


def test_a_new_need_may_read_the_last_batch(monkeypatch):
    batch = Need(
        "The mean of the last batch.",
        wants_batch=True,
        of_region=lambda seen: seen.batch.mean(),
    )
    monkeypatch.setitem(NEEDS, "batch_mean", batch)

    def apply(local, staged, outer, *, batch_mean, **extra):
        assert staged is None  # It is no need of this merge.
        return {"w": outer["w"] + batch_mean}, {}

    rule = Merge("by batch", apply, frozenset({"batch_mean"}))
    assert merged_by(rule) == [-3, 5]


def test_an_unknown_need_is_refused_before_anything_compiles():
    rule = Merge("odd", lambda *parts, **extra: None, frozenset({"luck"}))
    message = r"method='mine' needs \['luck'\], which nothing here can give"
    with pytest.raises(ValueError, match=message):
        merged_by(rule)
