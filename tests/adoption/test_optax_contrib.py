"""Every optimizer of the installed Optax under a sync: correct, or refused by name.

Correct means equal to a plain loop, which is written here without this package:
regions that train alone, and a mean and an outer step every INTERVAL steps. What a
merge does to a state that holds a copy of the parameters is written here as well.
"""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import cocodc_jax as cc
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

NUM_REGIONS = 2
INTERVAL = 2
NUM_ROUNDS = 3
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
METHOD = cc.methods.get(
    "diloco", sync_interval=INTERVAL, outer_lr=0.7, outer_momentum=0.9
)
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(4, 3)).astype(np.float32),
    "b": RNG.normal(size=3).astype(np.float32),
}
# Regions have different targets, so that their copies differ.
BATCHES = {
    "x": RNG.normal(size=(NUM_ROUNDS, INTERVAL, NUM_REGIONS, 5, 4)),
    "y": RNG.normal(size=(NUM_ROUNDS, INTERVAL, NUM_REGIONS, 5, 3))
    + np.array([2.0, -1.0])[:, None, None],
}
BATCHES = jax.tree.map(lambda x: x.astype(np.float32), BATCHES)
RATE = 0.05
EXTRAS = ("value", "value_fn", "grad", "obj_fn")
OF_SEARCH = EXTRAS[:3]  # A line search passes unknown arguments on to `value_fn`.


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer that is correct under a sync.

    Attributes:
      optimizer: an instance.
      on_merge: `(state, new minus old parameters) -> state`, by hand.
      in_region: `(state, region) -> state`, random state of a region's own, by hand.
      extras: extra arguments that it takes.
      per_example: whether it takes the gradient of each example.
      has_fixed_state: whether its state keeps its structure, as a scan needs.
    """

    optimizer: Any
    on_merge: Callable | None = None
    in_region: Callable | None = None
    extras: tuple[str, ...] = EXTRAS
    per_example: bool = False
    has_fixed_state: bool = True


def down(transform, **options):
    """A transform that only scales, as an optimizer."""
    return Case(optax.chain(transform, optax.scale(-RATE)), **options)


def moves(field, place=()):
    """Move one field of the state at a place in states of chains."""

    def on_merge(state, change):
        if place:
            first, *rest = place
            inner = moves(field, rest)(state[first], change)
            return (*state[:first], inner, *state[first + 1 :])
        moved = jax.tree.map(jnp.add, getattr(state, field), change)
        return state._replace(**{field: moved})

    return on_merge


def draws(field, place=()):
    """Fold the region, unless it is the first, into a key in states of chains."""

    def in_region(state, region):
        if place:
            first, *rest = place
            inner = draws(field, rest)(state[first], region)
            return (*state[:first], inner, *state[first + 1 :])
        key = getattr(state, field)
        return state._replace(
            **{field: jax.random.fold_in(key, region) if region else key}
        )

    return in_region


def flattened(state, change):
    leaves = [x.reshape(-1) for x in jax.tree.leaves(change)]
    return state._replace(z=state.z + jnp.concatenate(leaves))


def searched(place=()):
    """A line search's last value belongs to parameters that are gone."""

    def on_merge(state, change):
        first, *rest = place
        inner = state[first]

        if rest:
            inner = searched(rest)(inner, change)
        else:
            inner = inner._replace(value=jnp.full_like(inner.value, jnp.inf))

        return (*state[:first], inner, *state[first + 1 :])

    return on_merge


