"""A battery for every entry of the table of methods, on a tiny regression.

Each lowers the loss, resumes bit for bit with a sync in flight, compiles nothing a
second time, and counts the bytes of its encoded messages.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.summed import ByRings
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.mt_adam import mt_adam
from tests.numerics import assert_all_close
from tests.program import tiny
from tests.slow import mostly_slow

NUM_STEPS = 16
CUT = 7

FRAGMENTS = {"sync_interval": 4, "num_fragments": 2}
# One round late, on short runs: the usual momentum overshoots.
GENTLE = {"outer_lr": 0.4, "outer_momentum": 0.5}
OPTIONS = {
    "data_parallel": {},
    "diloco": {"sync_interval": 2},
    "streaming_diloco": {**FRAGMENTS, "delay_steps": 2},
    "cocodc": {**FRAGMENTS, "delay_steps": 2, "syncs_per_interval": 2},
    "cocodc_paper": {**FRAGMENTS, "delay_steps": 2, "syncs_per_interval": 2},
    "loscar": {"sync_interval": 4, "delay_steps": 2},
    "async_sparta": {"sync_interval": 2, "mask_density": 0.3},
    "sparseloco": {"sync_interval": 2, "compress": "ef:0.95+chunked:2048+stat2"},
    "muloco": {"sync_interval": 2},
    "qsparse": {"sync_interval": 2},
    "multi_ring": {"sync_interval": 2},
    "snoo": {"sync_interval": 2},
    "gpa": {"eval_interpolation": 0.5},
    # So that a copy of the outer parameters is in flight as well.
    "co2": {"sync_interval": 2, "staleness_gap": "measured"},
    "dilocox": {"sync_interval": 2, "rank": 2, "adaptive_rank": False, **GENTLE},
    "eager": {"sync_interval": 2, **GENTLE},
    "noloco": {"sync_interval": 2},
    "diloco_demo": {"sync_interval": 2, "outer_momentum": 0.5, "compress": "dct:8"},
    "lt_admm": {"sync_interval": 2, "admm_penalty": 0.5},
    "des_loc": {"sync_interval": 2, "sync_moments": "2,3"},
    "mt_dao": {"sync_interval": 2, "sync_moments": "2,3"},
    "delayed_nesterov": {"sync_interval": 4},
    "mla": {"sync_interval": 4, "arrival_weight": 0.25},
    "heloco": {"sync_interval": 4, "arrival_weight": 0.25},
    "decoupled_diloco": {**FRAGMENTS, "answer_steps": "0,2,1,2", "grace_steps": 1},
    "demo": {"compress": "dct:8"},
    "distributed_lion": {},
    "dct_threshold": {"compress": "ef+threshold:0.3"},
    "apart": {},
}
UNEVEN = {
    name: Regions((1.0, 2.0, 1.0, 2.0), (4, 4, 4, 4))
    for name in ("delayed_nesterov", "mla", "heloco", "decoupled_diloco")
}
# Signs have no size: the step is the learning rate.
OPTIMIZERS = {
    "demo": optax.sgd(0.01),
    "distributed_lion": optax.sgd(0.01),
    "des_loc": optax.adam(0.02),
    "mt_dao": mt_adam(0.02),
}


# One of each kind of part; the rest are methods beside them.
QUICK = (
    "data_parallel", "streaming_diloco", "cocodc", "sparseloco", "co2", "dilocox",
    "noloco", "lt_admm", "des_loc", "heloco", "decoupled_diloco",
)  # fmt: skip


@pytest.fixture(params=mostly_slow(methods.METHODS, quick=QUICK))
def name(request):
    return request.param


def num_regions_of(name):
    return methods.get(name).num_regions or 4


def make(name, mesh=None, **options):
    regions = UNEVEN.get(name, num_regions_of(name))
    optimizer = OPTIMIZERS.get(name, optax.sgd(0.05))
    method = methods.get(name, **(OPTIONS[name] | options))
    return tiny.program_of(method, mesh, optimizer=optimizer, regions=regions)


# One program a method for all tests: it holds only compiled code.
shared = functools.cache(make)


@functools.cache
def trained(name):
    """Return a method's end after `NUM_STEPS`, run once; not to be donated."""
    return finish(shared(name), tiny.start(shared(name)), NUM_STEPS)


@pytest.fixture
def program(name):
    return shared(name)


def finish(program, state, num_steps):
    """One step after the other, so that one length of a scan is compiled."""
    outputs = []
    for batch in itertools.islice(tiny.stream(state.step), num_steps):
        batch = jax.tree.map(lambda x: x[None, : program.num_regions], batch)
        state, output = program.advance(state, batch)
        outputs.append(output)
    return state, outputs


def loss_of(params):
    """On a batch that no region trains on."""
    batch = jax.tree.map(np.concatenate, tiny.make_batch(9999))
    return float(tiny.mean_square(tiny.model(params, batch), batch))


