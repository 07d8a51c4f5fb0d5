"""Methods whose regions are never equal: pairs, shared momenta, neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.core.sync import receive
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.methods.async_sparta import sparse_averages, subsets
from cocodc_jax.methods.noloco import PairMessage
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.transforms.compressor import identity
from cocodc_jax.transforms.outer import group_heavy_ball
from tests.program import tiny
from tests.program.tiny import follow


def moments(momentum, pull):
    """Return the moments (A, B, C) of one of many regions after a sync."""
    c = np.array([pull**2 / 2, momentum * pull, momentum**2])
    b = np.array([pull / 2, momentum, 0])  # E phi v'
    return np.stack([np.array([1, 0, 0]) - 2 * b + c, b - c, c])


def growth(momentum, pull):
    return np.abs(np.linalg.eigvals(moments(momentum, pull))).max()


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_the_border_of_stability_is_that_of_the_moments(momentum):
    """Found by halving, of the rule as the method's docstring has it."""
    low = 1e-3
    high = 4.0
    assert growth(momentum, low) < 1 < growth(momentum, high)

    while high - low > 1e-9:
        middle = (low + high) / 2
        if growth(momentum, middle) < 1:
            low = middle
        else:
            high = middle

    np.testing.assert_allclose(low, 2 * (1 - momentum**2), rtol=1e-6)


@functools.partial(jax.jit, static_argnames="rounds")
def spread(momentum, pull, seed, rounds, num_regions=1024):
    """Log of the RMS distance to the mean, `[rounds]`, of the package's own step.

    Each region is one number, paired with a random other one in every round.
    """
    optimizer = group_heavy_ball(0.7, momentum, pull)

    def sync(carry, key):
        phi, state = carry
        order = jax.random.permutation(key, num_regions)
        crossed = order.reshape(-1, 2)[:, ::-1].ravel()
        partner = jnp.zeros_like(order).at[order].set(crossed)

        step, state = optimizer.update(
            jnp.zeros_like(phi), state, phi, group_mean_params=(phi + phi[partner]) / 2
        )
        phi = phi + step
        return (phi, state), jnp.log(phi.std())

    first, *keys = jax.random.split(jax.random.key(seed), rounds + 1)
    phi = jax.random.normal(first, (num_regions,))
    carry = phi, optimizer.init(phi)
    return jax.lax.scan(sync, carry, jnp.stack(keys))[1]


@pytest.mark.parametrize("share", [11 / 12, 13 / 12])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_many_regions_that_meet_at_random_part_at_that_border(momentum, share):
    """A twelfth below the border regions converge, a twelfth above they diverge.

    Rates are those of the moments: to 0.02 a round, of 1024 regions.
    """
    border = 2 * (1 - momentum**2)
    pull = share * border

    path = np.asarray(spread(momentum, pull, 0, 60))
    rate = (path[-1] - path[20]) / (len(path) - 21)

    np.testing.assert_allclose(rate, np.log(growth(momentum, pull)) / 2, atol=0.02)
    assert (rate < 0) == (pull < border)


@pytest.mark.parametrize(
    "options", [{"outer_lr": 0.4}, {"outer_lr": 0.9, "pair_pull": 0.4}]
)
def test_the_pull_is_the_learning_rate_unless_it_is_given(options):
    params = jnp.float32(2)
    outer = methods.get("noloco", **options).sync.outer
    arrived = PairMessage(jnp.float32(1), jnp.float32(0))

    state = outer.init(params, identity())
    moved, _, norm = receive(outer, params, state, arrived, 4)

    np.testing.assert_allclose(moved, 2 - 0.4, rtol=1e-6)
    assert norm == 0  # Of the pseudo-gradient, without the parameters.


# --- DiLoCo with decoupled momentum ---