def deprecated(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make()


def by_rate(name):
    return Case(deprecated(lambda: getattr(optax, name)(RATE)))


def matrices(tree):
    return jax.tree.map(lambda x: contrib.MuonDimensionNumbers(), tree)


W_ONLY = {"w": True, "b": False}
LABELS = {"w": "one", "b": "other"}
PARTS = {"one": optax.sgd(RATE), "other": optax.adam(RATE)}
FREE = contrib.schedule_free_sgd(RATE)
PLAIN_RATES = (
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan",
    "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd",
    "optimistic_adam", "optimistic_adam_v2", "optimistic_gradient_descent", "radam",
    "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi",
)  # fmt: skip
PLAIN_SCALES = (
    "scale_by_adadelta", "scale_by_adam", "scale_by_adamax", "scale_by_adan",
    "scale_by_amsgrad", "scale_by_belief", "scale_by_distance_over_gradients",
    "scale_by_factored_rms", "scale_by_lion", "scale_by_novograd",
    "scale_by_optimistic_gradient", "scale_by_param_block_norm",
    "scale_by_param_block_rms", "scale_by_radam", "scale_by_rms", "scale_by_rss",
    "scale_by_sign", "scale_by_sm3", "scale_by_stddev", "scale_by_trust_ratio",
    "scale_by_yogi", "centralize", "identity", "normalize_by_update_norm",
    "set_to_zero", "zero_nans",
)  # fmt: skip
CASES: dict[str, Case] = {
    **{f"optax.{name}": by_rate(name) for name in PLAIN_RATES},
    **{f"optax.{name}": down(getattr(optax, name)()) for name in PLAIN_SCALES},
    "optax.MultiSteps": Case(optax.MultiSteps(optax.adam(RATE), 2)),
    "optax.adafactor": Case(optax.adafactor(RATE, min_dim_size_to_factor=2)),
    "optax.adaptive_grad_clip": down(optax.adaptive_grad_clip(0.1)),
    "optax.add_decayed_weights": down(optax.add_decayed_weights(0.1)),
    "optax.add_noise": down(
        optax.add_noise(0.1, 0.5, key=1), in_region=draws("rng_key", [0])
    ),
    "optax.apply_every": down(optax.apply_every(2)),
    "optax.apply_if_finite": Case(
        optax.apply_if_finite(FREE, 3),
        on_merge=lambda state, change: state._replace(
            inner_state=moves("z")(state.inner_state, change)
        ),
    ),
    "optax.chain": Case(optax.chain(optax.clip(1.0), FREE), moves("z", [1])),
    "optax.clip": down(optax.clip(0.1)),
    "optax.clip_by_block_rms": down(optax.clip_by_block_rms(0.1)),
    "optax.clip_by_global_norm": down(optax.clip_by_global_norm(0.1)),
    "optax.conditionally_mask": Case(
        optax.conditionally_mask(optax.sgd(RATE, 0.9), lambda step: step % 2 == 0)
    ),
    "optax.conditionally_transform": Case(
        optax.conditionally_transform(optax.sgd(RATE, 0.9), lambda step: step % 2 == 0)
    ),
    "optax.ema": down(optax.ema(0.9)),
    "optax.flatten": Case(optax.flatten(FREE), flattened),
    "optax.freeze": Case(optax.chain(optax.freeze(W_ONLY), optax.sgd(RATE))),
    "optax.inject_hyperparams": Case(
        optax.inject_hyperparams(optax.adam)(learning_rate=RATE)
    ),
    "optax.inject_stateful_hyperparams": Case(
        deprecated(
            lambda: optax.inject_stateful_hyperparams(optax.sgd)(learning_rate=RATE)
        )
    ),
    "optax.keep_params_nonnegative": Case(
        optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative())
    ),
    "optax.lbfgs": Case(optax.lbfgs(), searched([2]), extras=OF_SEARCH),
    "optax.masked": Case(
        optax.masked(FREE, W_ONLY),
        on_merge=lambda state, change: state._replace(
            inner_state=state.inner_state._replace(
                z={**state.inner_state.z, "w": state.inner_state.z["w"] + change["w"]}
            )
        ),
    ),
    "optax.measure_with_ema": Case(
        optax.chain(
            optax.monitor({"ema": optax.measure_with_ema(optax.tree.norm, 0.9)}),
            optax.sgd(RATE),
        ),
        has_fixed_state=False,
    ),
    "optax.monitor": Case(
        optax.chain(optax.monitor({"same": lambda x: x}), optax.sgd(RATE)),
        has_fixed_state=False,
    ),
    "optax.multi_transform": Case(optax.multi_transform(PARTS, LABELS)),
    "optax.named_chain": Case(optax.named_chain(("sgd", optax.sgd(RATE)))),
    "optax.noisy_sgd": Case(
        optax.noisy_sgd(RATE, key=1), in_region=draws("rng_key", [0])
    ),
    "optax.partition": Case(optax.partition(PARTS, LABELS)),
    "optax.polyak_sgd": Case(optax.polyak_sgd(RATE)),
    "optax.scale": Case(optax.scale(-RATE)),
    "optax.scale_by_backtracking_linesearch": Case(
        optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
        ),
        searched([1]),
        extras=OF_SEARCH,
    ),
    # Its last point stays: the gradient was taken there.
    "optax.scale_by_lbfgs": down(optax.scale_by_lbfgs(memory_size=1)),
    "optax.scale_by_learning_rate": Case(optax.scale_by_learning_rate(RATE)),
    "optax.scale_by_polyak": down(optax.scale_by_polyak()),
    "optax.scale_by_rprop": down(optax.scale_by_rprop(RATE)),
    "optax.scale_by_schedule": Case(
        optax.scale_by_schedule(optax.linear_schedule(-0.1, 0.0, 6))
    ),
    "optax.scale_by_zoom_linesearch": Case(
        optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)),
        searched([1]),
        extras=OF_SEARCH,
    ),
    "optax.selective_transform": Case(
        optax.selective_transform(optax.sgd(RATE), freeze_mask=W_ONLY)
    ),
    "optax.snapshot": Case(
        optax.chain(optax.snapshot("same", lambda x: x), optax.sgd(RATE))
    ),
    "optax.stateless": Case(
        optax.stateless(lambda g, p: jax.tree.map(lambda x: -RATE * x, g))
    ),
    "optax.stateless_with_tree_map": Case(
        optax.stateless_with_tree_map(lambda g, p: -RATE * g)
    ),
    "optax.trace": down(optax.trace(0.9)),
    "optax.with_extra_args_support": Case(
        optax.with_extra_args_support(optax.sgd(RATE))
    ),
    "optax.contrib.acprop": Case(contrib.acprop(RATE)),
    "optax.contrib.ademamix": Case(contrib.ademamix(RATE)),
    "optax.contrib.adopt": Case(contrib.adopt(RATE)),
    "optax.contrib.cocob": Case(contrib.cocob(), moves("init_particles", [2])),
    "optax.contrib.dadapt_adamw": Case(contrib.dadapt_adamw(estim_lr0=0.01)),
    "optax.contrib.differentially_private_aggregate": down(
        contrib.differentially_private_aggregate(1.0, 0.1, key=1),
        in_region=draws("rng_key", [0]),
        per_example=True,
    ),
    # Their initial points stay: where training began, wherever a merge led since.
    "optax.contrib.dog": Case(contrib.dog(init_step=("distance", 0.1))),
    "optax.contrib.dowg": Case(contrib.dowg(init_estim_sq_dist=0.1)),
    "optax.contrib.dpsgd": Case(
        deprecated(lambda: contrib.dpsgd(RATE, 1.0, 0.1, seed=1)),
        in_region=draws("rng_key", [0]),
        per_example=True,
    ),
    "optax.contrib.galore": Case(contrib.galore(RATE, rank=2)),
    "optax.contrib.hutchinson_estimator_diag_hessian": down(
        contrib.hutchinson_estimator_diag_hessian(), in_region=draws("key", [0])
    ),
    "optax.contrib.madgrad": Case(contrib.madgrad(RATE), moves("x0", [1])),
    "optax.contrib.mechanize": Case(contrib.mechanize(optax.sgd(RATE), s_init=0.1)),
    "optax.contrib.momo": Case(contrib.momo(RATE)),
    "optax.contrib.momo_adam": Case(contrib.momo_adam(RATE)),
    "optax.contrib.muon": Case(contrib.muon(RATE)),
    "optax.contrib.normalize": down(contrib.normalize()),
    "optax.contrib.prodigy": Case(contrib.prodigy(estim_lr0=0.01)),
    "optax.contrib.reduce_on_plateau": Case(
        optax.chain(optax.sgd(RATE), contrib.reduce_on_plateau(patience=1))
    ),
    "optax.contrib.sam": Case(
        contrib.sam(optax.sgd(RATE, 0.9), optax.sgd(0.1), sync_period=2),
        moves("cache"),
        extras=(),
    ),
    "optax.contrib.scale_by_acprop": down(contrib.scale_by_acprop()),
    "optax.contrib.scale_by_ademamix": down(contrib.scale_by_ademamix()),
    "optax.contrib.scale_by_adopt": down(contrib.scale_by_adopt()),
    "optax.contrib.scale_by_cocob": Case(
        contrib.scale_by_cocob(), moves("init_particles")
    ),
    "optax.contrib.scale_by_galore": down(contrib.scale_by_galore(rank=2)),
    "optax.contrib.scale_by_madgrad": Case(contrib.scale_by_madgrad(RATE), moves("x0")),
    "optax.contrib.scale_by_muon": down(
        optax.masked(contrib.scale_by_muon(weight_dimension_numbers=matrices), W_ONLY)
    ),
    "optax.contrib.scale_by_simplified_ademamix": down(
        contrib.scale_by_simplified_ademamix()
    ),
    "optax.contrib.schedule_free": Case(
        contrib.schedule_free(optax.adam(RATE, b1=0.0), RATE), moves("z")
    ),
    "optax.contrib.schedule_free_adamw": Case(
        contrib.schedule_free_adamw(RATE), moves("z")
    ),
    "optax.contrib.schedule_free_sgd": Case(FREE, moves("z")),
    "optax.contrib.simplified_ademamix": Case(contrib.simplified_ademamix(1e-3)),
    "optax.contrib.sophia": Case(
        contrib.sophia(RATE, update_interval=2),
        in_region=lambda state, region: (
            state[0]._replace(
                hessian_fn_state=draws("key")(state[0].hessian_fn_state, region)
            ),
            *state[1:],
        ),
    ),
    "optax.contrib.split_real_and_imaginary": Case(
        contrib.split_real_and_imaginary(FREE),
        on_merge=lambda state, change: state._replace(
            inner_state=moves("z")(state.inner_state, change)
        ),
        extras=(),
    ),
}
# With the error's words.
REFUSED = {
    "optax.lookahead": (
        optax.lookahead(optax.sgd(RATE), 2, 0.5),
        "optax.lookahead trains a pair of fast and slow parameters",
    ),
}


