"""Flax boxes: the state of `synchronized` is sharded by them, as the parameters are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.sync.cutting import cut
from cocodc_jax.transforms.layers import named_leaves
from tests.numerics import assert_all_close
from tests.slow import mostly_slow

NUM_REGIONS = 2
NUM_LAYERS = 2
WIDTH = 4
NUM_STEPS = 5
METHOD = cc.methods.get(
    "streaming_diloco",
    sync_interval=4,
    num_fragments=2,
    delay_steps=1,
    compress="ef+int8",
)
normal = nn.initializers.normal(0.3)
BATCHES = np.random.default_rng(0).normal(size=(NUM_STEPS, NUM_REGIONS, 4, WIDTH))
BATCHES = BATCHES.astype(np.float32)


@pytest.fixture(autouse=True)
def no_mesh_is_set():
    with nnx.use_eager_sharding(False):
        yield


def transform(fragments=None):
    return cc.synchronized(
        optax.adam(0.02, eps=1e-3), METHOD, axis_name="region", fragments=fragments
    )


class NnxModel(nnx.Module):
    """Layers in one stack, divided along their outputs, and a head along its inputs."""

    def __init__(self):
        def layer(key):
            init = nnx.with_partitioning(normal, (None, "fsdp"))
            return nnx.Linear(
                WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=nnx.Rngs(key)
            )

        keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
        metadata = {nnx.PARTITION_NAME: None}
        self.layers = nnx.vmap(layer, transform_metadata=metadata)(keys)
        init = nnx.with_partitioning(normal, ("fsdp", None))
        self.head = nnx.Linear(
            WIDTH, 2, use_bias=False, kernel_init=init, rngs=nnx.Rngs(1)
        )

    def __call__(self, x):
        for kernel in self.layers.kernel[...]:
            x = x + jnp.tanh(x @ kernel)
        return self.head(x)


class LinenLayer(nn.Module):
    """The same layer for a scan."""

    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(normal, (None, "fsdp"))
        return x + jnp.tanh(nn.Dense(WIDTH, use_bias=False, kernel_init=init)(x)), None


class LinenModel(nn.Module):
    """The same model."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LinenLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=NUM_LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = layers(name="layers")(x, None)

        init = nn.with_partitioning(normal, ("fsdp", None))
        return nn.Dense(2, use_bias=False, kernel_init=init, name="head")(x)


def loss_of(outputs):
    return jnp.mean((outputs - 1) ** 2)