def momentum_after(num_regions, is_over_senders, num_rounds=60):
    """Its length in NumPy, where random pseudo-gradients of length 64 come in.

    b 0.95, 32 of 4096. The cosine transform is left out: it turns random numbers into
    random numbers.
    """
    rng = np.random.default_rng(0)
    d = np.zeros((num_regions, 4096))

    for _ in range(num_rounds):
        d = 0.95 * d + rng.normal(size=d.shape)
        sent = np.zeros(d.shape, bool)
        top = np.argpartition(-np.abs(d), 32, axis=1)[:, :32]
        np.put_along_axis(sent, top, True, axis=1)

        total = np.where(sent, d, 0).sum(0)
        senders = sent.sum(0)
        mean = total / (np.maximum(senders, 1) if is_over_senders else num_regions)
        d = np.where(sent, 0, d) + mean
    return np.linalg.norm(d, axis=1).max()


def test_a_mean_over_senders_diverges_and_one_over_all_regions_does_not():
    """In a mean over senders, all four regions get the full message of one region.

    In the next round it is in the top of every region, and grows. With two regions it
    does not.
    """
    free = 64 / np.sqrt(1 - 0.95**2)  # A momentum without messages.
    for num_regions in (2, 4):
        assert momentum_after(num_regions, is_over_senders=False) < 1.5 * free
    assert momentum_after(2, is_over_senders=True) < 1.5 * free
    assert momentum_after(4, is_over_senders=True) > 1e10


# --- LT-ADMM-CC: the sign of its z update, its rest, and that it gets there ---

# f_i(x) = a_i (x - b_i)^2 / 2 of four regions: curvatures and minimisers all differ.
CURVATURES = np.array([0.5, 1.0, 2.0, 1.5])
MINIMISERS = np.array([4.0, -2.0, 1.0, 3.0])
LR = 0.1
RHO = 0.5
ROUNDS = 400
OPTIMUM = (CURVATURES * MINIMISERS).sum() / CURVATURES.sum()


def published(sign):
    """LT-ADMM on a ring, edge by edge, with 2 rho x_j added or taken off."""
    x = np.zeros(4)
    z = np.zeros((4, 4))
    edges = [(i, (i + by) % 4) for i in range(4) for by in (1, -1)]

    for _ in range(ROUNDS):
        for _ in range(3):
            pull = np.array([z[i, (i + 1) % 4] + z[i, i - 1] for i in range(4)])
            x = x - LR * (CURVATURES * (x - MINIMISERS) + 2 * RHO * x - pull)
        old = z.copy()
        for i, j in edges:
            z[i, j] = (old[i, j] - old[j, i] + sign * 2 * RHO * x[j]) / 2
    return x


def test_with_a_plus_the_dual_update_reaches_the_minimiser_of_the_sum():
    np.testing.assert_allclose(published(1), OPTIMUM, atol=1e-12)


def test_with_a_minus_the_dual_update_never_reaches_it():
    """Neighbours diverge, and the fixed point is another one."""
    assert np.abs(published(-1)).min() > 1e6
    elsewhere = (CURVATURES * MINIMISERS).sum() / (CURVATURES.sum() + 4 * RHO * 4)
    assert abs(elsewhere - OPTIMUM) > 0.5


@pytest.mark.parametrize(
    ("graph", "compress"), [("ring", "int8"), ("complete", "topk:0.5")]
)
def test_regions_reach_the_exact_minimiser(graph, compress):
    """Also with messages of half or a quarter of the entries.

    Two numbers a region, so that top-k leaves one out.
    """

    def loss_fn(params, batch, key):
        return (batch[0] * (params["w"] - batch[1]) ** 2).sum() / 2, {}

    with jax.enable_x64(True):
        params = {"w": np.zeros(2)}
        method = methods.get(
            "lt_admm", sync_interval=3, admm_penalty=RHO, graph=graph, compress=compress
        )
        program = RegionProgram(
            loss_fn,
            optax.sgd(LR),
            method,
            params,
            4,
            mesh=make_mesh(4, devices=jax.devices()[:1]),
        )

        state = program.init(params, jax.random.key(0))
        minimisers = np.stack([MINIMISERS, 2 - MINIMISERS], 1)
        curvatures = np.stack([CURVATURES, CURVATURES], 1)
        batch = np.stack([curvatures, minimisers], 1)
        state, _ = follow(program, state, [batch] * 3 * ROUNDS, 3 * ROUNDS)

        local = np.asarray(state.region.params["w"])
        outer = np.asarray(program.outer_params(state)["w"])

    expected = np.array([OPTIMUM, 2 - OPTIMUM])
    # Scales of int8 are float32: a sent value and the received one may differ by its
    # rounding, as the compiler fuses both.
    atol = 1e-5 if compress == "int8" else 1e-9
    np.testing.assert_allclose(local, np.tile(expected, (4, 1)), atol=atol)
    np.testing.assert_allclose(outer, expected, atol=atol)


