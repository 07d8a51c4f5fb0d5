import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import collectives
from cocodc_jax.models import (
    Layout,
    TransformerConfig,
    check_divisible,
    make_divided_loss_fn,
    make_loss_fn,
    partition_specs,
)
from cocodc_jax.models.loss import cross_entropy, divided_cross_entropy
from tests.models.pipelined import (
    KEY,
    assert_close,
    draw,
    place,
    plain_steps,
    region,
    shapes,
    step,
)

_CONFIG = TransformerConfig(
    vocab_size=32,
    num_layers=2,
    width=16,
    mlp_width=24,
    num_heads=4,
    num_kv_heads=2,
    qk_norm=True,
    tie_embeddings=False,
)
# Every mechanism with a loop or a constant in it, on and off.
_CHUNKED = dataclasses.replace(_CONFIG, loss_chunk_tokens=12, remat="full")
_UNSCANNED = dataclasses.replace(
    _CHUNKED, num_layers=1, scan_layers=False, tie_embeddings=True
)
_ADAPTED = dataclasses.replace(_CHUNKED, lora_rank=3)
_REGIONS = 4


def _mesh(**axes):
    sizes = tuple(axes.values())
    return jax.make_mesh(
        sizes,
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: int(np.prod(sizes))],
    )


def _step(config, make=make_loss_fn):
    """Returns `(params, tokens) -> ((loss, aux), gradient)` of one region."""
    return lambda params, tokens: step(make(config))(params, tokens, KEY)


@functools.cache
def _example(config):
    """Regions' parameters and tokens [R, ...], and each region's results."""
    params = draw(config, _REGIONS)
    tokens = np.random.default_rng(1).integers(0, 32, (_REGIONS, 4, 10), np.int32)
    return params, tokens, plain_steps(config, params, tokens)


def _of_one_region(config):
    return region(_example(config), 0)


def _over_regions(mesh, step, **options):
    """The step mapped over the regions that a device holds."""
    regions = P("region")
    return jax.shard_map(
        jax.vmap(step),
        mesh=mesh,
        axis_names={"region"},
        in_specs=regions,
        out_specs=regions,
        **options,
    )


def test_sharded_step_equals_the_unsharded_one():
    params, tokens, expected = _of_one_region(_CONFIG)
    mesh = _mesh(data=2, model=2)
    program = jax.jit(_step(_CONFIG))
    placed = place(mesh, params, partition_specs(params))
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    shared = program.lower(placed, batch).compile()
    alone = program.lower(params, tokens).compile()

    assert_close(shared(placed, batch), expected)
    # Four devices share the work: none does more than a third of it.
    flops = [program.cost_analysis()["flops"] for program in (shared, alone)]
    assert flops[0] < flops[1] / 3


@pytest.mark.parametrize(
    "config",
    [_CHUNKED, pytest.param(_UNSCANNED, marks=pytest.mark.slow)],
    ids=["scanned", "unscanned"],
)
def test_step_inside_a_region_manual_shard_map(config):
    params, tokens, expected = _example(config)
    mesh = _mesh(region=2, data=2, model=2)
    placed = place(mesh, params, partition_specs(shapes(config)), "region")
    batch = jax.device_put(tokens, NamedSharding(mesh, P("region", "data")))
    # Two regions a device: the body maps over those it holds.
    program = _over_regions(mesh, _step(config))
    assert "psum" not in str(jax.make_jaxpr(program)(placed, batch))
    assert_close(jax.jit(program)(placed, batch), expected)


