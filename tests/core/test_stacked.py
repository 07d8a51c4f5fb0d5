"""`stacked` in a trainer's own step: a mean loss over regions, one optimizer."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from tests.numerics import assert_all_close

NUM_REGIONS = 4
WIDTH = 4
NUM_STEPS = 9
METHOD = cc.methods.get(
    "streaming_diloco",
    sync_interval=4,
    num_fragments=2,
    delay_steps=1,
    mixing_alpha=0.5,
    outer_lr=0.4,
    outer_momentum=0.9,
)
ADAM = optax.adam(0.02, eps=1e-3)
BATCHES = np.random.default_rng(0).normal(size=(NUM_STEPS, NUM_REGIONS, 4, WIDTH))
BATCHES = BATCHES.astype(np.float32)


def make_params():
    rng = np.random.default_rng(1)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, 2)}
    return {
        name: {"kernel": rng.normal(0, 0.5, shape).astype(np.float32)}
        for name, shape in shapes.items()
    }


def loss_of(params, batch):
    hidden = jnp.tanh(batch @ params["a"]["kernel"])
    return jnp.mean((hidden @ params["b"]["kernel"] - 1) ** 2)


def in_all(tree):
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * NUM_REGIONS), tree)


@functools.cache
def plain_loop():
    """Streaming DiLoCo (arXiv 2501.18512, algorithm 2) in NumPy around Adam.

    Returns the parameters of all regions, leaves `[M, ...]`.
    """
    gradient = jax.jit(jax.vmap(jax.grad(loss_of)))
    step = jax.jit(jax.vmap(ADAM.update))

    params = jax.device_get(in_all(make_params()))
    state = jax.vmap(ADAM.init)(params)

    outer = {name: x["kernel"].astype(np.float64) for name, x in make_params().items()}
    momentum = {name: np.zeros_like(x) for name, x in outer.items()}
    in_flight = {}
    for number, batch in enumerate(BATCHES, start=1):
        updates, state = step(gradient(params, batch), state, params)
        params = jax.device_get(optax.apply_updates(params, updates))

        if number in in_flight:
            name, mean = in_flight.pop(number)
            momentum[name] = 0.9 * momentum[name] + mean
            outer[name] = outer[name] - 0.4 * (mean + 0.9 * momentum[name])
            mixed = 0.5 * params[name]["kernel"] + 0.5 * outer[name][None]
            params[name] = {"kernel": mixed.astype(np.float32)}

        for name, phase in (("a", 0), ("b", 2)):
            if number % 4 == phase:
                mean = outer[name] - params[name]["kernel"].mean(0, dtype=np.float64)
                in_flight[number + 1] = name, mean
    return params


def in_a_trainers_step(tx, loss):
    """The step of a trainer without regions; returns parameters and state."""
    params = in_all(make_params())

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in BATCHES:
        params, state = step(params, state, batch)
    return params, state


def all_losses(params, batch):
    return jax.vmap(loss_of)(params, batch)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_trainers_step_trains_what_a_plain_loop_does(loss):
    tx = cc.stacked(ADAM, METHOD, NUM_REGIONS, loss=loss)
    reduce = {"mean": jnp.mean, "sum": jnp.sum}[loss]
    params, state = in_a_trainers_step(tx, lambda *args: reduce(all_losses(*args)))
    assert_all_close(params, plain_loop(), rtol=0, atol=1e-6)

    metrics = cc.sync_metrics(state)
    assert metrics["bytes_sent"] == 4 * (2 * WIDTH * WIDTH + 2 * WIDTH * 2)
    assert {np.shape(x) for x in jax.tree.leaves(state.outer)} == {(4, 4), (4, 2)}
    mean = cc.mean_of_regions(params)
    assert_all_close(mean["a"]["kernel"], params["a"]["kernel"].mean(0), rtol=1e-6)


def test_diloco_at_every_step_is_data_parallel():
    method = cc.methods.get("diloco", sync_interval=1, outer_lr=1.0, outer_momentum=0.0)
    tx = cc.stacked(optax.sgd(0.1), method, NUM_REGIONS)
    params, _ = in_a_trainers_step(tx, lambda *args: all_losses(*args).mean())

    alone = make_params()
    gradient = jax.jit(jax.grad(loss_of))
    for batch in BATCHES:
        grads = gradient(alone, batch.reshape(-1, WIDTH))
        alone = jax.tree.map(lambda x, grad: x - 0.1 * grad, alone, grads)

    assert_all_close(params, in_all(alone), rtol=0, atol=1e-6)


class NnxModel(nnx.Module):
    """The model of `loss_of`, of one region."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.5), (None, "fsdp"))
        make = functools.partial(
            nnx.Linear, use_bias=False, kernel_init=init, rngs=rngs
        )
        self.a = make(WIDTH, WIDTH)
        self.b = make(WIDTH, 2)


