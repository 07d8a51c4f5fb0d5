"""A script with parameters that are not trained: LoRA on a frozen matrix."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import cocodc_jax as cc
from cocodc_jax.sync.cutting import cut_by_patterns
from tests.numerics import assert_all_close

W, A = (
    np.random.default_rng(i).normal(size=n) for i, n in ((0, (64, 64)), (1, (64, 4)))
)
PARAMS = {
    "base": {"w": W.astype(np.float32)},
    "lora": {"a": A.astype(np.float32) / 8, "b": np.zeros((4, 64), np.float32)},
}
BASE_BYTES = 16_384
LORA_BYTES = 2_048
LABELS = {"base": "frozen", "lora": "train"}
PARTS = {"train": optax.adamw(1e-2), "frozen": optax.set_to_zero()}
OPTIMIZER = optax.multi_transform(PARTS, LABELS)
BATCHES = np.random.default_rng(2).normal(size=(12, 4, 8, 64)).astype(np.float32)
# Fragments in turn: frozen entries have no part in the change of a fragment.
SHORT = dict(
    sync_interval=4,
    num_fragments=2,
    delay_steps=1,
    syncs_per_interval=2,
    transmission_score="round_robin",
)
HESSIAN = dict(curvature="hessian_vector", curvature_units="parameter")
METHODS = {
    "data_parallel": {},
    "diloco": dict(sync_interval=4),
    "cocodc": SHORT | HESSIAN,
}
MESHES = {"one device": (1, 1), "four devices": (4, 1), "divided": (2, 2)}


def loss_fn(params, batch, key):
    lora = params["lora"]
    out = batch @ params["base"]["w"] + batch @ lora["a"] @ lora["b"]
    return jnp.mean((out - jnp.sin(2 * batch)) ** 2), {}


def make(method="diloco", trainable="optimizer", mesh="one device", **options):
    num, data = MESHES[mesh]
    options = {"optimizer": OPTIMIZER, "params": PARAMS, **options}
    return cc.RegionProgram(
        loss_fn,
        method=cc.methods.get(method, **METHODS[method]),
        regions=4,
        mesh=cc.make_mesh(4, data=data, devices=jax.devices()[: num * data]),
        param_specs={"base": P("data"), "lora": P()},
        user_inputs=cc.UserInputs(learning_rate=1e-2),
        trainable=trainable,
        **options,
    )


def run(program, state=None, num_steps=12):
    state = program.init(PARAMS, jax.random.key(0)) if state is None else state
    losses = []
    syncs = []
    todo = num_steps - state.step

    steps = cc.run_steps(program, state, iter(BATCHES[state.step :]), todo)
    for new, output in steps:
        state = new
        losses.append(np.asarray(output.losses))
        syncs += output.syncs

    return state, np.concatenate(losses), syncs


def cut_like(method, shapes, trainable):
    """Cut so that fragments have equally many trained entries, whatever is frozen."""
    if method != "cocodc":
        return None
    if trainable:
        shapes = {"base": {"w": None}, "lora": shapes["lora"]}
    return cut_by_patterns(shapes, ["lora/a", "."])


@pytest.mark.filterwarnings("ignore:the optimizer leaves 1 of 3")
@pytest.mark.parametrize(
    ("method", "mesh"),
    [
        ("data_parallel", "divided"),
        ("diloco", "one device"),
        pytest.param("cocodc", "four devices", marks=pytest.mark.slow),
        ("cocodc", "divided"),
    ],
)
def test_frozen_parameters_give_the_same_run_and_send_no_bytes(method, mesh):
    """Another compiled program of the same sums: some units of the last place."""
    ends = []
    for trainable in (None, "optimizer"):
        fragments = cut_like(method, PARAMS, trainable)
        program = make(method, trainable, mesh, fragments=fragments)
        ends.append((program, *run(program)))

    (old, before, losses, syncs), (new, after, new_losses, less) = ends
    np.testing.assert_allclose(new_losses, losses, rtol=2e-6)
    assert losses[-1].mean() < losses[0].mean()

    mean = new.mean_params(after)
    outer = new.outer_params(after)
    assert_all_close(mean["lora"], old.mean_params(before)["lora"], atol=2e-6)
    assert_all_close(outer["lora"], old.outer_params(before)["lora"], atol=2e-6)
    np.testing.assert_array_equal(mean["base"]["w"], PARAMS["base"]["w"])
    np.testing.assert_array_equal(outer["base"]["w"], PARAMS["base"]["w"])

    assert len(syncs) == len(less)
    num_means = 12 if method == "data_parallel" else 3
    assert before.bytes_sent - after.bytes_sent == num_means * BASE_BYTES
    assert after.bytes_sent == num_means * LORA_BYTES

    # One copy, where the other has one a region.
    kept = after.frozen["base"]["w"]
    w = after.region.params["base"]["w"]
    assert (kept.shape, w) == ((64, 64), None)

    spec = P("data") if mesh == "divided" else P()
    assert kept.sharding.is_equivalent_to(jax.NamedSharding(new.mesh, spec), 2)


def test_steps_and_syncs_in_one_program_give_the_same_losses():
    """Steps and syncs in one program."""
    ends = []
    for fuse in ("no", "yes"):
        transport = cc.Transport(exchange="program", overlap=fuse)
        program = make("cocodc", mesh="four devices", transport=transport)
        ends.append(run(program)[:2])
    (one, losses), (other, windowed_losses) = ends
    np.testing.assert_allclose(windowed_losses, losses, rtol=2e-6)
    assert one.bytes_sent == other.bytes_sent


@pytest.mark.parametrize(
    ("optimizer", "trainable"),
    [
        (optax.adamw(1e-2), {"base": False, "lora": True}),
        (optax.adamw(1e-2), lambda path: path.startswith("lora/")),
        (OPTIMIZER, {"base": {"w": False}, "lora": {"a": True, "b": True}}),
        (optax.MultiSteps(OPTIMIZER, 1), "optimizer"),
        (
            optax.chain(
                optax.masked(optax.adamw(1e-2), {"base": False, "lora": True}),
                optax.masked(optax.set_to_zero(), {"base": True, "lora": False}),
            ),
            "optimizer",
        ),
    ],
    ids=["tree", "predicate", "tree and labels", "MultiSteps", "masked"],
)
def test_every_way_to_freeze_parameters_gives_the_same_run(optimizer, trainable):
    state, losses, _ = run(make(optimizer=optimizer, trainable=trainable))
    _, expected, _ = run(make())
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    assert jax.tree.leaves(state.region.params["base"]) == []


def test_the_second_moment_is_that_of_trained_parameters():
    """Labels put masks into Adam's state, where parameters have None."""
    method = cc.methods.get("cocodc", curvature="adam_second_moment", **SHORT)
    user_inputs = cc.UserInputs(1e-2, cc.adam_second_moment(0.999))

    def losses(optimizer, trainable):
        program = cc.RegionProgram(
            loss_fn,
            optimizer,
            method,
            PARAMS,
            4,
            user_inputs=user_inputs,
            trainable=trainable,
        )
        return run(program)[1]

    by_labels = losses(OPTIMIZER, "optimizer")
    by_mask = losses(optax.adamw(1e-2), {"base": False, "lora": True})
    np.testing.assert_allclose(by_labels, by_mask, rtol=2e-6)


