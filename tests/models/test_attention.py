"""Attention's kernels: splash against plain attention, and which one is chosen."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cocodc_jax.models import get
from cocodc_jax.models.attention import (
    attend,
    choose,
    head_width_of,
    num_blocks,
    splash_share,
)
from tests.numerics import assert_all_close
from tests.slow import mostly_slow


def drawn(batch, length, kv_heads, width, dtype="float32"):
    """Queries of four heads, keys, values, and a weight of each output."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(batch, length, heads, width)), dtype)
        for heads in (4, kv_heads, kv_heads, 4)
    )


@pytest.mark.parametrize("sequence", [None, "sequence"])
def test_splash_is_plain_attention(sequence):
    """In float32, values and gradients, with two query heads a key.

    Also where two devices share the query's positions.
    """
    query, key, value, weight = drawn(2, 256, 2, 64)

    def result(kernel):
        over = None if kernel == "plain" else sequence
        attention = functools.partial(
            attend, kernel=kernel, sequence=over, interpret=True
        )
        if over is not None:
            attention = jax.shard_map(
                attention,
                mesh=jax.make_mesh((2,), (over,), axis_types=(AxisType.Auto,)),
                in_specs=(P(None, over), P(), P()),
                out_specs=P(None, over),
                check_vma=False,
            )

        def weighed(*qkv):
            return jnp.sum(attention(*qkv) * weight)

        return jax.jit(jax.value_and_grad(weighed, (0, 1, 2)))(query, key, value)

    # Sums over positions in another order.
    assert_all_close(result("splash"), result("plain"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "tolerance"),
    mostly_slow(
        [(4, "float32", 2e-6), (2, "bfloat16", 2e-2), (1, "float32", 2e-6)],
        quick=[(2, "bfloat16", 2e-2), (1, "float32", 2e-6)],
    ),
)
def test_plain_attention_is_that_of_jax(kv_heads, dtype, tolerance):
    """Values, gradients, and gradients differentiated forward, as merges want them."""
    query, key, value, weight = drawn(3, 20, kv_heads, 8, dtype)

    def result(attention):
        def weighed(*qkv):
            return jnp.sum((attention(*qkv) * weight).astype(jnp.float32))

        def gradient(*qkv):
            return jax.grad(weighed, (0, 1, 2))(*qkv)

        qkv = (query, key, value)
        return attention(*qkv), jax.jit(lambda *x: jax.jvp(gradient, x, qkv))(*qkv)

    actual, expected = (
        jax.tree.map(lambda x: np.asarray(x, np.float32), result(attention))
        for attention in (
            functools.partial(attend, kernel="plain"),
            functools.partial(jax.nn.dot_product_attention, is_causal=True),
        )
    )
    assert_all_close(actual, expected, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("length", [130, 256])
def test_blocks_of_queries_are_plain_attention_of_fewer_pairs(length):
    """With two query heads a key: values, gradients, and those differentiated again."""
    query, key, value, weight = drawn(2, length, 2, 8)

    def compiled(kernel):
        def gradient(*qkv):
            return jax.grad(lambda *x: jnp.vdot(attend(*x, kernel), weight), (0, 1, 2))(
                *qkv
            )

        def everything(*qkv):
            return attend(*qkv, kernel), jax.jvp(gradient, qkv, qkv)

        return jax.jit(everything).lower(query, key, value).compile()

    plain = compiled("plain")
    blocks = compiled("blocks")
    qkv = (query, key, value)
    assert_all_close(blocks(*qkv), plain(*qkv), rtol=1e-4, atol=1e-4)
    flops = [program.cost_analysis()["flops"] for program in (blocks, plain)]
    pairs = {2: 3 / 4, 4: 5 / 8}[num_blocks(length)]
    assert flops[0] / flops[1] == pytest.approx(pairs, rel=0.03)


def test_plain_attention_of_large_scores_is_finite():
    """The largest score of a row is taken off before the exponential."""
    x = 300 * jax.random.normal(jax.random.key(0), (1, 9, 2, 16))
    value, gradient = jax.value_and_grad(lambda x: attend(x, x, x, "plain").sum())(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


SMALL = get("small")
WIDE, WIDER = (dataclasses.replace(SMALL, num_heads=n, num_kv_heads=n) for n in (2, 1))
FLOAT32 = dataclasses.replace(SMALL, compute_dtype="float32")


@pytest.mark.parametrize(
    ("config", "platform", "length", "flags", "expected"),
    [
        (SMALL, "cpu", 1024, {}, "blocks"),
        (SMALL, "cpu", 1024, {"is_divided": False}, "blocks"),
        (SMALL, "cpu", 1024, {"needs_forward_mode": True}, "blocks"),
        (SMALL, "cpu", 1024, {"sequence_axis": 2}, "plain"),
        (SMALL, "cpu", 127, {}, "plain"),
        (SMALL, "rocm", 1024, {}, "plain"),
        (SMALL, "tpu", 1024, {}, "splash"),
        (SMALL, "tpu", 1000, {}, "plain"),
        (SMALL, "tpu", 1024, {"is_divided": False}, "plain"),
        (SMALL, "tpu", 1024, {"needs_forward_mode": True}, "plain"),
        (SMALL, "gpu", 1000, {}, "cudnn"),
        (SMALL, "cuda", 1024, {}, "cudnn"),
        (FLOAT32, "gpu", 1024, {}, "plain"),
        (dataclasses.replace(SMALL, attention="plain"), "tpu", 1024, {}, "plain"),
        (WIDE, "gpu", 8, {}, "cudnn"),
        (WIDER, "gpu", 8, {}, "plain"),
        (dataclasses.replace(SMALL, width=32), "gpu", 8, {}, "plain"),
    ],
)
def test_the_platform_chooses_the_kernel(config, platform, length, flags, expected):
    chosen = choose(config, platform, length, **{"is_divided": True} | flags)
    assert chosen == dataclasses.replace(config, attention=expected)


@pytest.mark.parametrize(
    ("changes", "platform", "length", "flags", "message"),
    [
        ({"attention": "splash"}, "cpu", 100, {},
         "attention='splash' runs on TPUs only and takes lengths that are multiples "
         "of 128, and sequence_length=100; use attention='auto'"),
        ({"attention": "cudnn", "compute_dtype": "float32"}, "gpu", 128, {},
         "attention='cudnn' computes in bfloat16, and compute_dtype='float32'; use"),
        ({"attention": "cudnn", "width": 96}, "gpu", 128, {},
         "attention='cudnn' takes heads of a multiple of 8 features up to 256, and "
         "width=96 with num_heads=8 makes heads of 12; use attention='auto'"),
        ({"attention": "splash"}, "tpu", 256, {"sequence_axis": 4},
         "multiples of 128, and sequence_length=256 over sequence_axis=4; use"),
        ({"attention": "cudnn"}, "gpu", 256, {"sequence_axis": 2},
         "attention='cudnn' does not support sequence_axis=2; use"),
        ({"attention": "blocks"}, "cpu", 256, {"sequence_axis": 2},
         "attention='blocks' does not support sequence_axis=2; use"),
        ({"attention": "blocks"}, "cpu", 100, {},
         "'blocks' is plain attention where sequence_length=100 makes no blocks of"),
        ({"attention": "cudnn"}, "gpu", 128, {"is_divided": False},
         "attention='cudnn' is not for pipelines; use"),
        ({"attention": "cudnn"}, "gpu", 128, {"needs_forward_mode": True},
         "has no second derivatives, which the method takes; use"),
    ],
)  # fmt: skip
def test_an_unsupported_kernel_is_refused(changes, platform, length, flags, message):
    config = dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        choose(config, platform, length, **{"is_divided": True} | flags)


@pytest.mark.parametrize(
    ("capability", "kernel"), [("8.0", "plain"), ("9.0", "cudnn"), ("10.0", "cudnn")]
)
def test_wide_heads_have_a_kernel_from_hopper_on(capability, kernel):
    device = types.SimpleNamespace(compute_capability=capability)
    most = head_width_of(device)
    chosen = choose(WIDE, "gpu", 128, is_divided=True, most_head_width=most)
    assert chosen.attention == kernel


@pytest.mark.parametrize("capability", ["7.5", "gfx90a"])
def test_gpus_without_a_kernel_have_plain_attention(capability):
    most = head_width_of(types.SimpleNamespace(compute_capability=capability))
    chosen = choose(SMALL, "gpu", 128, is_divided=True, most_head_width=most)
    assert chosen.attention == "plain"

    config = dataclasses.replace(SMALL, attention="cudnn")
    with pytest.raises(ValueError, match="'cudnn' is not made for this GPU; use"):
        choose(config, "gpu", 128, is_divided=True, most_head_width=most)


def test_blocks_above_the_diagonal_are_left_out():
    assert splash_share(128) == 1
    assert splash_share(1024) == 3 / 4
    assert splash_share(384) == 4 / 6
    # Of two devices the first computes one block of four, the second two.
    assert splash_share(1024, 512) == 3 / 4
    assert splash_share(512, 256) == 3 / 4
