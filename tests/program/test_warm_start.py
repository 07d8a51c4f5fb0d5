"""A state goes on in another program, which names its losses."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.core.state import TrainState
from cocodc_jax.program.fit import at_step
from cocodc_jax.transforms.layers import nodes_of
from tests.numerics import assert_all_close, assert_within_ulps
from tests.program.tiny import assert_same, host

PARAMS = {"blocks": {"w": np.ones((2, 3), np.float32)}, "b": np.zeros(3, np.float32)}
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(40, 8, 3)).astype(np.float32)
SGD = optax.sgd(0.1, 0.9)
MULTI_STEPS = optax.MultiStepsState
SCHEDULE = optax.ScaleByScheduleState


def loss_fn(params, batch, key):
    away = params["blocks"]["w"].sum(0) + params["b"] - batch
    return jnp.sum(away**2), {}


FRAGMENTS = {"sync_interval": 6, "num_fragments": 2, "delay_steps": 2}


def make_program(name, regions=4, optimizer=SGD, mesh=None, **options):
    method = cc.methods.get(name, **options)
    user_inputs = cc.UserInputs(0.1, cc.adam_second_moment(0.999))
    return cc.RegionProgram(
        loss_fn, optimizer, method, PARAMS, regions, mesh=mesh, user_inputs=user_inputs
    )


# One program for all tests that want the same: it holds only compiled code.
make = functools.cache(make_program)


def streaming(**options):
    return make("streaming_diloco", **FRAGMENTS | options)


def start(program):
    return program.init(PARAMS, jax.random.key(1))


def finish(program, state, num_steps, batches=BATCHES):
    rows = batches[:, : program.num_regions]
    for _ in range(num_steps):  # One length of a scan is compiled, whatever H.
        state, _ = program.advance(state, rows[state.step :][:1])
    return state


def adopted(new, old, num_steps):
    """Return what `new.adopt` returns for a state that `old` has trained."""
    return new.adopt(finish(old, start(old), num_steps), old)


def test_a_state_is_a_pytree_of_its_arrays():
    program = streaming()
    state = finish(program, start(program), 4)
    doubled = jax.tree.map(lambda x: x + x, {"mine": state})["mine"]

    assert isinstance(doubled, TrainState)
    assert (doubled.step, doubled.bytes_sent) == (4, state.bytes_sent)
    assert doubled.sync is not None
    assert doubled.sync.schedule == state.sync.schedule
    assert set(doubled.sync.in_flight) == set(state.sync.in_flight) != set()
    twice = jax.tree.map(lambda x: 2 * x, state.sync.in_flight)
    assert_same(twice, doubled.sync.in_flight)

    # It is an argument of a compiled function too.
    total = jax.jit(lambda s: optax.tree_utils.tree_sum(s.region.params))(state)
    assert np.isfinite(total)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "streaming_diloco",
            {"sync_interval": 6, "num_fragments": 2},
            marks=pytest.mark.slow,
        ),
        ("co2", {"sync_interval": 4, "compress": "ef+int8"}),
        ("noloco", {"sync_interval": 4}),
        ("data_parallel", {}),
    ],
)
def test_the_same_program_goes_on_bit_for_bit(name, options):
    one, other = (make_program(name, **options) for _ in range(2))
    expected = host(finish(one, start(one), 12))
    state, kept, lost = adopted(other, one, 5)
    assert not lost
    assert kept["parameters"] == "of each region"
    assert_same(host(finish(other, state, 7)), expected)


def test_a_run_of_equal_regions_goes_on_with_any_number():
    """All train on the same: 4, then 2, then 8 are one run, mid-interval too."""
    batches = np.repeat(BATCHES[:, :1], 8, axis=1)
    programs = [make("diloco", regions, sync_interval=5) for regions in (4, 2, 8)]
    whole = finish(programs[0], start(programs[0]), 24, batches)
    state = finish(programs[0], start(programs[0]), 7, batches)
    for num_steps, of, program in zip((6, 11), programs, programs[1:], strict=False):
        before = state.bytes_sent
        state, kept, lost = program.adopt(state, of)
        assert set(lost) == {"regions", "keys"}
        assert f"{of.num_regions} are {program.num_regions}" in lost["regions"]
        assert kept["inner optimizer"] == f"the mean of {of.num_regions} regions"
        assert kept["outer optimizer"] == "as it was"
        assert kept["schedule"] == "where it was"
        assert state.bytes_sent == before
        state = finish(program, state, num_steps, batches)
    assert (state.step, state.sync.schedule) == (24, whole.sync.schedule)
    one, other = (host((s.region.params, s.region.opt_state)) for s in (whole, state))
    one, other = (jax.tree.map(lambda x: x[-1], tree) for tree in (one, other))
    assert_all_close(one, other, rtol=1e-5)
    assert_all_close(host(whole.sync.outer), host(state.sync.outer), rtol=1e-5)
    assert len({key.tobytes() for key in np.asarray(state.region.key)}) == 8


def test_progress_since_the_last_sync_is_kept_as_a_mean():
    program = make("diloco", sync_interval=5)
    fewer = make("diloco", 2, sync_interval=5)
    state = finish(program, start(program), 7)
    mean, outer = host((program.mean_params(state), program.outer_params(state)))
    state, _, _ = fewer.adopt(state, program)
    both = jax.tree.map(lambda y: np.stack([y, y]), mean)
    assert_all_close(state.region.params, both, rtol=1e-6)
    assert_same(fewer.outer_params(state), outer)


def test_another_method_cuts_the_outer_state_in_its_fragments():
    """DiLoCo's one fragment is cut in two, its momentum too."""
    old = make("diloco", sync_interval=5)
    new = make("cocodc", **FRAGMENTS)
    state = finish(old, start(old), 7)
    params, outer, momentum = host(
        (state.region.params, old.outer_params(state), state.sync.outer.opt_states)
    )
    state, kept, lost = new.adopt(state, old)
    assert set(lost) == {"schedule"}
    assert kept["outer optimizer"] == "cut anew"
    assert state.sync.schedule == new.method.schedule.begin_at(7)
    assert_same((state.region.params, new.outer_params(state)), (params, outer))
    traces = [{**s[0].trace} for s in state.sync.outer.opt_states]
    expected = old.fragments.join([momentum[0][0].trace])
    assert_same(new.fragments.join(traces), expected)
    after = finish(new, state, 8)
    assert after.sync.schedule.last_start != (7, 7)


