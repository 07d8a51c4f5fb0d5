"""DiLoCoX against a NumPy reference, its limit, its resumption, its compilations.

The factors of a message are float32 whatever the parameters are, so the reference in
float64 is met to 1e-6 of the largest number of a tensor over the first rounds and a
change of rank, and to 1e-4 over all (4e-5 was seen): a power iteration cut at a rank
below the matrix's multiplies a difference from round to round. Where all is sent whole
nothing is float32, and 1e-12 holds.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transport import Transport
from cocodc_jax.methods.contrib.dilocox import dilocox
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync import merge
from cocodc_jax.sync.messages import Compressed
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import one_step_stale
from cocodc_jax.train import joining
from cocodc_jax.train.run_steps import run_steps as run
from cocodc_jax.transforms.error_feedback import error_feedback
from cocodc_jax.transforms.low_rank import low_rank
from tests.numerics import assert_within, assert_within_ulps
from tests.program import tiny
from tests.slow import mostly_slow

LR = 0.3
OUTER_LR = 0.7
MOMENTUM = 0.5
SGD = optax.sgd(LR)
NUM_REGIONS = 4
NUM_STEPS = 48
# Leaves in the order of a tree. `v` is sent in full at rank 6, but not at 3 and 1.
SHAPES = {"b": (3,), "v": (8, 7), "w": (16, 14)}


def make_targets():
    """Targets `[T, R, 16, 14]`: near one direction for all, then every way."""
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.normal(size=(16, 14)))[0]
    right = np.linalg.qr(rng.normal(size=(14, 14)))[0]
    thin = left @ np.diag(8 * 0.1 ** np.arange(14)) @ right
    whole = 0.6 * rng.normal(size=(1, 16, 14)) + 0.6 * rng.normal(size=(4, 16, 14))

    targets = []
    for step in range(NUM_STEPS):
        noise = 0.004 * rng.normal(size=whole.shape)
        targets.append((thin if step < 22 else whole) + noise)

    return np.stack(targets).astype(np.float32)


TARGETS = make_targets()
PARAMS = {
    name: 0.02 * np.random.default_rng(1).normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
RATES = {"outer_lr": OUTER_LR, "outer_momentum": MOMENTUM}
ADAPTIVE = dilocox(6, 6, 1, **RATES)


def aims(target):
    """Return the target of each tensor, in one region or in all."""
    return {"b": target[..., 0, :3], "v": target[..., :8, :7], "w": target}


def loss_fn(params, target, key):
    gaps = jax.tree.map(lambda x, aim: jnp.sum((x - aim) ** 2), params, aims(target))
    return sum(gaps.values()) / 2, {}


def make(method, dtype=np.float32, num_shards=2, data=1, optimizer=SGD):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    mesh = make_mesh(NUM_REGIONS, data, devices=jax.devices()[: num_shards * data])
    program = RegionProgram(loss_fn, optimizer, method, params, NUM_REGIONS, mesh=mesh)
    return program, start(program, params)


def start(program, params=PARAMS):
    return program.init(params, jax.random.key(0))


def train(program, state, until=NUM_STEPS, dtype=np.float32):
    """Run to step `until`; return the state, and an observation after every event."""
    seen = []
    batches = iter(TARGETS[state.step :].astype(dtype))
    for after, output in run(program, state, batches, until - state.step):
        state = after

        memory = state.sync.schedule
        syncs = [(s.start_step, s.num_bytes) for s in output.syncs]
        round_steps = getattr(memory, "round_steps", 0)  # Of ranked rounds only.
        rounds = (state.step, memory.rank, round_steps, state.bytes_sent, syncs)
        parts = (state.region.params, program.outer_params(state))
        seen.append((rounds, *jax.device_get(parts)))

    return state, seen


# --- The reference ------------------------------------------------------------


def is_whole(shape, rank):
    return len(shape) < 2 or rank * sum(shape) >= shape[0] * shape[1]


def fresh(index, shape, rank):
    """The random start of the power iteration: given, as every draw is."""
    key = jax.random.fold_in(jax.random.key(0), index)
    return np.asarray(jax.random.normal(key, (shape[1], rank), jnp.float32), np.float64)


def copies(x):
    return np.stack([x] * NUM_REGIONS)


def warm(old, rank):
    """The regions' right factors for another rank: cut, or grown by fresh columns."""
    new = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        if is_whole(shape, rank):
            continue
        q = copies(fresh(index, shape, rank))
        kept = old[name][..., :rank] if name in old else q[..., :0]
        new[name] = np.concatenate([kept, q[..., kept.shape[-1] :]], axis=-1)
    return new


