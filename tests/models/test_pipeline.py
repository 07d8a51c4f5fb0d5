"""The pipelined loss against the plain one: values, gradients, layout, routing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh, regional
from cocodc_jax.models import (
    check_pipeline,
    make_loss_fn,
    make_pipelined_loss_fn,
    partition_specs,
)
from cocodc_jax.program.region_program import RegionProgram
from tests.jaxprs import equations
from tests.models.pipelined import (
    ADAPTED,
    BFLOAT16,
    CHUNKED,
    CONFIG,
    KEY,
    UNTIED,
    alike,
    assert_close,
    draw,
    first_stage,
    keys,
    last_stage,
    over_regions,
    place,
    place_regions,
    plain,
    plain_regions,
    plain_steps,
    step,
    tokens,
)
from tests.program.tiny import follow
from tests.slow import mostly_slow

_REGIONS = 2


class TestOneRegion:
    @pytest.mark.parametrize(
        ("config", "stages", "microbatches"),
        mostly_slow(
            [(CONFIG, 1, 4), (CHUNKED, 2, 1), (UNTIED, 4, 4), (ADAPTED, 2, 2)],
            quick=[(CHUNKED, 2, 1), (UNTIED, 4, 4)],
        ),
    )
    def test_loss_and_gradient_are_the_plain_models(self, config, stages, microbatches):
        mesh = make_mesh(1, stage=stages)
        params = draw(config)
        placed = place(mesh, params, partition_specs(params, stage="stage"))

        with jax.set_mesh(mesh):
            loss_fn = make_pipelined_loss_fn(config, stages, microbatches)
            program = jax.jit(step(loss_fn)).lower(placed, tokens(), KEY).compile()

            expected = plain(config if config in (UNTIED, ADAPTED) else CONFIG)
            assert_close(program(placed, tokens(), KEY), expected)
        assert "collective-permute" in str(program.as_text())

    def test_a_scaled_loss_scales_its_gradient_and_hessian_vector_product(self):
        params = draw(CONFIG)
        direction = jax.tree.map(lambda x: np.cos(10 * x), params)

        def products(loss_fn, scale):
            def grad(params):
                def scaled(params):
                    loss, aux = loss_fn(params, tokens(), KEY)
                    return scale * loss, aux

                return step(scaled)(params)

            forward = jax.jit(lambda p, d: jax.jvp(grad, (p,), (d,)))
            (value, grads), (_, product) = forward(params, direction)
            return value, grads, product

        (loss, aux), grads, product = jax.device_get(products(make_loss_fn(CONFIG), 1))
        with jax.set_mesh(make_mesh(1, stage=4)):
            loss_fn = make_pipelined_loss_fn(CONFIG, 4, 2)
            actual = jax.device_get(products(loss_fn, 3))
        assert_close(actual[0], (3 * loss, aux))
        assert_close(actual[1], jax.tree.map(lambda x: 3 * x, grads), atol=6e-6)
        # Second derivatives here are up to some tens.
        thrice = jax.tree.map(lambda x: 3 * x, product)
        assert_close(actual[2], thrice, rtol=1e-3, atol=3e-3)


class TestRegions:
    @pytest.mark.parametrize(
        ("config", "data", "model", "length", "block"),
        [
            (CHUNKED, 2, 1, 2, None),
            pytest.param(CONFIG, 1, 2, 2, None, marks=pytest.mark.slow),
            pytest.param(CHUNKED, 1, 1, 1, "map", marks=pytest.mark.slow),
            pytest.param(CONFIG, 1, 1, 1, "vmap", marks=pytest.mark.slow),
        ],
    )
    def test_stages_inside_regions_give_the_loss_and_gradient_of_plain_regions(
        self, config, data, model, length, block
    ):
        devices = jax.devices()[: length * 2 * data * model]
        mesh = make_mesh(_REGIONS, data, model, devices, stage=2)
        params, batches = place_regions(mesh, draw(CONFIG, _REGIONS), tokens(_REGIONS))
        loss_fn = make_pipelined_loss_fn(config, 2, 2)
        blocks = {
            "map": lambda fn: functools.partial(jax.lax.map, fn),
            "vmap": jax.vmap,
        }
        program = over_regions(mesh, loss_fn, *([blocks[block]] if block else []))
        actual = jax.jit(program)(params, batches, keys(_REGIONS))

        assert_close(actual, plain_regions(CONFIG, _REGIONS))
        _, grads = actual
        up = grads["blocks"]["mlp"]["up"].addressable_shards[0].data
        assert up.shape == (_REGIONS // length, 2, 16 // data, 24 // model)

    def test_a_bfloat16_pipeline_compiles(self):
        mesh = make_mesh(_REGIONS, model=2, stage=2)
        drawn = draw(BFLOAT16, _REGIONS)
        params, batches = place_regions(mesh, drawn, tokens(_REGIONS))

        program = over_regions(mesh, make_pipelined_loss_fn(BFLOAT16, 2, 2))
        (loss, _), _ = jax.jit(program)(params, batches, keys(_REGIONS))

        plain_loss = jax.jit(jax.vmap(make_loss_fn(BFLOAT16), (0, 0, None)))
        expected, _ = plain_loss(drawn, tokens(_REGIONS), KEY)

        # Eight bits of mantissa, averaged over 72 tokens.
        np.testing.assert_allclose(loss, expected, rtol=2e-3)

    def test_pipelined_regions_exchange_nothing(self):
        mesh = make_mesh(_REGIONS, stage=2)
        program = over_regions(mesh, make_pipelined_loss_fn(CONFIG, 2, 2))
        jaxpr = jax.make_jaxpr(program)(
            draw(CONFIG, _REGIONS), tokens(_REGIONS), keys(_REGIONS)
        )
        collectives = [
            e
            for e in equations(jaxpr.jaxpr)
            if e.primitive.name.startswith(("psum", "ppermute", "all_"))
        ]

        assert collectives
        assert not any("region" in str(e.params) for e in collectives)


class TestProgram:
    """Through the runtime: two regions, of two stages and two data shards each."""

    @staticmethod
    def result(mesh, loss_fn, specs):
        program = RegionProgram(
            loss_fn,
            optax.adam(1e-2),
            methods.get("diloco", sync_interval=2),
            draw(CONFIG),
            _REGIONS,
            mesh=mesh,
            param_specs=specs,
        )
        stream = (tokens(_REGIONS)[:, ::way] for way in (1, -1, 1, -1))
        state, outputs = follow(program, program.init(draw(CONFIG), KEY), stream, 4)
        outer = jax.device_get(program.outer_params(state))
        return state.region, (np.concatenate([x.losses for x in outputs]), outer)

    def test_diloco_trains_a_pipeline_as_the_plain_model(self):
        mesh = make_mesh(_REGIONS, data=2, stage=2)
        specs = partition_specs(draw(CONFIG), stage="stage")
        pipelined = make_pipelined_loss_fn(CONFIG, 2, 4)
        regions, actual = self.result(mesh, pipelined, specs)
        plain_regions, expected = self.result(
            make_mesh(_REGIONS), make_loss_fn(CONFIG), None
        )

        # Adam divides by the root of small numbers.
        assert_close(actual, expected, rtol=2e-4, atol=2e-5)

        states = (regions.opt_state, plain_regions.opt_state)
        assert_close(*states, rtol=2e-3, atol=2e-5)

        adam = regions.opt_state[0]
        for tree in (regions.params, adam.mu, adam.nu):
            up = tree["blocks"]["mlp"]["up"]
            assert up.sharding == regional(mesh, P("stage", "data", "model"))
            assert up.addressable_shards[0].data.shape == (1, 2, 8, 24)
            scale = tree["blocks"]["mlp_norm"]["scale"]
            assert scale.addressable_shards[0].data.shape == (1, 2, 16)


class TestRouting:
    STAGES = 2
    MICROBATCHES = 2
    REGIONS = 4

    @classmethod
    @functools.cache
    def program(cls):
        mesh = make_mesh(cls.REGIONS, stage=cls.STAGES)
        loss_fn = make_pipelined_loss_fn(
            CONFIG, cls.STAGES, cls.MICROBATCHES, num_routed_regions=cls.REGIONS
        )
        return mesh, jax.jit(over_regions(mesh, loss_fn))

    def routed(self, params):
        mesh, program = self.program()
        placed = place_regions(mesh, params, tokens(self.REGIONS))
        (loss, _), grads = program(*placed, keys(self.REGIONS))
        return jax.device_get((loss, grads))

    def at_home(self, params):
        (loss, _), grads = plain_steps(CONFIG, params, tokens(self.REGIONS))
        return loss, grads

    def expected(self, params):
        """Stages composed by hand; no mesh, no collective."""
        key = jax.random.wrap_key_data(keys(self.REGIONS)[0])
        num_ticks = self.MICROBATCHES + self.STAGES - 1
        shifts = np.asarray(jax.random.randint(key, (num_ticks,), 0, self.REGIONS))
        assert shifts[:2].all()
        assert shifts[0] != shifts[1]
        # Microbatches before regions; those of region r go to region r + shift.
        batch = tokens(self.REGIONS).swapaxes(0, 1)
        batches = np.stack([batch[m :: self.MICROBATCHES] for m in range(2)])
        batches = jnp.asarray(batches.swapaxes(1, 2))

        def send(x):
            return jnp.stack([jnp.roll(x[m], int(shifts[m]), 0) for m in range(2)])

        def total(params):
            x = jax.vmap(jax.vmap(first_stage), (None, 0))(params, batches)
            ended = jax.vmap(jax.vmap(last_stage), (None, 0, 0))
            of_regions = ended(params, send(x), send(batches)).mean(0)
            return of_regions.sum(), of_regions

        (_, loss), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        return jax.device_get((loss, grads))

    def test_routed_steps_are_stages_composed_by_hand(self):
        params = draw(CONFIG, self.REGIONS)
        assert_close(self.routed(params), self.expected(params))

    def test_equal_regions_keep_the_mean_loss_and_gradient(self):
        params = alike(draw(CONFIG), self.REGIONS)
        routed = self.routed(params)
        home = self.at_home(params)
        assert np.abs(routed[0] - home[0]).max() > 1e-3
        means = [jax.tree.map(lambda x: x.mean(0), out) for out in (routed, home)]
        assert_close(*means)

    @pytest.mark.parametrize("length", [1, 2])
    def test_regions_that_share_a_device_are_refused(self, length):
        mesh = make_mesh(4, stage=2, devices=jax.devices()[: 2 * length])
        program = over_regions(
            mesh,
            make_pipelined_loss_fn(CONFIG, 2, 2, num_routed_regions=4),
            lambda fn: functools.partial(jax.lax.map, fn),
        )
        with pytest.raises(ValueError, match="routing between 4 regions .* as many pl"):
            jax.eval_shape(program, draw(CONFIG, 4), tokens(4), keys(4))


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
    def test_invalid_sizes_of_a_pipeline_are_refused(self, changes, sizes, message):
        config = dataclasses.replace(CONFIG, **changes)
        with pytest.raises(ValueError, match=message):
            make_pipelined_loss_fn(config, *sizes)

    def test_a_batch_that_does_not_divide_is_refused(self):
        with pytest.raises(ValueError, match=r"=6 .* 2 \* 2; use batch_per_region=8"):
            check_pipeline(CONFIG, 2, 2, batch=6, data=2)
        check_pipeline(CONFIG, 2, 2, batch=8, data=2)

    def test_sequences_that_microbatches_do_not_divide_are_refused(self):
        loss_fn = make_pipelined_loss_fn(CONFIG, 2, 3)
        with jax.set_mesh(make_mesh(1, stage=2)):
            with pytest.raises(ValueError, match="8 sequences .* microbatches=3"):
                jax.eval_shape(loss_fn, draw(CONFIG), tokens(), KEY)

    def test_a_mesh_without_these_stages_is_refused(self):
        loss_fn = make_pipelined_loss_fn(CONFIG, 2, 2)
        with pytest.raises(ValueError, match="stages=2, but the mesh .* stage=2"):
            jax.eval_shape(loss_fn, draw(CONFIG), tokens(), KEY)
        with jax.set_mesh(make_mesh(1)):
            with pytest.raises(ValueError, match="'stage': 1"):
                jax.eval_shape(loss_fn, draw(CONFIG), tokens(), KEY)

    def test_specs_of_unscanned_blocks(self):
        params = draw(dataclasses.replace(CONFIG, scan_layers=False))
        with pytest.raises(ValueError, match="no layer axis for stage='stage'"):
            partition_specs(params, stage="stage")


def test_stages_divide_only_the_layers():
    params = draw(UNTIED)
    specs = partition_specs(params, stage="stage")
    assert specs["blocks"]["mlp"]["down"] == P("stage", "model", "data")
    assert specs["blocks"]["attention"]["key_norm"]["scale"] == P("stage", None)

    without_stages = partition_specs(params)
    assert specs["embedding"] == without_stages["embedding"]
    assert specs["head"] == without_stages["head"]
    assert specs["norm"] == without_stages["norm"]
