"""Regions that are separate jobs, each with a plain loop, leave and come back."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cocodc_jax as cc
from cocodc_jax.elastic.link import LeftBehindError
from cocodc_jax.elastic.place import Timing
from tests.program.elastic.meeting import TIMING, places

pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")

OPTIMIZER = optax.sgd(0.05)
TARGET = np.arange(4, dtype=np.float32)
OVERLAPPED = {"sync_interval": 4, "num_fragments": 1, "delay_steps": 1}


@jax.jit
def step_fn(params, opt_state, x):
    def loss(params):
        return jnp.mean((x @ params["w"] - x @ TARGET) ** 2)

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class Region:
    """A trainer of one region; keeps the outer parameters after each merge."""

    def __init__(self, place, method="streaming_diloco", options=OVERLAPPED):
        self.params = {"w": jnp.zeros(4)}
        self.opt_state = OPTIMIZER.init(self.params)
        transport = cc.Transport("elastic", place=place)
        method = cc.methods.get(method, **options)
        self.sync = cc.RegionSync(method, self.params, 2, transport=transport)
        self.state = self.sync.init(self.params)

        self.place = place
        self.merged = {}
        self.steps = []
        self.senders = {}

    def join(self):
        self.params, self.state = self.sync.join(self.params, self.state)

    def train(self, end, pause=lambda step: None):
        while self.state.step < end:
            pause(self.state.step)

            self.steps.append(self.state.step)
            rng = np.random.default_rng((self.place.region, self.state.step))
            x = rng.normal(size=(8, 4)).astype(np.float32)
            self.params, self.opt_state = step_fn(self.params, self.opt_state, x)
            self.params, self.state = self.sync.after_step(self.params, self.state)

            if self.state.applied:
                outer = self.sync.outer_params(self.state, self.params)
                self.merged[self.state.step] = np.asarray(outer["w"])
                (applied,) = self.state.applied
                self.senders[self.state.step] = self.sync.regions_in_mean(applied)


def assert_same_merges(one, other, least):
    steps = one.merged.keys() & other.merged.keys()
    assert len(steps) >= least
    for step in steps:
        np.testing.assert_array_equal(one.merged[step], other.merged[step])


@pytest.mark.parametrize("via", [False, True])
def test_a_region_that_died_comes_back_at_the_step_of_the_others(via, tmp_path):
    one, two = places(2, via=tmp_path if via else None)
    end = 40
    reborn = []

    def stays():
        region = Region(one)
        with region.sync:
            region.join()
            region.train(20)

            while not reborn:  # It is admitted between two events.
                region.sync.meet(region.params, region.state)
                time.sleep(0.01)

            region.train(end)
        return region

    def dies():
        first = Region(two)
        with contextlib.suppress(KeyError), first.sync:
            first.join()
            first.train(10)
            raise KeyError("killed")

        region = Region(two)
        with region.sync:
            region.join()
            reborn.append(region)
            assert region.state.step == 20
            region.train(end)
        return first, region

    with ThreadPoolExecutor() as pool:
        staying = pool.submit(stays)
        dying = pool.submit(dies)
        first, again = dying.result(120)
        stayed = staying.result(120)

    assert_same_merges(stayed, first, least=2)
    assert_same_merges(stayed, again, least=4)
    assert stayed.senders[5] == (0, 1)
    assert stayed.senders[17] == (0,)  # Before the other one was back.
    assert stayed.senders[37] == again.senders[37] == (0, 1)


def test_a_region_that_was_left_behind_returns_with_its_work():
    timing = Timing(beat_s=0.05, dead_after_s=60, grace_s=0.2, start_s=30, max_behind=2)
    one, two = places(2, timing=timing)
    end = 120

    def goes_on():
        region = Region(one)
        with region.sync:
            region.join()
            region.train(end, pause=lambda step: time.sleep(0.02))
        return region

    def hangs():
        region = Region(two)

        def pause(step):
            if step == 6 and len(region.steps) == 6:
                time.sleep(1.5)
            time.sleep(0.02)

        with region.sync:
            region.join()
            region.train(end, pause)
        return region

    with ThreadPoolExecutor() as pool:
        going_on = pool.submit(goes_on)
        hanging = pool.submit(hangs)
        first = going_on.result(120)
        second = hanging.result(120)

    jumps = np.diff(second.steps)
    assert jumps.max() > 1  # The data move to the step of the others.
    assert (jumps >= 1).all()

    back_at = second.steps[int(jumps.argmax()) + 1]
    later = {step: x for step, x in second.merged.items() if step > back_at}
    assert len(later) >= 3
    for step, outer in later.items():
        np.testing.assert_array_equal(outer, first.merged[step])


def test_a_folder_for_messages_is_made_or_refused(tmp_path):
    one, _ = places(2, via=tmp_path / "new")
    Region(one)
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    one, _ = places(2, via=tmp_path / "file")
    with pytest.raises(ValueError, match=r"via='.*file' cannot be reached"):
        Region(one)


def test_joining_without_elastic_regions_changes_nothing():
    params = {"w": jnp.zeros((2, 4))}
    sync = cc.RegionSync("diloco", params, 2)
    state = sync.init(params)
    assert sync.join(params, state) == (params, state)
    assert sync.regions == (0, 1)
    while not state.applied:
        params, state = sync.after_step(params, state)
    assert sync.regions_in_mean(state.applied[0]) == (0, 1)


class Linear(nnx.Module):
    """The same parameters as `{"layer": {"kernel": ..., "bias": ...}}`."""

    def __init__(self):
        self.layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))


def test_two_different_trainers_take_part_in_one_run():
    """One is a Flax NNX module with Adam, one a dict with SGD."""
    method = cc.methods.get("streaming_diloco", **OVERLAPPED)
    one, two = places(2)
    end = 17

    def batch_of(region, step):
        x = np.random.default_rng((region, step)).normal(size=(8, 4))
        return x.astype(np.float32)

    def as_module():
        model = Linear()
        model.layer.kernel[...] = jnp.zeros((4, 1))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss(model):
                return jnp.mean((model.layer(x)[:, 0] - x @ TARGET) ** 2)

            optimizer.update(model, nnx.grad(loss)(model))

        transport = cc.Transport("elastic", place=one)
        params = nnx.state(model, nnx.Param)

        with cc.RegionSync(method, params, 2, transport=transport) as sync:
            params, state = sync.join(params, sync.init(params))
            nnx.update(model, params)

            for i in range(end):
                step(model, optimizer, batch_of(0, i))
                params = nnx.state(model, nnx.Param)
                params, state = sync.after_step(params, state)
                nnx.update(model, params)

            outer = sync.outer_params(state, params)
        return np.asarray(outer["layer"]["kernel"][...])

    def as_dict():
        params = {"layer": {"kernel": jnp.zeros((4, 1)), "bias": jnp.zeros(1)}}
        opt_state = OPTIMIZER.init(params)

        @jax.jit
        def step(params, opt_state, x):
            def loss(params):
                layer = params["layer"]
                y = x @ layer["kernel"] + layer["bias"][None]
                return jnp.mean((y[:, 0] - x @ TARGET) ** 2)

            grads = jax.grad(loss)(params)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        transport = cc.Transport("elastic", place=two)
        with cc.RegionSync(method, params, 2, transport=transport) as sync:
            params, state = sync.join(params, sync.init(params))
            for i in range(end):
                params, opt_state = step(params, opt_state, batch_of(1, i))
                params, state = sync.after_step(params, state)
            outer = sync.outer_params(state, params)
        return np.asarray(outer["layer"]["kernel"])

    with ThreadPoolExecutor() as pool:
        kernels = [pool.submit(train) for train in (as_module, as_dict)]
        of_module, of_dict = (kernel.result(120) for kernel in kernels)

    assert np.abs(of_dict).max() > 0.1
    np.testing.assert_array_equal(of_module, of_dict)


def test_regions_of_other_runs_are_refused():
    one, two = places(2, timing=Timing(beat_s=0.05, start_s=5))
    other = Region(two, options=OVERLAPPED | {"sync_interval": 8})
    region = Region(one)
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(x.join) for x in (region, other)]
        for join in joining:
            with pytest.raises(LeftBehindError, match="is of another run"):
                join.result(60)

    region.sync._membership.close()
    other.sync._membership.close()


def test_a_region_that_is_ahead_waits_until_the_others_are_as_far(monkeypatch):
    """The slower region has not yet reached the step of its checkpoint."""
    timing = dataclasses.replace(TIMING, beat_s=0.2, start_s=4)
    one, two = places(2, timing=timing)
    has_begun = threading.Event()
    is_asking = threading.Event()

    def slow():
        region = Region(one)

        def pause(step):
            has_begun.set()
            if step <= 6:
                is_asking.wait(30)
                time.sleep(0.2)

            deadline_s = time.monotonic() + 20
            while step == 8 and region.sync.regions != (0, 1):
                assert time.monotonic() < deadline_s
                region.sync.meet(region.params, region.state)
                time.sleep(0.01)

        with region.sync:
            region.join()
            region.train(20, pause)
        return region

    def ahead():
        region = Region(two)
        region.state = dataclasses.replace(region.state, step=6)
        monkeypatch.setattr(region.sync._membership, "_rehearse", lambda *_: None)

        has_begun.wait(30)
        with region.sync:
            is_asking.set()
            region.join()
            assert region.state.step >= 6
            region.train(20)
        return region

    with ThreadPoolExecutor() as pool:
        being_slow = pool.submit(slow)
        being_ahead = pool.submit(ahead)
        second = being_ahead.result(60)
        first = being_slow.result(60)

    assert_same_merges(first, second, least=2)


def test_a_late_mean_needs_regions_of_one_process(monkeypatch):
    one, _ = places(2, late_mean="merge")
    Region(one)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="late_mean='merge' .* has 2 processes; use"):
        Region(one)