class LinenModel(nn.Module):
    """The same."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(0.5), (None, "fsdp"))
        make = functools.partial(nn.Dense, use_bias=False, kernel_init=init)
        return make(2, name="b")(jnp.tanh(make(WIDTH, name="a")(x)))


def train_nnx(tx):
    """`nnx.Optimizer` with a model of all regions; metadata name their axis."""

    @nnx.vmap(
        in_axes=None,
        axis_size=NUM_REGIONS,
        transform_metadata={nnx.PARTITION_NAME: "region"},
    )
    def create(seed):
        return NnxModel(nnx.Rngs(seed))

    model = create(0)
    nnx.update(model, in_all(make_params()))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        def loss(model):
            params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            return all_losses(params, batch).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    specs = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"]
    for batch in BATCHES:
        step(model, optimizer, batch)
    params = nnx.state(model, nnx.Param)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(cc.mean_of_regions(params)), specs


def train_linen(tx):
    """A `TrainState` of boxed parameters, stacked by `nn.vmap`."""
    model = nn.vmap(
        LinenModel,
        variable_axes={"params": 0},
        split_rngs={"params": False},
        metadata_params={nn.PARTITION_NAME: "region"},
    )()
    params = model.init(jax.random.key(0), BATCHES[0])["params"]
    values = jax.tree.leaves(in_all(make_params()))
    params = jax.tree.structure(params).unflatten(values)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def step(state, batch):
        def loss(params):
            return jnp.mean((model.apply({"params": params}, batch) - 1) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    specs = nn.get_partition_spec(state.opt_state)._asdict()
    for batch in BATCHES:
        state = step(state, batch)
    return nn.unbox(state.params), nn.unbox(cc.mean_of_regions(state.params)), specs


@pytest.mark.parametrize("train", [train_nnx, train_linen])
def test_flax_trainers_are_the_plain_loop_and_have_its_axes(train):
    tx = cc.stacked(ADAM, METHOD, NUM_REGIONS)
    with nnx.use_eager_sharding(False):
        params, mean, specs = train(tx)
    assert_all_close(params, plain_loop(), rtol=0, atol=1e-6)
    assert_all_close(mean, jax.tree.map(lambda x: x.mean(0), params), rtol=1e-6)

    def spec_of(tree):
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P))
        return {spec for spec in leaves if spec != P()}

    # Of all regions, and one copy without their axis; both divided inside a region.
    assert spec_of(specs["inner"]) == {P("region", None, "fsdp")}
    assert spec_of((specs["outer"], specs["means"])) == {P(None, "fsdp")}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "total"}, r"loss='total' is unknown; use one of \('mean', 'sum'\)"),
        (
            {"method": cc.methods.get("cocodc", curvature="hessian_vector")},
            "needs the last batch in a merge, which stacked does not have",
        ),
        ({"method": "dilco"}, "method='dilco' is unknown"),
    ],
)
def test_invalid_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        cc.stacked(**{"inner": ADAM, "method": METHOD, "num_regions": 4} | options)


def test_parameters_without_an_axis_of_regions_are_refused():
    tx = cc.stacked(ADAM, METHOD, NUM_REGIONS + 1)
    with pytest.raises(ValueError, match="leading axis must be the num_regions=5"):
        tx.init(in_all(make_params()))


def test_an_update_without_parameters_is_refused():
    tx = cc.stacked(ADAM, METHOD, NUM_REGIONS + 1)
    params = {
        "a": jnp.zeros((NUM_REGIONS + 1, 2)),
        "b": jnp.zeros((NUM_REGIONS + 1, 2)),
    }

    with pytest.raises(ValueError, match="stacked needs params: tx.update"):
        tx.update(params, tx.init(params))


@jax.tree_util.register_pytree_node_class
class Named:
    """A stand-in for Haliax's `NamedArray`: names of axes, and a key without a name."""

    def __init__(self, array, axis_names):
        self.array = array
        self.axis_names = axis_names

    @property
    def axes(self):
        assert len(self.axis_names) == self.array.ndim
        return dict(zip(self.axis_names, self.array.shape, strict=True))

    def tree_flatten(self):
        return (self.array,), self.axis_names

    @classmethod
    def tree_unflatten(cls, axis_names, children):
        return cls(*children, axis_names)


def is_named(node):
    return isinstance(node, Named)


def test_an_optimizer_that_reads_the_names_of_axes_sees_one_region():
    """Levanter's masks read the axes of Haliax's arrays."""

    def has_decay(params):
        return jax.tree.map(lambda x: "embed" in x.axes, params, is_leaf=is_named)

    inner = optax.chain(ADAM, optax.add_decayed_weights(0.1, has_decay))
    tx = cc.stacked(inner, METHOD, NUM_REGIONS)
    kernels = [x["kernel"] for x in in_all(make_params()).values()]
    names = ("region", "embed", "mlp"), ("region", "mlp", "out")
    params = dict(zip("ab", map(Named, kernels, names), strict=True))

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            bare = {name: {"kernel": x.array} for name, x in params.items()}
            return all_losses(bare, batch).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    before = jax.tree.structure((params, state))
    for batch in BATCHES:
        params, state = step(params, state, batch)
    assert jax.tree.structure((params, state)) == before

    boxes = jax.tree.leaves(state, is_leaf=is_named)
    boxes = [box for box in boxes if is_named(box)]
    assert all(box.axes for box in boxes)

    # Replicated state has the shape, and so the sharding, of one region's.
    outer = {path: x.axis_names for part in state.outer for path, x in part.items()}
    assert outer == {"a": ("embed", "mlp"), "b": ("mlp", "out")}
