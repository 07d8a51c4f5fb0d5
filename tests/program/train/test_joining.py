"""A region that rejoins starts from a copy of another region's state."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.elastic.link import Link
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transport import Transport
from cocodc_jax.train import joining
from cocodc_jax.train.run_steps import run_steps as run
from tests.numerics import assert_all_close
from tests.program.elastic.meeting import places

pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation")

LEFT = 6
AGAIN = 13
END = 25


def make_program(tiny, method=None, place=None, **options):
    """DiLoCo, if no other method is given."""
    method = method or methods.get("diloco", sync_interval=4)
    transport = Transport("elastic", place=place or places(2)[0])
    return tiny.program_of(
        method, make_mesh(1), regions=2, transport=transport, **options
    )


def train(tiny, program, state, link, end, seen):
    """Train to `end`, admitting joiners; keep the outer parameters of every step."""
    region = link.region
    batches = (
        jax.tree.map(lambda x: x[region : region + 1], b)
        for b in tiny.stream(state.step)
    )

    for new, output in run(program, state, batches, end - state.step):
        state = new
        oldest = min((s for _, s in state.sync.in_flight), default=state.step)
        waiting = link.at(oldest)

        wait_until = time.monotonic() + 60
        while state.step == AGAIN and region == 0 and not waiting:
            assert time.monotonic() < wait_until
            time.sleep(0.01)
            waiting = link.at(oldest)

        for other, boot in waiting.items():
            if state.step >= AGAIN:  # One that comes sooner waits.
                link.let_in(other, boot, joining.copy_of(program, state), oldest)

        if output.syncs:
            seen[region, state.step] = tiny.host(state.sync.outer)

    return state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "streaming_diloco",
            {"num_fragments": 2, "delay_steps": 3},
            marks=pytest.mark.slow,
        ),
        ("cocodc", {"num_fragments": 2, "delay_steps": 3, "compress": "ef+topk:0.2"}),
    ],
)
def test_a_region_that_leaves_and_rejoins_has_the_outer_model_of_the_others(
    tiny, name, options
):
    method = methods.get(name, sync_interval=4, **options)
    one, two = places(2)
    seen = {}

    def stays():
        program = make_program(tiny, method, one)
        with Link(one, "run", joining.max_frame_bytes(program)) as link:
            program.exchange.link = link
            assert link.join(60) is None
            state = train(tiny, program, tiny.start(program), link, END, seen)
            assert program._steps._cache_size() == 1  # Of whatever length.
            return tiny.numbers(state)

    def leaves():
        program = make_program(tiny, method, two)
        size = joining.max_frame_bytes(program)
        with Link(two, "run", size) as link:
            program.exchange.link = link
            assert link.join(60) is None
            train(tiny, program, tiny.start(program), link, LEFT, seen)

        with Link(two, "run", size) as link:
            program.exchange.link = link
            copy = link.join(60)
            state = joining.adopt(program, tiny.make_params(), jax.random.key(0), copy)
            assert copy.step == state.step == AGAIN
            local = jax.tree.map(lambda x: x[0], state.region.params)
            tiny.assert_same(program.outer_params(state), local)
            return tiny.numbers(train(tiny, program, state, link, END, seen))

    with ThreadPoolExecutor() as pool:
        ends = [future.result() for future in [pool.submit(stays), pool.submit(leaves)]]
    compared = [step for region, step in seen if region == 1]
    assert min(compared) <= LEFT
    assert sum(step > AGAIN for step in compared) > 2
    for step in compared:
        tiny.assert_same(seen[0, step], seen[1, step])
    # The schedule, the step and the bytes sent are the same as well.
    assert ends[0][1:] == ends[1][1:]


def test_schedules_go_on_and_moments_are_fresh(tiny):
    rate = optax.linear_schedule(1.0, 0.0, 100)
    program = make_program(tiny, optimizer=optax.adam(rate))
    copy = joining.copy_of(program, tiny.start(program))
    later = copy.__class__(40, copy.header, copy.arrays)
    state = joining.adopt(program, tiny.make_params(), jax.random.key(0), later)
    adam, scheduled = state.region.opt_state
    assert (int(adam.count[0]), int(scheduled.count[0])) == (0, 40)
    assert scheduled.count.sharding == adam.count.sharding


def test_a_copy_of_the_parameters_moves_with_a_region_that_comes_back(tiny):
    program = make_program(tiny, optimizer=optax.contrib.schedule_free_sgd(0.1))
    copy, state = copy_and_step(tiny, program)
    before, z = tiny.host((state.region.params, state.region.opt_state.z))
    carried = joining.Carried(state)
    args = tiny.make_params(), jax.random.key(0), copy, carried
    region = joining.adopt(program, *args).region
    wanted = jax.tree.map(lambda z, x, y: z + y - x, z, before, region.params)

    for x, y in zip(*map(jax.tree.leaves, (region.opt_state.z, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

    # A region without state starts at the received one.
    fresh = joining.adopt(program, *args[:3]).region
    tiny.assert_same(tiny.host(fresh.opt_state.z), tiny.host(fresh.params))


def test_a_region_that_joins_draws_noise_of_its_own(tiny):
    program = make_program(tiny, optimizer=optax.noisy_sgd(0.1, key=3))
    state = tiny.start(program)
    key = np.asarray(jax.random.key_data(state.region.opt_state[0].rng_key))

    copy = joining.copy_of(program, state)
    later = copy.__class__(40, copy.header, copy.arrays)
    joined = joining.adopt(program, tiny.make_params(), jax.random.key(0), later)

    noise = joined.region.opt_state[0]
    assert not np.array_equal(jax.random.key_data(noise.rng_key), key)
    assert noise.count.tolist() == [40]


def copy_and_step(tiny, program):
    """Another region's copy, of other parameters; and the state after a step."""
    other = program.init(tiny.make_params(3), jax.random.key(0))
    batch = jax.tree.map(lambda x: x[None, :1], tiny.make_batch(0))
    state, _ = program.advance(tiny.start(program), batch)
    return joining.copy_of(program, other), state