@pytest.mark.parametrize("num_steps", [6, 7])
def test_a_landed_region_has_every_mean_of_eager_once(num_steps):
    """At a slot and between two: all regions end at one outer model."""
    method = methods.get("eager", sync_interval=3, outer_lr=0.5, outer_momentum=0.0)
    program = tiny.program_of(method)
    state, _ = tiny.finish(program, tiny.start(program), num_steps)
    state, _ = program.land(state)
    for leaf in jax.tree.leaves(state.sync.outer.params):
        np.testing.assert_allclose(leaf, np.broadcast_to(leaf[:1], leaf.shape), 1e-5)


# --- Sparse averages ---


def test_a_cycle_has_every_position_once_and_the_next_has_another_order():
    """Of sizes that the subsets do not divide, and of a tensor smaller than them."""
    part = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(7), "c": jnp.zeros(2)}

    def cycle(first):
        turns = range(first, first + 5)
        drawn = [subsets(0.2, 3, jnp.int32(turn), part) for turn in turns]
        return {name: np.concatenate([x[name] for x in drawn]) for name in "ab"}

    orders = [cycle(0), cycle(5)]
    for order in orders:
        for name, size in (("a", 12), ("b", 7)):
            assert sorted(order[name][order[name] < size]) == list(range(size))
            assert len(order[name]) == 5 * -(-size // 5)  # The rest is after the end.
    assert (orders[0]["a"] != orders[1]["a"]).any()

    of_two = [int(subsets(0.2, 3, jnp.int32(t), part)["c"][0]) for t in range(4)]
    assert sorted(of_two[:2]) == sorted(of_two[2:]) == [0, 1]


def test_a_mean_that_lands_alone_has_the_subset_that_was_sent():
    """One number: sent at 4 with a mean of 6, after progress of 1 it lands as 6.5."""
    outer = sparse_averages(1.0, 0, 0.5, is_delayed=True)
    key = jax.random.key(0)
    zero = {"w": jnp.zeros(1)}

    def at(value):
        return {"w": jnp.full(1, value)}

    params = zero
    state = outer.init(zero, identity())
    _, state = outer.send(params, state, at(3.0), identity(), key)
    params, state = outer.receive(params, state, at(0.0), 2)
    assert params == at(3.0)  # A message from before the first step is no mean.

    _, state = outer.send(params, state, at(4.0), identity(), key)  # d = 1
    params, state = outer.receive(params, state, at(5.0), 2)
    assert params == at(6.0)

    assert outer.land is not None
    params, state = outer.receive(params, outer.land(state), at(5.5), 2)
    assert params == at(6.5)  # The mean of what left at 4, and d.
    assert not state.is_landing


def test_a_region_that_is_not_finite_leaves_no_trace_in_the_state():
    outer = sparse_averages(1.0, 0, 0.5, is_delayed=True)
    zero = {"w": jnp.zeros(1)}
    state = outer.init(zero, identity())
    for value in (1.0, np.nan):
        local = {"w": jnp.full(1, value)}
        _, state = outer.send(zero, state, local, identity(), jax.random.key(0))

    assert state.num_syncs == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    params, _ = outer.receive(zero, state, {"w": jnp.full(1, 2.0)}, 2)
    assert params == {"w": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_density": 0.0}, "mask_density=0.0 must be above 0 and at most 1"),
        ({"mask_seed": -1}, "mask_seed=-1 must be at least 0"),
        ({"progress_decay": 1.0}, "progress_decay=1.0 must be at least 0 and below 1"),
        ({"compress": "int8"}, "compress='int8' .* its messages are parameters"),
    ],
)
def test_arguments_of_async_sparta_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        methods.get("async_sparta", **options)