_TIED = dataclasses.replace(_CHUNKED, tie_embeddings=True, remat="attention")
_WHOLE = dataclasses.replace(_CONFIG, scan_layers=False, num_layers=1)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (_CHUNKED, 1),
        (_TIED, 2),
        pytest.param(_ADAPTED, 1, marks=pytest.mark.slow),
        pytest.param(_WHOLE, 1, marks=pytest.mark.slow),
    ],
    ids=["untied", "tied, accumulated", "adapters", "unscanned"],
)
def test_devices_that_divide_a_loss_change_no_number_and_gather_no_batch(config, parts):
    params, tokens, expected = _example(config)
    mesh = _mesh(region=2, data=2, model=2)
    specs = partition_specs(shapes(config), divides_embedding=True)

    placed = place(mesh, params, specs, "region")
    batch = jax.device_put(tokens, NamedSharding(mesh, P("region", "data")))
    halved = dataclasses.replace(
        config, loss_chunk_tokens=config.loss_chunk_tokens // 2
    )
    make = functools.partial(make_divided_loss_fn, accumulate_steps=parts)
    program = _over_regions(mesh, _step(halved, make), check_vma=False)
    compiled = jax.jit(program).lower(placed, batch).compile()

    assert_close(compiled(placed, batch), expected)
    module = hlo.parse(compiled.as_text())
    crossings = collectives(module, {"region": 2, "data": 2, "model": 2})
    assert {axis for x in crossings for axis in x.axes} == {"data", "model"}

    for crossing in crossings:
        # Weights are gathered; arrays with sequences are summed over the model axis.
        if 9 in crossing.array.dims or 4 in crossing.array.dims[:-1]:
            assert crossing.axes == ("model",), crossing

    gathered = [x for x in crossings if x.kind == "all-gather"]
    assert gathered
    assert all(x.axes == ("data",) for x in gathered)


def test_weights_gathered_in_steps_change_no_number():
    """As over a torus, whose axes take turns: four devices as two times two."""
    params, tokens, expected = _of_one_region(_TIED)
    mesh = _mesh(data=4, model=1)
    placed = place(mesh, params, partition_specs(params, divides_embedding=True))
    layout = Layout(steps=(2, 2))
    program = _step(_TIED, functools.partial(make_divided_loss_fn, layout=layout))
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(placed, batch).compile()
        assert_close(compiled(placed, batch), expected)

    crossings = collectives(hlo.parse(compiled.as_text()), {"data": 4, "model": 1})
    # Half of each weight, then all of it.
    gathered = sorted(x.array.dims for x in crossings if x.kind == "all-gather")
    assert len(gathered) % 2 == 0

    loss_fn = make_divided_loss_fn(_TIED, Layout(steps=(2,)))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"steps=\(2,\) do not"):
        jax.eval_shape(loss_fn, params, tokens, KEY)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        pytest.param(_TIED, dict(data=2, sequence=2, model=1), marks=pytest.mark.slow),
        pytest.param(
            _CHUNKED, dict(data=1, sequence=4, model=2), marks=pytest.mark.slow
        ),
        (_ADAPTED, dict(data=2, sequence=2, model=2)),
    ],
    ids=["tied, of data too", "untied, of heads too", "adapters"],
)
def test_positions_on_several_devices_change_no_number(config, axes):
    length = 8
    params, tokens, _ = _of_one_region(config)
    tokens = tokens[:, : length + 1]
    expected = jax.jit(_step(config))(params, tokens)

    mesh = _mesh(**axes)
    over = Layout(sequence="sequence")
    specs = partition_specs(params, (over.tokens, "model"), divides_embedding=True)
    program = _step(config, functools.partial(make_divided_loss_fn, layout=over))

    placed = place(mesh, params, specs)
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))

    with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(placed, batch).compile()
        (loss, aux), grads = compiled(placed, batch)

    np.testing.assert_allclose(loss, expected[0][0], rtol=1e-5)
    assert_close((aux, grads), (expected[0][1], expected[1]), atol=1e-5)

    # Keys and values of all positions are gathered, over that axis alone.
    crossings = collectives(hlo.parse(compiled.as_text()), axes)
    gathered = {x.axes for x in crossings if x.kind == "all-gather"}
    assert ("sequence",) in gathered
    assert not any("model" in axes for axes in gathered)