def test_another_mesh_loses_nothing():
    def on(**axes):
        mesh = cc.make_mesh(2, devices=jax.devices()[:4], **axes)
        return make("streaming_diloco", 2, mesh=mesh, **FRAGMENTS, compress="ef+int4")

    old = on(data=2)
    assert on(expert=2).adopt(start(old), old).lost == {}


def test_a_program_that_is_used_no_more_is_freed():
    program = make_program("streaming_diloco", **FRAGMENTS)
    state = finish(program, start(program), 9)
    executor = weakref.ref(program._syncs)
    del program, state
    gc.collect()
    assert executor() is None


def test_another_interval_loses_only_the_schedule():
    new = make("diloco", sync_interval=4)
    state, _, lost = adopted(new, make("diloco", sync_interval=5), 7)
    assert lost == {"schedule": "it begins after step 7"}
    assert new.steps_to_event(state) == 1


def test_another_optimizer_continues_the_learning_rate_schedule():
    rate = optax.linear_schedule(0.1, 0.0, 10)
    old = make("diloco", optimizer=optax.adamw(rate), sync_interval=5)
    new = make("diloco", optimizer=optax.sgd(rate), sync_interval=5)
    state, kept, lost = adopted(new, old, 7)
    assert set(lost) == {"inner optimizer"}
    assert lost["inner optimizer"].startswith("0/count was int32[] and is not there")
    assert kept["learning rate"] == "its schedule goes on"
    (count,) = jax.tree.leaves(state.region.opt_state)
    assert count.tolist() == [7] * 4
    # The rate is 0 from step 10 on.
    there = finish(new, state, 3)
    params = host(there.region.params)
    assert_same(finish(new, there, 1).region.params, params)


def test_a_fragment_in_flight_is_applied_at_once():
    """Applied at step 4, one after it left: as with a delay of one step."""
    old = streaming()
    short = streaming(delay_steps=1)
    new = make("diloco", sync_interval=5)
    expected = finish(short, start(short), 4)
    state = finish(old, start(old), 4)
    ((fragment, step),) = state.sync.in_flight
    outer, params = host((short.outer_params(expected), expected.region.params))
    state, kept, lost = new.adopt(state, old)
    assert kept["in flight"] == f"fragment {fragment} of step {step}: applied at once"
    assert set(lost) == {"schedule"}
    assert_within_ulps(new.outer_params(state), outer)
    assert_within_ulps(state.region.params, params)