def factories():
    """All functions of Optax that return an optimizer, and its class that is one."""
    names = {"optax.MultiSteps"}

    for module in (optax, contrib):
        for name, value in inspect.getmembers(module, callable):
            function = getattr(value, "func", value)  # Of a partial.
            if name.startswith("_") or not inspect.isfunction(function):
                continue

            returns = inspect.signature(function).return_annotation
            text = str(returns)
            if returns is inspect.Signature.empty:
                text = inspect.getsource(function)
            if "GradientTransformation" in text or "chain(" in text:
                names.add(f"{module.__name__}.{name}")

    return names


def test_every_optimizer_of_optax_is_tested_or_refused():
    """A new one belongs into CASES, with what a merge does to its state, or REFUSED."""
    assert factories() == set(CASES) | set(REFUSED)


def example_loss(params, x, y):
    bias = jnp.broadcast_to(params["b"], y.shape)
    return jnp.mean((x @ params["w"] + bias - y) ** 2)


def loss_fn(params, batch):
    return example_loss(params, batch["x"], batch["y"])


def arguments(case, params, batch):
    """Gradient and extra arguments of a region's update."""

    def value_fn(params, **_):
        return loss_fn(params, batch)

    value, grad = jax.value_and_grad(value_fn)(params)
    extras = {"value": value, "value_fn": value_fn, "grad": grad, "obj_fn": value_fn}
    if case.per_example:
        of_one = jax.grad(example_loss)
        grad = jax.vmap(of_one, (None, 0, 0))(params, batch["x"], batch["y"])
    return grad, extras


