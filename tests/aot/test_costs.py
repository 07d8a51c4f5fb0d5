"""Operations of traced programs against counts by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import models
from cocodc_jax.aot.costs import written_flops
from cocodc_jax.models.attention import attend
from cocodc_jax.models.dispatch import FURTHER_ROUND

X = jnp.zeros((4, 8))
PRODUCT = 2 * 4 * 8 * 4


def product(x):
    return x @ x.T


def looped(x):
    return jax.lax.scan(
        lambda total, _: (total + product(x), None), product(x), None, 3
    )


def chosen(x):
    return jax.lax.cond(x[0, 0] > 0, lambda: product(x) @ x, lambda: x)


def further(x):
    with jax.named_scope(FURTHER_ROUND):
        return chosen(x)


def shared(x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P("data"))(x)


def grouped(x):
    """Rows by three experts, and the weights' gradient: one product a row and each."""
    weights = jnp.zeros((3, 8, 5))
    sizes = jnp.array([1, 0, 3])
    out = functools.partial(jax.lax.ragged_dot, x, group_sizes=sizes)
    return jax.vjp(out, weights)[1](jnp.ones((4, 5)))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (grouped, 2 * 4 * 8 * 5),
        (product, PRODUCT),
        (looped, 4 * PRODUCT),
        (chosen, PRODUCT + 2 * 4 * 4 * 8),
        (further, 0),
        (shared, 2 * PRODUCT),
        (jax.checkpoint(jax.jit(product)), PRODUCT),
        # A gradient's two, and the first again.
        (jax.grad(lambda x: jnp.sum(jnp.square(jax.checkpoint(product)(x)))),
         3 * PRODUCT),
    ],
    ids=["grouped", "product", "scan", "cond", "rounds", "shard_map", "nested",
         "gradient"],
)  # fmt: skip
def test_products_count_as_often_as_they_run(program, expected):
    jaxpr = jax.make_jaxpr(program)(X)
    assert written_flops(jaxpr) == expected
    is_grouped = program is grouped
    assert written_flops(jaxpr, 0.75) == expected * (0.75 if is_grouped else 1)


def test_a_splash_kernel_of_one_block_counts_every_pair():
    batch = 2
    length = 256
    heads = 4
    width = 16
    heads_of = jnp.zeros((batch, length, heads, width), jnp.bfloat16)

    splash = functools.partial(attend, kernel="splash", interpret=True)
    jaxpr = jax.make_jaxpr(splash)(heads_of, heads_of, heads_of)

    # One block: every pair, scores and values.
    assert written_flops(jaxpr) == 2 * 2 * batch * heads * length**2 * width


def test_unused_results_are_not_counted():
    def kept(x):
        y = jax.jit(lambda x: (product(x), product(x) @ x))(x)
        return y[1]

    assert written_flops(jax.make_jaxpr(kept)(X)) == PRODUCT + 2 * 4 * 4 * 8


CONFIG = models.TransformerConfig(
    vocab_size=32, num_layers=3, width=16, mlp_width=24, num_heads=4, num_kv_heads=2
)
# Two sequences, each of 6 positions and the target of the last one.
TOKENS = jax.ShapeDtypeStruct((2, 7), jnp.int32)
# Attention's products in the 3 layers: 2 of them, of 2 operations for each of the
# 2 sequences, 6 * 6 pairs of positions and 16 features of all heads.
SCORES = 3 * 2 * 2 * 2 * (6 * 6) * 16
# Products with weights in the 3 layers: 2 operations for each of the 12 tokens and of
# the entries of the matrices of queries, keys, values and outputs, gate and up. The
# result of the last product, down, is not needed for a gradient.
BLOCKS = 3 * 2 * 12 * (16 * (16 + 8 + 8 + 16) + 2 * 16 * 24)


@pytest.mark.parametrize(
    ("remat", "expected"),
    [("dots", SCORES), ("attention", SCORES + BLOCKS), ("full", SCORES + BLOCKS)],
)
def test_a_policy_recomputes_the_products_that_it_does_not_keep(remat, expected):
    def count(config):
        params = jax.eval_shape(
            functools.partial(models.init_params, config), jax.random.key(0)
        )
        gradient = jax.grad(models.make_loss_fn(config), has_aux=True)
        return written_flops(jax.make_jaxpr(gradient)(params, TOKENS, None))

    recomputed = count(dataclasses.replace(CONFIG, remat=remat)) - count(CONFIG)
    assert recomputed == expected
