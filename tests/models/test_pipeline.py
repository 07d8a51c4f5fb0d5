"""The pipelined loss against the plain one: values, gradients, layout, routing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.models import (
    TransformerConfig,
    check_pipeline,
    init_params,
    make_loss_fn,
    make_pipelined_loss_fn,
    partition_specs,
)
from cocodc_jax.models.transformer import bind
from cocodc_jax.runtime.devices.mesh import make_mesh, regional
from cocodc_jax.runtime.program import RegionProgram, run

# Nine positions: no number of stages here divides them.
_BATCH, _LENGTH = 8, 9
_CONFIG = TransformerConfig(
    vocab_size=32,
    num_layers=4,
    width=16,
    mlp_width=24,
    num_heads=2,
    num_kv_heads=2,
    loss_chunk_tokens=12,
)
_UNTIED = dataclasses.replace(
    _CONFIG, qk_norm=True, tie_embeddings=False, remat="full", loss_chunk_tokens=2048
)
_BFLOAT16 = dataclasses.replace(_CONFIG, compute_dtype="bfloat16", remat="dots")
_KEY = jax.random.key(0)
_REGIONS = 2


def _draw(config, *lead):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(init_params, config), _KEY)
    return jax.tree.map(
        lambda x: rng.normal(0.1, 0.3, (*lead, *x.shape)).astype(np.float32), shapes
    )


def _tokens(*lead):
    shape = (*lead, _BATCH, _LENGTH + 1)
    return np.random.default_rng(1).integers(0, 32, shape).astype(np.int32)


def _region(tree, region):
    return jax.tree.map(lambda x: x[region], tree)


def _step(loss_fn):
    return jax.value_and_grad(loss_fn, has_aux=True)


@functools.cache
def _compiled_step(config):
    return jax.jit(_step(make_loss_fn(config)))


@functools.cache
def _plain(config):
    """What one region's step gives without a pipeline."""
    return jax.device_get(_compiled_step(config)(_draw(config), _tokens(), _KEY))


@functools.cache
def _plain_regions(config, num_regions):
    params, tokens = _draw(config, num_regions), _tokens(num_regions)
    step = _compiled_step(config)
    each = [step(_region(params, r), tokens[r], _KEY) for r in range(num_regions)]
    return jax.tree.map(lambda *x: np.stack(x), *each)


def _place(mesh, tree, specs, *lead):
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, P(*lead, *spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.device_put(tree, shardings)


def _place_regions(mesh, params, tokens):
    specs = partition_specs(_region(params, 0), stage="stage")
    return (
        _place(mesh, params, specs, "region"),
        jax.device_put(tokens, NamedSharding(mesh, P("region", "data"))),
    )


def _over_regions(mesh, loss_fn, block=lambda fn: lambda x: fn(_region(x, 0))):
    """A step of all regions as the runtime makes it, its key a region's own."""

    def one(values):
        params, tokens, key = values
        return _step(loss_fn)(params, tokens, jax.random.wrap_key_data(key))

    def body(*values):
        out = block(one)(values)
        own = values[1].shape[0] == 1
        return jax.tree.map(lambda x: x[None], out) if own else out

    return jax.shard_map(
        body,
        mesh=mesh,
        axis_names={"region"},
        in_specs=P("region"),
        out_specs=P("region"),
    )


def _keys(num_regions):
    return np.asarray(jax.random.key_data(jax.random.split(_KEY, num_regions)))


def _assert_close(actual, expected, rtol=1e-4, atol=2e-6):
    # Sums over microbatches, stages and positions in another order, in float32.
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=rtol, atol=atol),
        jax.device_get(actual),
        expected,
    )


def _primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _primitives(getattr(inner, "jaxpr", inner))