def send(meant, right, is_summed):
    """Return each region's decoded message, its own part of it, and next right factors.

    Or of all regions' factors, summed one after the other.
    """
    mean = (lambda x: copies(x.mean(0))) if is_summed else (lambda x: x)
    arrives = {}
    decoded = {}
    factors = {}

    for name, x in meant.items():
        if name not in right:
            arrives[name] = mean(x)
            decoded[name] = x
            continue

        p, _ = np.linalg.qr(mean(x @ right[name]))
        factors[name] = mean(x.swapaxes(1, 2) @ p)
        arrives[name] = p @ factors[name].swapaxes(1, 2)
        decoded[name] = p @ (p.swapaxes(1, 2) @ x)

    return arrives, decoded, factors


def num_bytes(rank, itemsize=4, of_factors=4):
    return sum(
        math.prod(s) * itemsize if is_whole(s, rank) else of_factors * rank * sum(s)
        for s in SHAPES.values()
    )


def measure(mean):
    """exp of the entropy of the singular values, tensors by their size."""
    total = 0.0
    for x in mean.values():
        s = np.linalg.svd(np.atleast_2d(x), compute_uv=False)
        p = s / s.sum()
        total += x.size * np.exp(-np.sum(p * np.log(p)))
    return total / sum(x.size for x in mean.values())


def reference(first_rank, ranks, sync_interval, itemsize=4, is_summed=False):
    """All of a run in float64; gives the same as `train` after every round."""
    outer = {n: x.astype(np.float64) for n, x in PARAMS.items()}
    momentum = {n: np.zeros(s) for n, s in SHAPES.items()}
    local, residual = ({n: copies(x[n]) for n in SHAPES} for x in (outer, momentum))

    right = warm({}, first_rank)
    flight = dict(momentum)
    flight_bytes = 0
    started = 0
    rank = first_rank
    measured = []
    end = sync_interval
    total = 0
    seen = []

    for step, targets in enumerate(TARGETS.astype(np.float64), 1):
        local = {n: local[n] - LR * (local[n] - x) for n, x in aims(targets).items()}
        if step < end:
            continue

        if measured and len(ranks) > 1:
            wanted = np.mean(measured[-5:])
            new = min([r for r in ranks if r >= wanted], default=first_rank)
            if new != rank:
                right = warm(right, new)
            rank = new

        meant = {n: residual[n] + outer[n] - local[n] for n in SHAPES}
        arrives, decoded, right = send(meant, right, is_summed)
        residual = {n: meant[n] - decoded[n] for n in SHAPES}

        if started > 0:
            measured.append(measure(flight))
        syncs = [(started, flight_bytes)]

        for n, mean in flight.items():
            momentum[n] = MOMENTUM * momentum[n] + mean
            outer[n] = outer[n] - OUTER_LR * (mean + MOMENTUM * momentum[n])

        local = {n: copies(x) for n, x in outer.items()}
        flight = {n: x.mean(0) for n, x in arrives.items()}
        of_factors = itemsize if is_summed else 4
        flight_bytes = num_bytes(rank, itemsize, of_factors)

        started = step
        round_steps = math.ceil(sync_interval * rank / first_rank)
        total = total + flight_bytes
        end = step + round_steps
        state = (step, rank, round_steps, total, syncs)
        seen.append((state, local, dict(outer)))
    return seen, measured


def assert_close(seen, expected, tolerance):
    assert_within(*([row[1:] for row in rows] for rows in (seen, expected)), tolerance)


# --- Tests --------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_factors():
    """The method with float32 factors instead of int4, of which the reference knows."""
    ranked = dataclasses.replace(
        ADAPTIVE.sync.message, of=lambda rank: error_feedback(low_rank(rank))
    )
    return ADAPTIVE.with_sync(message=ranked)


def test_a_run_equals_the_formulas_of_the_paper(exact_factors):
    program, state = make(exact_factors)
    state, seen = train(program, state)
    expected, measured = reference(6, (6, 3, 1), 6)
    ranks = [rank for (_, rank, *_), *_ in expected]
    assert set(ranks) == {6, 3}

    # Ranks, lengths and bytes exactly; no mean is so near to a bucket's edge that
    # rounding could choose another.
    assert [row[0] for row in seen] == [row[0] for row in expected[: len(seen)]]

    settled = program.synchronize(state).sync.schedule
    np.testing.assert_allclose(settled.effective_ranks, measured[-5:], rtol=1e-4)
    assert ranks[:5] == [6, 6, 3, 3, 3]
    assert_close(seen[:5], expected[:5], 1e-6)
    assert_close(seen, expected, 1e-4)