def stored_bytes(folder):
    """Return the bytes of arrays by metadata: sizes of files differ between saves."""
    stored = ocp.PyTreeCheckpointer().metadata(folder / "arrays").item_metadata.tree
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(stored))


@pytest.mark.filterwarnings("ignore:the optimizer leaves 1 of 3")
def test_a_checkpoint_has_frozen_parameters_once_and_a_run_resumes(tmp_path):
    sizes = []
    stored = []
    for trainable in (None, "optimizer"):
        program = make(trainable=trainable)
        state, _, _ = run(program, num_steps=7)
        with cc.Checkpoints(tmp_path / str(trainable)) as checkpoints:
            checkpoints.save(program, state, {})
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(state)))
        stored.append(stored_bytes(tmp_path / str(trainable) / "7"))

    # One copy is left of six: four regions, the outer model and its momentum.
    assert sizes[0] - sizes[1] == stored[0] - stored[1] == 5 * BASE_BYTES

    program = make(mesh="four devices")
    with cc.Checkpoints(tmp_path / "optimizer") as checkpoints:
        state, _ = checkpoints.restore(program)
    _, losses, _ = run(program, state)
    np.testing.assert_allclose(losses, run(make())[1][7:], rtol=2e-6)
    with (
        cc.Checkpoints(tmp_path / "optimizer") as checkpoints,
        pytest.raises(ValueError, match="number of regions .*frozen/base/w is float32"),
    ):
        checkpoints.restore(make(trainable=None))


@pytest.mark.filterwarnings("ignore:the optimizer leaves 1 of 3")
@pytest.mark.parametrize("trainables", [(None, "optimizer"), ("optimizer", None)])
def test_a_program_adopts_a_state_with_other_trained_parameters(trainables):
    old, new = (make("cocodc", x, mesh="one device") for x in trainables)
    state, _, _ = run(old, num_steps=6)
    state, _ = old.land(state)
    expected = jax.device_get(old.mean_params(state))
    _, expected_losses, _ = run(old, jax.tree.map(jnp.copy, state))
    adopted = new.adopt(state, old)

    assert "trainable" in adopted.lost
    assert adopted.kept["parameters"] == "of each region"

    mean = jax.device_get(new.mean_params(adopted.state))
    jax.tree.map(np.testing.assert_array_equal, mean, expected)

    _, losses, _ = run(new, adopted.state)
    np.testing.assert_allclose(losses[0], expected_losses[0], rtol=2e-6)


def test_the_users_arrays_may_be_deleted_after_init():
    """The arrays may be deleted after `init`; integers may be frozen."""
    params = {"base": {"w": W.astype(np.int8)}, "lora": PARAMS["lora"]}
    program = make(trainable={"base": False, "lora": True}, params=params)

    arrays = jax.tree.map(jnp.asarray, params)
    state = program.init(arrays, jax.random.key(0))
    jax.tree.map(lambda x: x.delete(), arrays)
    state, _ = program.advance(state, BATCHES[:4])

    mean = program.mean_params(state)["base"]["w"]
    np.testing.assert_array_equal(mean, params["base"]["w"])
    assert mean.dtype == np.int8


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ({"base": True}, "trainable has the structure .*'base'.* but params has"),
        ({"base": 1, "lora": True}, "trainable=1 must be 'optimizer', a predicate"),
        ("optimiser", "trainable='optimiser' must be 'optimizer', a predicate"),
        (False, "trainable=False trains none of the leaves 'base/w', 'lora/a', 'lora"),
        (lambda path: "Lora" in path, "trainable=.* trains none of the leaves"),
        (lambda path: "lora/" in path or "base/" in path, "freezes none of the leaves"),
        ("optimizer", "trainable='optimizer' freezes none of the"),
    ],
)
def test_invalid_choices_of_trained_parameters_are_refused_by_name(trainable, message):
    with pytest.raises(ValueError, match=message):
        make(optimizer=optax.adamw(1e-2), trainable=trainable)


def test_a_warning_counts_the_bytes_sent_for_frozen_parameters():
    message = (
        "leaves 1 of 3 leaves as they are, such as 'base/w': 16,384 of 18,432 bytes"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        make(trainable=None)
