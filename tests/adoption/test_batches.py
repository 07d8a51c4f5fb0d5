"""A user's own loop: batches, keys and states as users pass them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc
from cocodc_jax.program.batches import check_batches
from tests.slow import mostly_slow

TOKENS = np.arange(4 * 2 * 8).reshape(4, 2, 8) % 16
DILOCO = cc.methods.get("diloco")
PARAMS = {"embed": jnp.ones((16, 4)), "out": jnp.ones((4, 16)) / 4}


def loss_fn(params, tokens, key):
    logits = params["embed"][tokens[:, :-1]] @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), {"longest": losses.max()}


@pytest.fixture(scope="module")
def program():
    return cc.RegionProgram(loss_fn, optax.sgd(0.1), DILOCO, PARAMS, regions=4)


@pytest.fixture
def state(program):
    return program.init(PARAMS, jax.random.key(0))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        # A global batch of 8, not divided among the regions: half would be lost.
        (np.zeros((8, 4, 8), int), r"shape \(1, 8, 4, 8\), whose second axis .* 4 reg"),
        (np.zeros((2, 8), int), r"shape \(1, 2, 8\), whose second axis must be the 4"),
        (np.zeros((), int), r"shape \(1,\), without an axis of regions"),
        ({"x": TOKENS, "y": TOKENS[:2]}, "a leaf 'y' of shape .*, whose second axis"),
    ],
)
def test_a_batch_without_the_regions_is_refused(program, state, batch, message):
    with pytest.raises(ValueError, match=message):
        next(cc.run_steps(program, state, iter([batch]), 1))


def test_batches_without_steps_are_refused(program, state):
    with pytest.raises(ValueError, match=r"shape \(0, 4, .*, of no steps"):
        program.advance(state, np.asarray(TOKENS)[None][:0])


@pytest.mark.parametrize("batches", [{"x": TOKENS}, None, lambda: iter([TOKENS])])
def test_batches_come_one_by_one(program, state, batches):
    message = f"^batches is a {type(batches).__name__}, but must be an iterator of them"
    with pytest.raises(ValueError, match=message):
        next(cc.run_steps(program, state, batches, 1))


@pytest.mark.parametrize("num_steps", [2.5, "2", None])
def test_num_steps_must_be_a_whole_number(program, state, num_steps):
    with pytest.raises(ValueError, match=f"^num_steps={num_steps!r} must be a whole"):
        next(cc.run_steps(program, state, iter([TOKENS]), num_steps))


@pytest.mark.parametrize("last", [TOKENS[:, :1], {"x": TOKENS}])
def test_batches_of_one_scan_must_have_one_shape(program, state, last):
    message = (
        "^batches of the steps 1 to 2 differ in shape, .* a last one that is smaller"
    )
    with pytest.raises(ValueError, match=f"(?s){message}"):
        next(cc.run_steps(program, state, iter([TOKENS, last]), 2))


def test_leaves_must_have_equally_many_steps(program, state):
    batches = {"x": np.stack([TOKENS] * 2), "y": TOKENS[None]}
    with pytest.raises(ValueError, match="a leaf 'y' .* but a leaf 'x' has 2 steps"):
        program.advance(state, batches)


def test_a_process_gives_the_rows_of_its_own_regions():
    """As in each of two processes with two of four regions."""
    assert check_batches({"x": np.zeros((3, 2, 8))}, 4, own_regions=2) == 3


def test_batches_of_other_regions_than_those_of_the_process_are_refused():
    with pytest.raises(ValueError, match=r"rows of all 4 regions, .* alone, here 2"):
        check_batches({"x": np.zeros((3, 4, 8))}, 4, own_regions=2)
    with pytest.raises(ValueError, match="must be the 2 regions of this process"):
        check_batches({"x": np.zeros((3, 3, 8))}, 4, own_regions=2)


def test_a_donated_state_is_refused_not_read(program, state):
    old = state
    new, _ = program.advance(old, TOKENS[None])
    calls = (
        lambda: program.advance(old, TOKENS[None]),
        lambda: program.mean_params(old),
        lambda: program.outer_params(old),
        lambda: program.region_drift(old),
        lambda: program.finite_regions(old),
        lambda: program.synchronize(old),
    )

    for call in calls:
        with pytest.raises(ValueError, match="state of step 0 was donated to"):
            call()
    assert program.finite_regions(new).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p | {"out": jnp.ones((4, 8))},
            r"'out' of float32\[4, 8\], but .*16",
        ),
        (lambda p: {"embed": p["embed"]}, "params has the structure"),
        (lambda p: p | {"out": p["out"].astype("bfloat16")}, "'out' of bfloat16"),
    ],
)
def test_init_takes_the_programs_parameters_alone(program, change, message):
    with pytest.raises(ValueError, match=message):
        program.init(change(PARAMS), jax.random.key(0))


class Module:
    """A tree of parameters and other leaves, as an Equinox module."""

    def __init__(self, weight, activation):
        self.weight = weight
        self.activation = activation


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda m: (
        (
            (jax.tree_util.GetAttrKey("weight"), m.weight),
            (jax.tree_util.GetAttrKey("activation"), m.activation),
        ),
        None,
    ),
    lambda _, children: Module(*children),
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_fn": None}, "loss_fn=None must be a function, "),
        ({"optimizer": optax.sgd}, "optimizer=<function sgd .* must be an optax.Grad"),
        ({"optimizer": "adam"}, "optimizer='adam' must be an optax.*, as optax.adam"),
        ({"method": cc.methods.METHODS["diloco"]}, "method=<function .* must be a Met"),
        ({"method": None}, r"method=None must be a Method: methods.get\(NAME, "),
        ({"mesh": jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))},
         r"axes \('data',\), which must be \('region', 'stage'"),
        ({"mesh": "cpu"}, r"mesh='cpu' must be a Mesh: make_mesh\("),
        ({"fragments": 4}, r"fragments=4 must be a Fragments: cut\(params"),
        ({"user_inputs": {}}, r"user_inputs={} must be a UserInputs: UserInputs\("),
        ({"transport": "outer"}, r"transport='outer' must be a Transport: Tra"),
        ({"model_state": {}}, r"model_state={} must be a ModelState: ModelState\("),
        ({"params": Module(jnp.ones(2), jax.nn.gelu)},
         "leaf 'activation' of type .* no array"),
        ({"params": {"w": jnp.ones(2), "rate": 0.5}},
         "leaf 'rate' of type float, which is no arr"),
        ({"params": {"w": jnp.ones(2), "step": jnp.ones((), int)}},
         "leaf 'step' of dtype int32"),
        ({"params": {"w": jnp.ones(2), "dropout": jax.random.key(0)}},
         "'dropout' of dtype key"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_kind_are_named(arguments, message):
    valid = {
        "loss_fn": loss_fn,
        "optimizer": optax.sgd(0.1),
        "method": DILOCO,
        "params": PARAMS,
        "regions": 2,
    }
    with pytest.raises(ValueError, match=message):
        cc.RegionProgram(**valid | arguments)


# --- Keys of the generator ---


@pytest.mark.parametrize("data", mostly_slow([1, 2], quick=[2]))
@pytest.mark.parametrize(
    ("impl", "name", "options"),
    [  # Messages are drawn too: rounded at random.
        ("rbg", "diloco", {"compress": "int8(stochastic=True)"}),
        ("unsafe_rbg", "diloco", {"compress": "int8(stochastic=True)"}),
        ("rbg", "noloco", {}),
    ],
)
def test_keys_have_four_words_with_every_default_prng(impl, name, options, data):
    def loss_fn(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch.shape)
        return jnp.mean((kept * batch @ params["out"]) ** 2), {"kept": kept.sum()}

    method = cc.methods.get(name, sync_interval=2, **options)
    mesh = cc.make_mesh(4, data=data)
    with jax.default_prng_impl(impl):
        program = cc.RegionProgram(
            loss_fn, optax.sgd(0.1), method, PARAMS, 4, mesh=mesh
        )
        assert program.abstract().region.key.shape == (4, 4)
        state = program.init(PARAMS, jax.random.key(0))
        state, output = program.advance(state, np.ones((2, 4, 2, 4), np.float32))
        assert jax.random.key_data(state.region.key).shape == (4, 4)

    # Regions and steps draw different numbers.
    assert len(np.unique(np.asarray(output.aux["kept"]))) > 2
    assert len(np.unique(np.asarray(state.region.params["out"]))) > 1
    assert len(output.syncs) == 1


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            jax.random.key(0, impl="rbg"),
            "implementation 'rbg', but .* for 'threefry2x32', .*'rbg'\\) before",
        ),
        (0, r"key=0 must be a PRNG key: jax.random.key\(seed\)"),
        (None, "key=None must be a PRNG key"),
        (jax.random.split(jax.random.key(0), 4), r"key has the shape \(4,\), but must"),
        (jax.random.split(jax.random.PRNGKey(0)), r"key has the shape \(2, 2\), but"),
    ],
)
def test_invalid_keys_are_refused(program, key, message):
    with pytest.raises(ValueError, match=message):
        program.init(PARAMS, key)


def test_raw_keys_are_accepted(program, state):
    old = program.init(PARAMS, jax.random.PRNGKey(0))
    np.testing.assert_array_equal(old.region.key, state.region.key)