def test_summed_factors_equal_their_formulas():
    """Factors are summed one after the other, as in PowerSGD, all in float64."""
    method = fixed(2, sum_factors=True)
    with jax.enable_x64(True):
        _, seen = train(*make(method, np.float64), until=24, dtype=np.float64)
    expected, _ = reference(2, (2,), 4, itemsize=8, is_summed=True)
    assert [row[0][3:] for row in seen] == [row[0][3:] for row in expected[: len(seen)]]
    assert_close(seen, expected[: len(seen)], 1e-10)


def test_summed_factors_follow_the_rank_and_go_on_bit_for_bit(tmp_path):
    method = dilocox(6, 6, 1, sum_factors=True, **RATES)
    program, state = make(method)

    state, before = train(program, state, 23)
    state, restored = tiny.saved_and_restored(program, state, tmp_path)

    state, seen = train(program, state, 36)
    restored, again = train(program, restored, 36)

    tiny.assert_same(*(tiny.numbers(program.synchronize(x)) for x in (state, restored)))
    assert [row for row, *_ in again] == [row for row, *_ in seen]
    assert {row[1] for row, *_ in before + seen} == {3, 6}


def late_diloco(sync_interval=4):
    outer = nesterov(OUTER_LR, MOMENTUM)
    schedule = one_step_stale(sync_interval)
    sync = Sync(schedule=schedule, outer=outer, merge=merge.replace())
    return Method(name="late", sync=sync)


def fixed(rank=64, **options):
    options = {"sync_interval": 4, "adaptive_rank": False} | RATES | options
    return methods.get("dilocox", rank=rank, **options)


def test_without_compression_dilocox_is_diloco_a_round_late():
    """Against the same mean by an all-reduce, and in float64 against the reference."""
    with jax.enable_x64(True):
        ends = [
            train(*make(method, np.float64), dtype=np.float64)[1]
            for method in (fixed(compress="none"), late_diloco())
        ]

    assert [row[0] for row in ends[0]] == [
        row[0][:1] + (0, 0) + row[0][3:] for row in ends[1]
    ]
    assert_close(*ends, 1e-13)
    assert_close(ends[0], reference(64, (64,), 4, itemsize=8)[0], 1e-12)


def test_a_rank_above_those_of_the_matrices_is_no_compression():
    whole = fixed().with_sync(message=Compressed(error_feedback(low_rank(64))))
    ends = (train(*make(method))[1] for method in (whole, fixed(compress="none")))
    assert_within_ulps(*ends)


def int4_bytes(shape):
    """Two codes a byte, and a float32 scale for each block of up to 256."""
    size = math.prod(shape)
    return math.ceil(size / 2) + 4 * math.ceil(size / 256)


def test_ranks_above_those_of_the_matrices_send_every_entry():
    """Ranks 64 to 16 send every entry; the run goes on and counts its bytes."""
    method = dilocox(4, 64, 16, **RATES)
    _, seen = train(*make(method), until=20)
    assert seen[-1][0][1] == 16
    for i, (row, *_) in enumerate(seen):
        assert row[3] == sum(map(int4_bytes, SHAPES.values())) * (i + 1)


def test_the_real_messages_are_counted(real):
    def message(rank):
        whole = [s for s in SHAPES.values() if is_whole(s, rank)]
        cut = [(n, rank) for s in SHAPES.values() if s not in whole for n in s]
        return sum(map(int4_bytes, whole + cut))

    ranks = [row[1] for row in real[2]]
    assert {a < b for a, b in itertools.pairwise(ranks) if a != b} == {True, False}
    for i, (_, _, _, sent, syncs) in enumerate(real[2]):
        assert sent == sum(map(message, ranks[: i + 1]))
        assert syncs[0][1] == (message(ranks[i - 1]) if i else 0)


@pytest.fixture(scope="module")
def real():
    program, state = make(ADAPTIVE)
    state, seen = train(program, state)
    return program, tiny.numbers(program.synchronize(state)), [row for row, *_ in seen]


@pytest.mark.parametrize("after", [-1, 0, 1])
@pytest.mark.parametrize("which", [0, -1])
def test_a_restored_run_goes_on_bit_for_bit(real, tmp_path, which, after):
    """Before, at and after the first and the last change, with a message in flight."""
    program, expected, rows = real
    changed = [new[0] for old, new in itertools.pairwise(rows) if old[1] != new[1]]

    state, _ = train(program, start(program), changed[which] + after)

    # With a program of its own, as in a new process; the last is enough for that.
    again = make(ADAPTIVE)[0] if (which, after) == (-1, 0) else program
    _, state = tiny.saved_and_restored(program, state, tmp_path, again)
    assert state.sync.in_flight

    state, _ = train(again, state)
    tiny.assert_same(tiny.numbers(again.synchronize(state)), expected)