def repeated(case, step, carry, xs):
    """A scan, or a loop where a state does not keep its structure."""
    if case.has_fixed_state:
        return jax.lax.scan(step, carry, xs)
    for i in range(len(jax.tree.leaves(xs)[0])):
        carry, _ = step(carry, jax.tree.map(lambda x, i=i: x[i], xs))
    return carry, None


def ours(case):
    """Parameters and optimizer state of all regions, by this package."""
    tx = cc.synchronized(case.optimizer, METHOD, axis_name="region")
    params = jax.tree.map(jnp.asarray, PARAMS)
    axes = (0, cc.sync_axes(METHOD))

    def step(carry, batch):
        params, state = carry
        grad, extras = arguments(case, params, batch)
        extras = {name: extras[name] for name in case.extras or EXTRAS}
        updates, state = tx.update(grad, state, params, **extras)
        return (optax.apply_updates(params, updates), state), None

    batches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), BATCHES)
    spread = jax.vmap(lambda x: x, None, axes, axis_size=NUM_REGIONS)
    carry, _ = jax.vmap(
        functools.partial(repeated, case, step),
        in_axes=(axes, 1),
        out_axes=(axes, None),
        axis_name="region",
    )(spread((params, tx.init(params))), batches)
    params, state = carry
    return params, state.inner