def test_a_fragment_in_flight_that_cannot_be_applied_is_dropped_and_named():
    adam = optax.adam(0.1)
    old = make("cocodc", optimizer=adam, curvature="hessian_vector", **FRAGMENTS)
    new = make("diloco", optimizer=adam, sync_interval=5)
    state = finish(old, start(old), 4)
    params = host(state.region.params)
    flights = state.sync.in_flight
    state, _, lost = new.adopt(state, old)
    names = ", ".join(f"fragment {k} of step {step}" for k, step in flights)
    assert lost["in flight"].startswith(f"{names}: not applied")
    assert_same(state.region.params, params)


def test_a_round_that_is_late_ends_early():
    """CO2's merge replaces the regions' progress: it leaves and is applied before."""
    old = make("co2", sync_interval=4)
    new = make("diloco", sync_interval=5)
    batches = np.repeat(BATCHES[:, :1], 8, axis=1)
    state = finish(old, start(old), 6, batches)
    before = state.bytes_sent
    state, kept, _ = new.adopt(state, old)
    assert kept["in flight"] == "fragment 0 of step 4: applied at once"
    assert state.bytes_sent - before == 4 * 9
    expected = jax.tree.map(lambda y: np.stack([y] * 4), host(new.outer_params(state)))
    assert_all_close(host(state.region.params), expected, rtol=1e-5)


def test_a_late_schedule_begins_with_messages_of_zero():
    new = make("co2", sync_interval=4)
    state, _, lost = adopted(new, make("diloco", sync_interval=5), 5)
    assert "schedule" in lost
    (pending,) = state.sync.schedule.in_flight
    assert (pending.start_step, pending.apply_step) == (0, 8)
    (flight,) = state.sync.in_flight.values()
    assert not any(np.any(x) for x in jax.tree.leaves(flight.mean))
    state = finish(new, state, 12)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.region.params))


@pytest.mark.parametrize("name", ["data_parallel", "noloco", "mla", "apart"])
def test_any_method_adopts_any_other(name):
    options = {"sync_interval": 6} if name in ("noloco", "mla") else {}
    other = make(name, **options)
    regular = streaming()
    state, _, _ = adopted(regular, other, 4)
    state = finish(regular, state, 4)
    back, _, lost = other.adopt(state, regular)
    assert ("outer model" in lost) == (other.method.sync is None)
    assert (back.step, back.sync is None) == (8, other.method.sync is None)
    assert finish(other, back, 3).step == 11


def test_a_models_state_goes_along():
    def stateful(params, state, batch, key):
        loss, aux = loss_fn(params, batch, key)
        return loss, (aux, {"mean": (state["mean"] + batch) / 2})

    diloco = cc.methods.get("diloco", sync_interval=9)
    old, new, other = (
        cc.RegionProgram(
            stateful,
            SGD,
            diloco,
            PARAMS,
            regions,
            model_state=cc.ModelState({name: jnp.zeros(3)}),
        )
        for regions, name in ((4, "mean"), (2, "mean"), (2, "var"))
    )
    state = finish(old, start(old), 4)
    mean = host(state.region.model_state["mean"]).mean(0)
    state, kept, _ = new.adopt(state, old)
    assert kept["model_state"] == "the mean of 4 regions"
    means = host(state.region.model_state["mean"])
    np.testing.assert_allclose(means, np.stack([mean] * 2), rtol=1e-6)
    _, _, lost = other.adopt(state, new)
    assert lost == {"model_state": "mean was float32[3] and is not there"}


def test_a_state_of_another_model_is_refused():
    old = make("diloco")
    params = PARAMS | {"b": np.zeros(4, np.float32)}
    new = cc.RegionProgram(loss_fn, SGD, cc.methods.get("diloco"), params, 4)
    with pytest.raises(ValueError, match=r"a leaf 'b' of float32\[3\], but the pro"):
        new.adopt(start(old), old)


# --- Counts of schedules ---


def regional(optimizer):
    return jax.vmap(optimizer.init)({"w": jnp.ones((2, 3))})