@pytest.mark.parametrize("moved", [None, 1.0])
def test_progress_of_a_region_that_was_cut_off_is_kept(tiny, moved):
    """By hand: theta_g + (theta_m - theta_s), of any theta_s."""
    program = make_program(tiny)
    copy, state = copy_and_step(tiny, program)
    moments = tiny.host(state.region.opt_state)
    mine = tiny.host(state.region.params)
    outer = tiny.host(program.outer_params(state))
    if moved is None:
        carried = joining.Carried(state)
    else:
        shared = jax.tree.map(lambda x: x + moved, state.sync.outer.params)
        carried = joining.Carried(state, shared)

    joined = joining.adopt(
        program, tiny.make_params(), jax.random.key(0), copy, carried
    )

    tiny.assert_same(joined.region.opt_state, moments)
    tiny.assert_same(program.outer_params(joined), tiny.make_params(3))
    expected = jax.tree.map(
        lambda g, m, s: g + (m - s - (moved or 0.0)), tiny.make_params(3), mine, outer
    )
    assert_all_close(joined.region.params, expected, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_not_in_a_copy(tiny):
    """Each region has them from the start of the run; the rest moves as usual."""
    program = make_program(tiny, trainable=lambda path: path != "head")
    copy, state = copy_and_step(tiny, program)
    first = tiny.make_params()
    other = tiny.make_params(3)
    trained = sum(x.nbytes for x in jax.tree.leaves(first)) - first["head"].nbytes

    assert sum(map(len, copy.arrays)) == 2 * trained  # With the outer momentum.

    work = program.mean_params(state)["embed"] - first["embed"]
    for carried, moved in ((None, 0.0), (joining.Carried(state), work)):
        joined = joining.adopt(program, first, jax.random.key(0), copy, carried)
        outer = program.outer_params(joined)
        mean = program.mean_params(joined)
        np.testing.assert_array_equal(outer["head"], first["head"])
        np.testing.assert_array_equal(mean["head"], first["head"])
        np.testing.assert_array_equal(outer["embed"], other["embed"])
        np.testing.assert_allclose(mean["embed"], other["embed"] + moved, rtol=1e-5)


def test_a_copy_of_another_model_is_refused(tiny):
    program = make_program(tiny)
    copy = joining.copy_of(program, tiny.start(program))
    short = copy.__class__(
        copy.step, copy.header, (copy.arrays[0][:-4], *copy.arrays[1:])
    )
    args = (program, tiny.make_params(), jax.random.key(0))

    with pytest.raises(ValueError, match="an array of .* bytes where this program has"):
        joining.adopt(*args, short)

    more = copy.__class__(copy.step, copy.header, (*copy.arrays, b""))
    with pytest.raises(ValueError, match="more arrays than this program"):
        joining.adopt(*args, more)