def of_nnx(fragments=None):
    """Return one region's train state, its step, and the specs of its metadata."""
    model = NnxModel()
    optimizer = nnx.Optimizer(model, transform(fragments), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: loss_of(m(batch)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return state, step, nnx.get_partition_spec(state)


def of_linen():
    model = LinenModel()
    params = model.init(jax.random.key(0), BATCHES[0, 0])["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=transform())
    state = state.replace(step=jnp.zeros((), jnp.int32))

    def step(state, batch):
        loss, grads = jax.value_and_grad(
            lambda params: loss_of(model.apply({"params": params}, batch))
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    return state, step, nn.get_partition_spec(state)


TRAINERS = {"nnx": of_nnx, "linen": of_linen}


def mapped(step, axes, **options):
    return jax.vmap(step, (axes, 0), (axes, 0), axis_name="region", **options)


def laid_out(axes, state):
    return jax.vmap(lambda x: x, None, axes, axis_size=NUM_REGIONS)(state)


def train(trainer, mesh=None):
    """Train by the boxes' shardings, or on one device; return last state and loss."""
    state, step, specs = TRAINERS[trainer]()
    axes = cc.sync_axes(METHOD, state=state)
    state = laid_out(axes, state)

    if mesh is None:
        step = jax.jit(mapped(step, axes))
    else:
        is_none = lambda x: x is None  # noqa: E731
        leads = jax.tree.broadcast(axes, state, is_leaf=is_none)
        leads = jax.tree.leaves(leads, is_leaf=is_none)
        specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        shardings = jax.tree.structure(state).unflatten(
            NamedSharding(mesh, spec if lead is None else P("diloco", *spec))
            for lead, spec in zip(leads, specs, strict=True)
        )

        state = jax.device_put(state, shardings)
        # As trainers compile: inputs and outputs have the metadata's shardings.
        step = mapped(step, axes, spmd_axis_name="diloco")
        step = jax.jit(step, out_shardings=(shardings, None))

    for batch in BATCHES:
        if mesh is not None:
            batch = jax.device_put(batch, NamedSharding(mesh, P("diloco")))
        state, loss = step(state, batch)
    return state, loss


def arrays(state):
    """Return a state's arrays by path, whatever is around them."""
    return {path.removesuffix("/value"): x for path, x in named_leaves(state)}


@pytest.mark.parametrize("trainer", mostly_slow(TRAINERS, quick=["linen"]))
def test_states_of_a_fragment_are_sharded_as_its_parameters(trainer):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("diloco", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    state, loss = train(trainer, mesh)

    divided = arrays(state)
    shared = ("outer", "trace", "means")
    checked = set()
    for path, x in divided.items():
        if not path.endswith(("layers/kernel", "layers/Dense_0/kernel", "head/kernel")):
            continue

        name = next((name for name in shared if f"/{name}/" in f"/{path}"), "regional")
        lead = [] if name in shared else ["diloco"]
        # Rows of a stack are sharded, not the axis of layers.
        spec = ["fsdp", None] if "head" in path else [None, None, "fsdp"]

        expected = NamedSharding(mesh, P(*lead, *spec))
        assert x.sharding.is_equivalent_to(expected, x.ndim), (path, x.sharding)
        checked.add(name)

    assert checked == {*shared, "regional"}

    plain, plain_loss = train(trainer)
    assert_all_close(loss, plain_loss, rtol=0, atol=1e-6)

    plain = arrays(plain)
    assert_all_close(
        divided, {path: plain[path] for path in divided}, rtol=0, atol=2e-6
    )


def test_a_cut_of_boxes_or_arrays_fits_an_nnx_optimizer():
    boxed = nnx.state(NnxModel(), nnx.Param)
    trees = None, boxed, nnx.as_pure(boxed), nnx.to_pure_dict(boxed)
    shapes = []

    for tree in trees:
        state, step, _ = of_nnx(None if tree is None else cut(tree, 2))
        axes = cc.sync_axes(METHOD, state=state)
        stacked = laid_out(axes, state)
        after, _ = jax.eval_shape(mapped(step, axes), stacked, BATCHES[0])
        shapes.append(jax.tree.map(jnp.shape, arrays(after)))

    assert shapes == [shapes[0]] * len(trees)


@pytest.mark.parametrize(
    "boxed",
    [
        {
            "head": nnx.Param(np.zeros(4)),
            "layers": [nnx.Param(np.zeros((4, 4))) for _ in range(3)],
        },
        {"blocks": nnx.Param(np.zeros((2, 4))), "embedding": nnx.Param(np.zeros(4))},
    ],
)
def test_a_tree_is_cut_the_same_with_and_without_boxes(boxed):
    """A layer's only array is a subtree if it has a box, else a leaf."""

    def parts_of(tree):
        fragments = cut(tree, 2).slices
        return [[(part.leaf, part.rows) for part in parts] for parts in fragments]

    assert parts_of(boxed) == parts_of(nnx.as_pure(boxed))


def test_region_sync_takes_a_cut_of_arrays_without_their_boxes():
    params = jax.tree.map(
        lambda x: jnp.stack([x] * NUM_REGIONS), nnx.state(NnxModel(), nnx.Param)
    )
    one = nnx.as_pure(nnx.state(NnxModel(), nnx.Param))
    method = cc.methods.get("streaming_diloco", sync_interval=4, num_fragments=2)

    by_itself = cc.RegionSync(method, params, NUM_REGIONS)
    of_arrays = cc.RegionSync(method, params, NUM_REGIONS, fragments=cut(one, 2))

    assert of_arrays.fragments == by_itself.fragments


def test_axes_follow_a_state_of_mappings():
    state, _, _ = of_nnx()
    axes = cc.sync_axes(METHOD, "own", "all", state=state)

    fields = axes[1]["opt_state"]
    assert (fields["outer"], fields["means"]) == ("all", "all")
    assert (fields["inner"], fields["memories"]) == ("own", "own")
    assert axes[1]["step"] == "own"
    assert set(jax.tree.leaves(axes[0])) == {"own"}

    shapes = {name: np.shape(x) for name, x in cc.sync_metrics(state).items()}
    assert shapes == dict.fromkeys(shapes, ())