def test_bfloat16_gradients_of_a_divided_loss_are_as_long_as_those_of_the_plain_one():
    """With a count of tokens, 240, whose inverse is off by 0.4% in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 120, 16), jnp.bfloat16)
    head = jax.random.normal(keys[1], (16, 32))
    targets = jax.random.randint(keys[2], (2, 120), 0, 32)

    def divided(hidden, head):
        sums = jax.shard_map(
            lambda *args: divided_cross_entropy(*args, targets, 2048, Layout()),
            mesh=_mesh(data=1, model=1),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return sums(hidden, head)[0] / targets.size

    def plain(hidden, head):
        return cross_entropy(hidden, head, targets, 2048)[0]

    actual, expected = (
        jax.jit(jax.grad(loss, (0, 1)))(hidden, head) for loss in (divided, plain)
    )
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(z, np.float64).ravel() for z in (x, y))
        np.testing.assert_allclose(x @ y / (y @ y), 1, atol=1e-3)


def test_gradients_of_a_divided_loss_have_derivatives():
    """Forward mode over reverse mode, as Hessian-vector products take it."""
    params, tokens, _ = _of_one_region(_WHOLE)

    def product(make):
        tangent = jax.tree.map(jnp.ones_like, params)
        gradient = lambda params: _step(_WHOLE, make)(params, tokens)[1]  # noqa: E731
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (tangent,))[1])(params)

    with jax.set_mesh(_mesh(data=2, model=2)):
        assert_close(product(make_divided_loss_fn), product(make_loss_fn))


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_specs_divide_every_matrix(scan_layers):
    config = dataclasses.replace(_ADAPTED, scan_layers=scan_layers)
    specs = partition_specs(shapes(config))
    block = specs["blocks"] if scan_layers else specs["blocks"][1]
    layer = (None,) if scan_layers else ()

    assert specs["embedding"] == P("model", None)
    assert specs["head"] == P("data", "model")
    assert specs["norm"]["scale"] == P()

    assert block["attention"]["query"] == P(*layer, "data", "model")
    assert block["attention"]["output"] == P(*layer, "model", "data")
    assert block["mlp"]["up"] == P(*layer, "data", "model")
    assert block["mlp"]["down"] == P(*layer, "model", "data")
    assert block["attention"]["key_norm"]["scale"] == P()

    # The product of two is sharded as the matrix that it is added to.
    up, down = (block["mlp"]["lora"][name] for name in ("up", "down"))
    assert up == {"a": P(*layer, "data", None), "b": P(*layer, None, "model")}
    assert down == {"a": P(*layer, "model", None), "b": P(*layer, None, "data")}


def test_divides_embedding_shards_both_axes_of_the_embedding():
    divided = partition_specs({"embedding": np.zeros((2, 2))}, divides_embedding=True)
    assert divided == {"embedding": P("model", "data")}


def test_other_axis_names():
    specs = partition_specs({"head": np.zeros((2, 2))}, axes=("fsdp", "tensor"))
    assert specs == {"head": P("fsdp", "tensor")}


def test_unknown_parameters_are_refused():
    with pytest.raises(ValueError, match="'conv'.* is not a parameter of the transf"):
        partition_specs({"conv": np.zeros((2, 2))})


@pytest.mark.parametrize(
    ("changes", "data", "model", "message"),
    [
        (
            {},
            3,
            1,
            "width=16 is not a multiple of the mesh's data=3; use width=18 or data=2",
        ),
        ({}, 1, 8, "num_heads=4 .* model=8; use num_heads=8 or model=4"),
        ({}, 1, 4, "num_kv_heads=2 .* model=4; use num_kv_heads=4 or model=2"),
        ({"mlp_width": 25}, 2, 2, "mlp_width=25 .*; use mlp_width=26 or model=1"),
        ({"vocab_size": 33}, 2, 2, "vocab_size=33 .*; use vocab_size=34 or model=1"),
    ],
)
def test_indivisible_dimensions_are_named(changes, data, model, message):
    with pytest.raises(ValueError, match=message):
        check_divisible(dataclasses.replace(_CONFIG, **changes), data, model)