class TestOneRegion:
    @pytest.mark.parametrize(
        ("config", "stages", "microbatches"),
        [
            (_CONFIG, 1, 4),
            (_CONFIG, 2, 1),
            (_CONFIG, 2, 2),
            (_CONFIG, 4, 2),
            (_UNTIED, 4, 4),
        ],
    )
    def test_loss_and_gradient_are_the_plain_models(self, config, stages, microbatches):
        mesh = make_mesh(1, stage=stages)
        params = _draw(config)
        placed = _place(mesh, params, partition_specs(params, stage="stage"))
        with jax.set_mesh(mesh):
            loss_fn = make_pipelined_loss_fn(config, stages, microbatches)
            step = jax.jit(_step(loss_fn)).lower(placed, _tokens(), _KEY).compile()
            _assert_close(step(placed, _tokens(), _KEY), _plain(config))
        assert "collective-permute" in str(step.as_text())

    def test_one_stage_and_one_microbatch_are_the_plain_model_exactly(self):
        with jax.set_mesh(make_mesh(1)):
            step = jax.jit(_step(make_pipelined_loss_fn(_CONFIG, 1, 1)))
            actual = jax.device_get(step(_draw(_CONFIG), _tokens(), _KEY))
        jax.tree.map(np.testing.assert_array_equal, actual, _plain(_CONFIG))

    def test_the_loss_scales_its_gradient(self):
        with jax.set_mesh(make_mesh(1, stage=2)):
            loss_fn = make_pipelined_loss_fn(_CONFIG, 2, 2)
            grad = jax.jit(jax.grad(lambda *args: 3 * loss_fn(*args)[0]))
            actual = grad(_draw(_CONFIG), _tokens(), _KEY)
        _, expected = _plain(_CONFIG)
        _assert_close(actual, jax.tree.map(lambda x: 3 * x, expected), atol=6e-6)

    def test_forward_over_reverse_gives_hessian_vector_products(self):
        params = _draw(_CONFIG)
        direction = jax.tree.map(lambda x: np.cos(10 * x), params)

        def product(loss_fn):
            def grad(params):
                return jax.grad(loss_fn, has_aux=True)(params, _tokens(), _KEY)[0]

            return jax.jit(lambda p, d: jax.jvp(grad, (p,), (d,))[1])(params, direction)

        expected = product(make_loss_fn(_CONFIG))
        with jax.set_mesh(make_mesh(1, stage=2)):
            actual = product(make_pipelined_loss_fn(_CONFIG, 2, 2))
        # Second derivatives here are up to some tens.
        _assert_close(actual, jax.device_get(expected), rtol=1e-3, atol=1e-3)

    def test_messages_are_microbatches_in_the_compute_dtype(self):
        with jax.set_mesh(make_mesh(1, stage=2)):
            step = _step(make_pipelined_loss_fn(_BFLOAT16, 2, 4))
            jaxpr = jax.make_jaxpr(step)(_draw(_BFLOAT16), _tokens(), _KEY)
        sent = [e for e in _primitives(jaxpr.jaxpr) if e.primitive.name == "ppermute"]
        assert {e.params["axis_name"] for e in sent} <= {"stage", ("stage",)}
        kinds = {(e.invars[0].aval.shape, e.invars[0].aval.dtype.name) for e in sent}
        part = (_BATCH // 4, _LENGTH)
        assert kinds == {((*part, 16), "bfloat16"), (part, "int32")}


class TestRegions:
    @pytest.mark.parametrize(
        ("data", "model", "length", "block"),
        [(2, 1, 2, None), (1, 2, 2, None), (1, 1, 1, "map"), (1, 1, 1, "vmap")],
    )
    def test_stages_lie_inside_regions(self, data, model, length, block):
        devices = jax.devices()[: length * 2 * data * model]
        mesh = make_mesh(_REGIONS, data, model, devices, stage=2)
        params, tokens = _place_regions(
            mesh, _draw(_CONFIG, _REGIONS), _tokens(_REGIONS)
        )
        loss_fn = make_pipelined_loss_fn(_CONFIG, 2, 2)
        blocks = {
            "map": lambda fn: functools.partial(jax.lax.map, fn),
            "vmap": jax.vmap,
        }
        program = _over_regions(mesh, loss_fn, *([blocks[block]] if block else []))
        actual = jax.jit(program)(params, tokens, _keys(_REGIONS))
        _assert_close(actual, _plain_regions(_CONFIG, _REGIONS))
        _, grads = actual
        up = grads["blocks"]["mlp"]["up"].addressable_shards[0].data
        assert up.shape == (_REGIONS // length, 2, 16 // data, 24 // model)

    def test_bfloat16_goes_through_the_compiler(self):
        mesh = make_mesh(_REGIONS, model=2, stage=2)
        params, tokens = _place_regions(
            mesh, _draw(_BFLOAT16, _REGIONS), _tokens(_REGIONS)
        )
        program = _over_regions(mesh, make_pipelined_loss_fn(_BFLOAT16, 2, 2))
        (loss, _), _ = jax.jit(program)(params, tokens, _keys(_REGIONS))
        (expected, _), _ = _plain_regions(_BFLOAT16, _REGIONS)
        # Eight bits of mantissa, averaged over 72 tokens.
        np.testing.assert_allclose(loss, expected, rtol=2e-3)

    def test_regions_exchange_nothing(self):
        mesh = make_mesh(_REGIONS, stage=2)
        program = _over_regions(mesh, make_pipelined_loss_fn(_CONFIG, 2, 2))
        jaxpr = jax.make_jaxpr(program)(
            _draw(_CONFIG, _REGIONS), _tokens(_REGIONS), _keys(_REGIONS)
        )
        collectives = [
            e
            for e in _primitives(jaxpr.jaxpr)
            if e.primitive.name.startswith(("psum", "ppermute", "all_"))
        ]
        assert collectives
        assert not any("region" in str(e.params) for e in collectives)


class TestProgram:
    """Through the runtime: one region or two, of two stages, against no stages."""

    @staticmethod
    def result(num_regions, mesh, loss_fn, specs):
        program = RegionProgram(
            loss_fn,
            optax.adam(1e-2),
            methods.get("diloco", sync_interval=2),
            _draw(_CONFIG),
            num_regions,
            mesh=mesh,
            param_specs=specs,
        )
        state = start = program.init(_draw(_CONFIG), _KEY)
        stream = (_tokens(num_regions)[:, ::step] for step in (1, -1, 1, -1))
        losses = []
        for after, output in run(program, start, stream, 4):
            state = after
            losses.append(np.asarray(output.losses))
        outer = jax.device_get(program.outer_params(state))
        return state, (np.concatenate(losses), outer)

    @pytest.mark.parametrize(("num_regions", "data"), [(2, 1), (1, 2)])
    def test_diloco_is_the_same_run(self, num_regions, data):
        mesh = make_mesh(num_regions, data, stage=2)
        specs = partition_specs(_draw(_CONFIG), stage="stage")
        pipelined = make_pipelined_loss_fn(_CONFIG, 2, 4)
        state, actual = self.result(num_regions, mesh, pipelined, specs)
        plain_state, expected = self.result(
            num_regions, make_mesh(num_regions), make_loss_fn(_CONFIG), None
        )
        # Adam divides by the root of what may be small.
        _assert_close(actual, expected, rtol=2e-4, atol=2e-5)
        _assert_close(
            state.region.opt_state,
            jax.device_get(plain_state.region.opt_state),
            rtol=2e-3,
            atol=2e-5,
        )
        adam = state.region.opt_state[0]
        for tree in (state.region.params, adam.mu, adam.nu):
            up = tree["blocks"]["mlp"]["up"]
            assert up.sharding == regional(mesh, P("stage", "data", "model"))
            assert up.addressable_shards[0].data.shape == (1, 2, 16 // data, 24)
            scale = tree["blocks"]["mlp_norm"]["scale"]
            assert scale.addressable_shards[0].data.shape == (1, 2, 16)


class TestRouting:
    STAGES, MICROBATCHES, REGIONS = 2, 2, 4

    @classmethod
    @functools.cache
    def program(cls, num_routed_regions):
        mesh = make_mesh(cls.REGIONS, stage=cls.STAGES)
        loss_fn = make_pipelined_loss_fn(
            _CONFIG, cls.STAGES, cls.MICROBATCHES, num_routed_regions
        )
        return mesh, jax.jit(_over_regions(mesh, loss_fn))

    def run(self, params, num_routed_regions=None):
        mesh, program = self.program(num_routed_regions)
        placed = _place_regions(mesh, params, _tokens(self.REGIONS))
        (loss, _), grads = program(*placed, _keys(self.REGIONS))
        return jax.device_get((loss, grads))

    def expected(self, params):
        """Stages composed by hand, region after region; no mesh, no collective."""
        key = jax.random.wrap_key_data(_keys(self.REGIONS)[0])
        num_ticks = self.MICROBATCHES + self.STAGES - 1
        shifts = np.asarray(jax.random.randint(key, (num_ticks,), 0, self.REGIONS))
        assert shifts[:2].all()
        assert shifts[0] != shifts[1]
        batch = _tokens(self.REGIONS)
        half = dataclasses.replace(_CONFIG, num_layers=2)

        def stage(params, region, number):
            own = _region(params, region)
            rows = slice(2 * number, 2 * number + 2)
            blocks = jax.tree.map(lambda x: x[rows], own["blocks"])
            return bind(half, own | {"blocks": blocks})

        def losses(params):
            ended = [[] for _ in range(self.REGIONS)]
            for start in range(self.REGIONS):
                for m in range(self.MICROBATCHES):
                    tokens = jnp.asarray(batch[start, m :: self.MICROBATCHES])
                    first = stage(params, start, 0)
                    x = first.run_blocks(first.embed(tokens[:, :-1]))
                    end = (start + int(shifts[m])) % self.REGIONS
                    last = stage(params, end, 1)
                    logits = last.norm(last.run_blocks(x)) @ last.output_head()
                    nll = optax.softmax_cross_entropy_with_integer_labels(
                        logits, tokens[:, 1:]
                    )
                    ended[end].append(nll.mean())
            return jnp.stack([jnp.stack(each).mean() for each in ended])

        def total(params):
            each = losses(params)
            return each.sum(), each

        (_, loss), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        return jax.device_get((loss, grads))

    def test_routed_steps_are_stages_composed_by_hand(self):
        params = _draw(_CONFIG, self.REGIONS)
        _assert_close(self.run(params, self.REGIONS), self.expected(params))

    def test_regions_with_other_parameters_feel_it(self):
        params = _draw(_CONFIG, self.REGIONS)
        routed, home = self.run(params, self.REGIONS), self.run(params)
        assert abs(routed[0].mean() - home[0].mean()) > 1e-3
        mean = [grads["embedding"].mean(0) for _, grads in (routed, home)]
        assert np.abs(mean[0] - mean[1]).max() > 1e-3

    def test_equal_regions_keep_the_mean_loss_and_gradient(self):
        params = jax.tree.map(
            lambda x: np.broadcast_to(x, (self.REGIONS, *x.shape)), _draw(_CONFIG)
        )
        routed, home = self.run(params, self.REGIONS), self.run(params)
        assert np.abs(routed[0] - home[0]).max() > 1e-3
        means = [jax.tree.map(lambda x: x.mean(0), out) for out in (routed, home)]
        _assert_close(*means)

    @pytest.mark.parametrize("length", [1, 2])
    def test_regions_that_share_a_device_are_refused(self, length):
        mesh = make_mesh(4, stage=2, devices=jax.devices()[: 2 * length])
        program = _over_regions(
            mesh,
            make_pipelined_loss_fn(_CONFIG, 2, 2, num_routed_regions=4),
            lambda fn: functools.partial(jax.lax.map, fn),
        )
        with pytest.raises(ValueError, match="routing between 4 regions .* as many pl"):
            jax.eval_shape(program, _draw(_CONFIG, 4), _tokens(4), _keys(4))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "sizes", "message"),
        [
            ({}, (3, 1), "num_layers=4 .* stages=3; use num_layers=6 or stages=2"),
            ({}, (0, 1), "stages=0 must be at least 1"),
            ({}, (2, 0), "microbatches=0 must be at least 1"),
            ({"scan_layers": False}, (2, 1), "stages=2 .* scan_layers=True"),
            ({"scan_layers": False}, (1, 1), "use scan_layers=True"),
        ],
    )
    def test_sizes_that_make_no_pipeline(self, changes, sizes, message):
        config = dataclasses.replace(_CONFIG, **changes)
        with pytest.raises(ValueError, match=message):
            make_pipelined_loss_fn(config, *sizes)

    def test_a_batch_that_does_not_divide(self):
        with pytest.raises(ValueError, match=r"=6 .* 2 \* 2; use batch_per_region=8"):
            check_pipeline(_CONFIG, 2, 2, batch=6, data=2)
        check_pipeline(_CONFIG, 2, 2, batch=8, data=2)
        loss_fn = make_pipelined_loss_fn(_CONFIG, 2, 3)
        with jax.set_mesh(make_mesh(1, stage=2)):
            with pytest.raises(ValueError, match="8 sequences .* microbatches=3"):
                jax.eval_shape(loss_fn, _draw(_CONFIG), _tokens(), _KEY)

    def test_a_mesh_without_these_stages(self):
        loss_fn = make_pipelined_loss_fn(_CONFIG, 2, 2)
        with pytest.raises(ValueError, match="stages=2, but the mesh .* stage=2"):
            jax.eval_shape(loss_fn, _draw(_CONFIG), _tokens(), _KEY)
        with jax.set_mesh(make_mesh(1)):
            with pytest.raises(ValueError, match="'stage': 1"):
                jax.eval_shape(loss_fn, _draw(_CONFIG), _tokens(), _KEY)

    def test_specs_of_unscanned_blocks(self):
        params = _draw(dataclasses.replace(_CONFIG, scan_layers=False))
        with pytest.raises(ValueError, match="no layer axis for stage='stage'"):
            partition_specs(params, stage="stage")


def test_specs_divide_layers_and_nothing_else_more():
    params = _draw(_UNTIED)
    specs = partition_specs(params, stage="stage")
    assert specs["blocks"]["mlp"]["down"] == P("stage", "model", "data")
    assert specs["blocks"]["attention"]["key_norm"]["scale"] == P("stage", None)
    for name in ("embedding", "head", "norm"):
        assert specs[name] == partition_specs(params)[name]