def test_each_rank_is_compiled_once():
    """A change of rank that happened before compiles nothing."""
    turns = []
    program, state = make(ADAPTIVE)
    rank = state.sync.schedule.rank
    with tiny.compilations() as compiled:
        for after, _ in run(program, state, iter(TARGETS), NUM_STEPS):
            state = after
            turns.append(((rank, state.sync.schedule.rank), len(compiled)))
            rank = state.sync.schedule.rank
            compiled.clear()

    # The mean of the second round is the first to be measured: from then on.
    first = dict(reversed(turns[2:]))
    again = len(turns[2:]) - len(first)
    assert again > 4
    assert sum(n for _, n in turns[2:]) == sum(first.values())

    # What a change needs is the factors' new shape, and once for a rank its message
    # and a scan of its round.
    assert first == {(6, 3): 2, (3, 3): 1, (3, 6): 1, (6, 6): 0}


def test_shards_measure_the_same_ranks(real):
    """Two regions a device, and one a device, measure the same ranks."""
    _, seen = train(*make(ADAPTIVE, num_shards=4))
    assert [row[:4] for row, *_ in seen] == [row[:4] for row in real[2]]


@pytest.mark.slow
def test_a_divided_outer_state_measures_the_same_ranks(real):
    _, seen = train(*make(ADAPTIVE.placed("divided"), num_shards=4, data=2), 20)
    _, plain = train(real[0], start(real[0]), 20)
    assert [row for row, *_ in seen] == [row for row, *_ in plain]
    assert_close(seen, plain, 1e-4)


@pytest.mark.parametrize("sum_factors", mostly_slow([False, True], quick=[True]))
def test_an_adopted_run_goes_on_at_its_rank(sum_factors):
    """Another inner optimizer alone: all that the method remembers is kept."""
    method = dilocox(6, 6, 1, sum_factors=sum_factors, **RATES)
    program, state = make(method)
    state, _ = train(program, state, 19)
    assert state.sync.schedule.rank == 3

    before = jax.device_get(state.sync.compressors)
    other, _ = make(method, optimizer=optax.sgd(LR, 0.5))
    state, kept, lost = other.adopt(state, program)
    assert not lost
    assert kept["compressors"] == "of each region"
    tiny.assert_same(jax.device_get(state.sync.compressors), before)

    _, seen = train(other, state, 24)
    assert [row[1] for row, *_ in seen] == [3, 3]


@pytest.mark.parametrize("is_carried", [False, True])
def test_a_region_joins_at_the_rank_of_the_others(is_carried):
    """The joining region was cut off at the first rank, or is new."""
    place = Place(0, ("127.0.0.1:1", "127.0.0.1:2"), b"k" * 32)
    one = RegionProgram(
        loss_fn,
        SGD,
        ADAPTIVE,
        PARAMS,
        2,
        mesh=make_mesh(1),
        transport=Transport("elastic", place=place),
    )
    schedule = dataclasses.replace(
        start(one).sync.schedule, in_flight=(), sent_rank=3, round_steps=3
    )

    def begun(**changes):
        sync = dataclasses.replace(start(one).sync, **changes)
        return dataclasses.replace(start(one), sync=sync)

    copy = joining.copy_of(one, begun(schedule=schedule, in_flight={}))
    carried = None
    unsent = 0.0
    if is_carried:
        (compressor,) = start(one).sync.compressors
        unsent = 0.5
        residual = jax.tree.map(lambda x: x + unsent, compressor.residual)
        compressor = compressor._replace(residual=residual)
        carried = joining.Carried(begun(compressors=(compressor,)))

    state = joining.adopt(one, PARAMS, jax.random.key(0), copy, carried)
    assert state.sync.schedule.rank == 3

    memories = state.sync.compressors
    like = one.abstract(schedule).sync.compressors
    assert jax.tree.structure(memories) == jax.tree.structure(like)
    for x, shape in zip(*map(jax.tree.leaves, (memories, like)), strict=True):
        assert (x.shape, x.sharding) == (shape.shape, shape.sharding)
    for x in jax.tree.leaves(memories[0].residual):
        assert (np.asarray(x) == unsent).all()