def test_only_counts_of_schedules_are_set_to_the_step():
    rate = optax.linear_schedule(0.1, 0.0, 100)
    scheduled = optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    state = regional(optax.chain(scheduled, optax.scale_by_schedule(rate)))
    state = at_step(state, np.array([7, 3]))
    count_leaves = optax.tree_utils.tree_get_all_with_path(state, "count")
    counts = {path[-1].tuple_name: count.tolist() for path, count in count_leaves}
    assert counts.pop("ScaleByAdamState") == [0, 0]
    assert counts.keys() >= {"ScaleByScheduleState", "WrappedScheduleState"}
    assert all(count == [7, 3] for count in counts.values())

    # Each leaf may be donated.
    leaves = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_a_state_without_schedules_is_unchanged_at_another_step():
    state = regional(optax.adam(0.1))
    assert at_step(state, np.array([7, 3])) is state


def test_a_schedule_inside_of_an_accumulation_goes_on_at_its_updates():
    """Step 12 is update 3 of four steps each: not 12, at which the rate is lower."""
    rate = optax.linear_schedule(0.1, 0.0, 20)
    every_four = optax.MultiSteps(optax.sgd(rate), 4)
    wrapped = optax.chain(optax.clip(9.0), every_four.gradient_transformation())
    for optimizer in (every_four, wrapped):
        new = make("diloco", optimizer=optimizer, sync_interval=4)
        state, kept, lost = adopted(new, make("diloco", sync_interval=4), 12)
        assert kept["learning rate"] == "its schedule goes on"
        assert "accumulation" not in lost
        (node,) = nodes_of(MULTI_STEPS, state.region.opt_state)
        assert node.gradient_step.tolist() == [3] * 4
        (schedule,) = nodes_of(SCHEDULE, node.inner_opt_state)
        assert schedule.count.tolist() == [3] * 4


def test_an_accumulation_that_begins_between_two_updates_keeps_time():
    """Otherwise it would make its updates between the events, at 9, 13, ..."""
    new = make("diloco", optimizer=optax.MultiSteps(SGD, 4), sync_interval=4)
    state, _, lost = adopted(new, make("diloco", sync_interval=4), 5)
    assert lost["accumulation"] == "the first update has gradients of 3 steps, not 4"
    assert state.region.opt_state.mini_step.tolist() == [1] * 4
    before = host(state.region.params)
    after = host(finish(new, state, 2).region.params)
    assert_same(before, after)


def test_a_schedule_of_unknown_updates_is_reported():
    rate = optax.linear_schedule(0.1, 0.0, 20)
    by_step = optax.MultiSteps(optax.sgd(rate), lambda step: jnp.where(step > 1, 4, 2))
    with pytest.warns(UserWarning, match="counts calls of the optimizer"):
        new = make("diloco", optimizer=by_step, sync_interval=4)
    state, kept, lost = adopted(new, make("diloco", sync_interval=4), 8)
    assert "learning rate" not in kept
    assert "optax.MultiSteps makes an update after a num" in lost["learning rate"]
    (schedule,) = nodes_of(SCHEDULE, state.region.opt_state)
    assert schedule.count.tolist() == [0] * 4


def test_schedule_free_starts_each_region_at_its_own_parameters():
    free = optax.contrib.schedule_free_sgd(0.1)
    new = make("diloco", optimizer=free, sync_interval=5)
    state, _, lost = adopted(new, make("diloco", sync_interval=5), 4)
    params = host(state.region.params)

    assert "inner optimizer" in lost
    assert len({x.tobytes() for x in params["b"]}) == 4  # The regions differ.

    assert_same(host(state.region.opt_state.z), params)
    assert state.region.opt_state.step_count.tolist() == [5] * 4


def test_other_regions_draw_noise_of_their_own():
    noisy = optax.noisy_sgd(0.1, key=3)
    old = make("diloco", 4, optimizer=noisy, sync_interval=5)
    new = make("diloco", 2, optimizer=noisy, sync_interval=5)

    def keys(state):
        return np.asarray(jax.random.key_data(state.region.opt_state[0].rng_key))

    before = finish(old, start(old), 3)
    drawn = {key.tobytes() for key in (*keys(before), *keys(start(new)))}
    state, kept, _ = new.adopt(before, old)
    assert kept["inner optimizer"] == "the mean of 4 regions"
    drawn_after = {key.tobytes() for key in keys(state)}
    assert len(drawn_after) == 2
    assert not drawn_after & drawn
    assert state.region.opt_state[0].count.tolist() == [3] * 2
    # The same regions keep their keys.
    again = make("diloco", 2, optimizer=noisy, sync_interval=7)
    wanted = keys(state)
    np.testing.assert_array_equal(keys(again.adopt(state, new).state), wanted)