def plain(case):
    """The same by a plain loop over rounds."""
    optimizer = case.optimizer
    regions = range(NUM_REGIONS)
    outer_optimizer = optax.sgd(**OUTER)
    first = jax.tree.map(jnp.asarray, PARAMS)

    def stacked(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    def step(carry, batch):
        params, state = carry
        grad, extras = arguments(case, params, batch)
        extras = {name: extras[name] for name in case.extras}
        update = optimizer.update
        if extras:
            update = optax.with_extra_args_support(optimizer).update
        updates, state = update(grad, state, params, **extras)
        return (optax.apply_updates(params, updates), state), None

    def a_round(carry, batches):
        params, state, outer, outer_state = carry
        steps = functools.partial(repeated, case, jax.vmap(step))
        (params, state), _ = steps((params, state), batches)

        mean = jax.tree.map(lambda o, x: o - x.mean(0), outer, params)
        updates, outer_state = outer_optimizer.update(mean, outer_state, outer)
        outer = optax.apply_updates(outer, updates)

        old = params
        params = stacked([outer] * NUM_REGIONS)
        change = jax.tree.map(jnp.subtract, params, old)
        if case.on_merge is not None:
            state = jax.vmap(case.on_merge)(state, change)

        return (params, state, outer, outer_state), None

    state = optimizer.init(first)
    in_region = case.in_region or (lambda state, region: state)
    states = stacked([in_region(state, region) for region in regions])
    carry = stacked([first] * NUM_REGIONS), states, first, outer_optimizer.init(first)

    (params, state, *_), _ = repeated(case, a_round, carry, BATCHES)
    return params, state


def numbers(tree):
    """Leaves as arrays, keys as their data."""

    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(number, tree)


# Of each kind of state one: none, moments, masks, counts, accumulated gradients,
# copies of the parameters, a region's keys, values of a search, states inside others.
QUICK = (
    "optax.MultiSteps",
    "optax.adafactor",
    "optax.adam",
    "optax.apply_every",
    "optax.apply_if_finite",
    "optax.chain",
    "optax.conditionally_mask",
    "optax.flatten",
    "optax.inject_hyperparams",
    "optax.lbfgs",
    "optax.masked",
    "optax.monitor",
    "optax.noisy_sgd",
    "optax.partition",
    "optax.polyak_sgd",
    "optax.sgd",
    "optax.contrib.cocob",
    "optax.contrib.differentially_private_aggregate",
    "optax.contrib.dog",
    "optax.contrib.hutchinson_estimator_diag_hessian",
    "optax.contrib.madgrad",
    "optax.contrib.muon",
    "optax.contrib.reduce_on_plateau",
    "optax.contrib.sam",
    "optax.contrib.schedule_free_sgd",
    "optax.contrib.sophia",
)
# One program of several optimizers compiles faster than several programs.
BESIDE = sorted(CASES.keys() - set(QUICK))
GROUPS = [QUICK[::2], QUICK[1::2], BESIDE[::3], BESIDE[1::3], BESIDE[2::3]]


@functools.cache
def results_of(group):
    with warnings.catch_warnings():
        # Of conditions that leave out steps.
        warnings.simplefilter("ignore")

        def run():
            return {
                name: numbers((ours(CASES[name]), plain(CASES[name])))
                for name in GROUPS[group]
            }

        # Some of Optax's own promote ranks.
        with jax.numpy_rank_promotion("allow"):
            return jax.device_get(jax.jit(run)())


def results(name):
    """Parameters and state of an optimizer, by this package and by the plain loop."""
    (group,) = [i for i, names in enumerate(GROUPS) if name in names]
    return results_of(group)[name]


@pytest.mark.parametrize("name", mostly_slow(sorted(CASES), quick=QUICK))
def test_an_optimizer_moves_with_merges_as_expected(name):
    (params, state), (expected_params, expected_state) = results(name)

    assert np.isfinite(params["w"]).all()
    # All regions are the outer model, to the rounding of their updates.
    np.testing.assert_allclose(params["w"][0], params["w"][1], rtol=1e-5, atol=1e-6)

    assert_all_close(params, expected_params, rtol=1e-4, atol=1e-5)
    assert_all_close(state, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_optimizers_are_refused_by_name(name):
    optimizer, message = REFUSED[name]
    tx = cc.synchronized(optimizer, METHOD, axis_name="region")
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)


def batch_loss(params, batch, key):
    return loss_fn(params, batch), {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("optax.MultiSteps", marks=pytest.mark.slow),
        "optax.noisy_sgd",
        pytest.param("optax.contrib.sam", marks=pytest.mark.slow),
        "optax.contrib.schedule_free_sgd",
    ],
)
def test_the_region_program_trains_what_the_transform_does(name):
    """One of each kind: accumulated, random, several steps for one, with a copy."""
    optimizer = CASES[name].optimizer
    program = cc.RegionProgram(batch_loss, optimizer, METHOD, PARAMS, NUM_REGIONS)
    state = program.init(PARAMS, jax.random.key(0))

    for i in range(NUM_ROUNDS):
        batches = jax.tree.map(lambda x, i=i: x[i], BATCHES)
        state, _ = program.advance(state, batches)

    ends = jax.device_get(numbers((state.region.params, state.region.opt_state)))
    _, expected = results(name)
    assert_all_close(ends, expected, rtol=1e-4, atol=1e-5)