def really_sent(program, state):
    """Bytes of one region's messages: of a fragment each, and of a step's exchange."""
    method = program.method
    sync = program.method.sync
    compressor = (sync and sync.message.compressor()) or identity()

    @jax.jit
    def encode(params, key):
        made = method.per_step
        step = ()
        if made is not None:
            memory = made.init(params)
            step, _ = made.send(params, memory, key)
        num_parts = method.num_fragments if sync else 0
        parts = [program.fragments.take(params, k) for k in range(num_parts)]
        return [of_fragment(part, key) for part in parts], step

    def of_fragment(part, key):
        outer = sync.outer
        if isinstance(outer, RegionalOuter):
            memory = outer.init(part, compressor)
            return outer.send(part, memory, part, compressor, key)[0]
        part = sync.message.average.before(part, key)
        return compressor.encode(part, compressor.init(part), key)[0]

    def num_bytes(message):
        return sum(np.asarray(x).nbytes for x in jax.tree.leaves(message))

    params = jax.tree.map(lambda x: np.array(x[0]), state.region.params)
    messages, step = encode(params, jax.random.key(0))
    return list(map(num_bytes, messages)), num_bytes(step)


def test_every_method_has_options_here():
    assert OPTIONS.keys() == methods.METHODS.keys()


def test_every_method_lowers_the_loss(program, name):
    state, outputs = trained(name)
    after = loss_of(jax.device_get(program.mean_params(state)))
    assert after < 0.9 * loss_of(tiny.make_params())
    assert all(np.isfinite(output.losses).all() for output in outputs)


def test_bytes_are_those_of_the_messages(program, name):
    state, outputs = trained(name)
    sync = program.method.sync
    schedule = program.method.schedule
    # No messages but partial sums, see test_collectives.py.
    if sync and isinstance(sync.message, ByRings):
        each_sync = [s.num_bytes for output in outputs for s in output.syncs]
        assert state.bytes_sent == sum(each_sync) > 0
        return

    fragment_bytes, each_step = really_sent(program, state)
    if program.num_regions == 1:
        assert state.bytes_sent == 0  # Without a receiver.
        return

    if sync and schedule.is_by_region:
        # Of 4 regions, each 4 times in 16 steps, one at a time.
        assert state.bytes_sent == fragment_bytes[0] * 4
        assert sum(len(output.syncs) for output in outputs) == 16
        return

    if sync and sync.moments:  # Of 8 syncs, 4 carry the first ones and 2 the second.
        (adam,) = [x for x in state.region.opt_state if hasattr(x, "nu")]
        moment_bytes = [
            sum(x[0].nbytes for x in jax.tree.leaves(y)) for y in (adam.mu, adam.nu)
        ]
        synced = sum(s.num_bytes for output in outputs for s in output.syncs)
        assert (
            state.bytes_sent
            == synced
            == 8 * fragment_bytes[0] + 4 * moment_bytes[0] + 2 * moment_bytes[1]
        )
        return

    sent = [s.fragment_id for output in outputs for s in output.syncs if s.num_bytes]
    in_flight = state.sync.schedule.in_flight if sync else ()
    flying = [
        fragment_bytes.fragment_id
        for fragment_bytes in in_flight
        if fragment_bytes.start_step
    ]
    expected = NUM_STEPS * each_step + sum(fragment_bytes[k] for k in sent + flying)

    assert state.bytes_sent == expected
    assert (expected > 0) == (program.method.name != "apart")

    for output in outputs:
        for applied in output.syncs:
            is_first = schedule.init().in_flight and applied.start_step == 0
            assert applied.num_bytes == (
                0 if is_first else fragment_bytes[applied.fragment_id]
            )


def test_a_restored_run_goes_on_bit_for_bit(program, tmp_path):
    """From between two events, with whatever is in flight or was left unsent."""
    state, _ = finish(program, tiny.start(program), CUT)
    state, restored = tiny.saved_and_restored(program, state, tmp_path)
    assert restored.step == CUT
    ends = []
    for begun in (state, restored):
        end, outputs = finish(program, begun, NUM_STEPS - CUT)
        ends.append((tiny.numbers(end), [tiny.host(x.losses) for x in outputs]))
    tiny.assert_same(*ends)


def test_no_program_is_compiled_after_the_first_cycle(program):
    state, _ = finish(program, tiny.start(program), NUM_STEPS)
    with tiny.compilations() as seen:
        finish(program, state, NUM_STEPS)
        tiny.start(program)
    assert not seen


@pytest.mark.parametrize("name", ["qsparse", "demo", "heloco"])
def test_four_regions_on_one_device_train_as_on_four(name):
    """To rounding; of each way to exchange one."""
    program = shared(name)
    assert dict(program.mesh.shape)["region"] == 4
    alone = make(name, make_mesh(4, devices=jax.devices()[:1]))
    ends = []
    for form in (program, alone):
        state, _ = finish(form, tiny.start(form), 8)
        ends.append(jax.device_get((state.region.params, form.outer_params(state))))
    assert_all_close(*ends, atol=1e-6)


def test_a_divided_outer_state_gives_the_same_in_halves():
    """Over the two devices of each region; of leaves with more than one number."""
    ends = []
    shares = []
    for place in ("divided", "host"):
        program = make("co2", make_mesh(4, 2), outer_placement=place)
        state, _ = finish(program, tiny.start(program), 8)
        ends.append(jax.device_get((state.region.params, program.outer_params(state))))
        leaves = [x for x in jax.tree.leaves(state.sync.outer) if x.size > 1]
        first = [x.addressable_shards[0].data.nbytes for x in leaves]
        shares.append(sum(first) / sum(x.nbytes for x in leaves))

    assert shares == [0.5, 1]
    assert_all_close(*ends, atol=1e-6)
