"""A pipeline with compressed messages in both directions, against stages by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.models import Subspace, confine, make_pipelined_loss_fn
from cocodc_jax.run.config.stage_codec import build_codec
from cocodc_jax.transforms.compression import parse
from tests.models.pipelined import (
    BATCH,
    CONFIG,
    KEY,
    LENGTH,
    alike,
    assert_close,
    draw,
    first_stage,
    keys,
    last_stage,
    over_regions,
    place_regions,
    plain,
    plain_steps,
    step,
    tokens,
)

MICROBATCHES = 4


def last(params, x, batch):
    """Of one microbatch, its share of the batch's loss."""
    return last_stage(params, x, batch) / MICROBATCHES


@functools.cache
def pieces():
    """The first stage, its gradient, and the last stage with its two gradients."""
    return (
        jax.jit(first_stage),
        jax.jit(lambda p, b, g: jax.vjp(lambda p: first_stage(p, b), p)[1](g)[0]),
        jax.jit(jax.value_and_grad(last, argnums=(0, 1))),
    )


@functools.cache
def by_hand(text):
    """Two stages with a compressor between them: messages, losses, gradients."""
    compressor = parse(text)
    sent = []

    @jax.jit
    def send(x, state):
        message, state = compressor.encode(x, state)
        return compressor.decode(message), state

    def way(values):
        state = compressor.init(values[0])
        came = []
        for x in values:
            y, state = send(x, state)
            sent.append(np.asarray(y))
            came.append(y)
        return came

    params = draw(CONFIG)
    batches = [jnp.asarray(tokens()[m::MICROBATCHES]) for m in range(MICROBATCHES)]
    ahead, back, end = pieces()
    came = way([ahead(params, batch) for batch in batches])
    ends = [end(params, x, b) for x, b in zip(came, batches, strict=True)]

    # Backward begins with the last microbatch.
    returned = way([of_x for _, (_, of_x) in reversed(ends)])[::-1]
    grads = [of_params for _, (of_params, _) in ends]
    grads += [back(params, b, g) for b, g in zip(batches, returned, strict=True)]
    loss = sum(value for value, _ in ends)
    return sent, loss, jax.tree.map(lambda *x: sum(x), *grads)


def entries(sent):
    """Nine bits of index and 32 of value for each that was sent, and all targets."""
    assert sent[0].size == BATCH // MICROBATCHES * LENGTH * 16 == 288
    return sum(np.count_nonzero(x) for x in sent) * 41 / 8 + 4 * BATCH * LENGTH


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("error_feedback(threshold(density=0.2, every=2))", entries),
        pytest.param(
            "none",
            lambda sent: 2 * BATCH * LENGTH * 64 + 4 * BATCH * LENGTH,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compressed_messages_are_stages_composed_by_hand(text, num_bytes):
    loss_fn = make_pipelined_loss_fn(CONFIG, 2, MICROBATCHES, codec=build_codec(text))
    with jax.set_mesh(make_mesh(1, stage=2)):
        (loss, aux), grads = jax.jit(step(loss_fn))(draw(CONFIG), tokens(), KEY)
    sent, expected, expected_grads = by_hand(text)
    assert_close(loss, expected)
    assert_close(grads, expected_grads)
    np.testing.assert_allclose(aux["stage_bytes"], num_bytes(sent), rtol=1e-6)

    if text == "none":
        assert_close(loss, plain(CONFIG)[0][0])
        assert_close(grads, plain(CONFIG)[1])
    else:
        assert abs(loss - plain(CONFIG)[0][0]) > 1e-3
        # A fifth of the entries, and half of that again as room for an old threshold.
        assert aux["stage_bytes"] < 0.3 * 2 * BATCH * LENGTH * 16 * 41 / 8 + 288


def test_a_threshold_by_hand():
    codec = build_codec("threshold(density=0.25, every=2)")

    @jax.jit
    def send(x, state):
        message, state = codec.encode(x, state)
        return codec.decode(message), codec.num_bytes(message), state

    x = np.array([[[4.0, -3.0, 0.0, 1.0]]], np.float32)
    came, num_bytes, state = send(x, codec.init(x))
    assert came.tolist() == [[[4, 0, 0, 0]]]
    # One entry: 32 bits of value, 3 of index (of four places, or none).
    assert num_bytes == 35 / 8
    came, _, state = send(x - 1, state)  # The threshold is still 4.
    assert came.tolist() == [[[0, -4, 0, 0]]]
    came, _, _ = send(x / 4, state)  # The threshold is taken again.
    assert came.tolist() == [[[1, 0, 0, 0]]]


def test_a_subspace_and_a_codec_go_together():
    subspace = Subspace(16, 3)
    loss_fn = make_pipelined_loss_fn(
        CONFIG, 4, 2, subspace=subspace, codec=build_codec("ef+threshold:0.5")
    )
    whole = make_pipelined_loss_fn(CONFIG, 4, 2, subspace=subspace)
    params = confine(draw(CONFIG), subspace)
    with jax.set_mesh(make_mesh(1, stage=4)):
        jaxpr, shape = jax.make_jaxpr(step(loss_fn), return_shape=True)(
            params, tokens(), KEY
        )
        assert jax.eval_shape(step(whole), params, tokens(), KEY) == shape

    # Messages without a codec are not sharded.
    assert "all_to_all" not in str(jaxpr)


def test_routed_gradients_come_back_the_way_that_messages_went():
    regions = 2
    mesh = make_mesh(2, stage=2)
    loss_fn = make_pipelined_loss_fn(
        CONFIG, 2, 4, num_routed_regions=regions, codec=build_codec("none")
    )
    params = alike(draw(CONFIG), regions)
    placed = place_regions(mesh, params, tokens(regions))
    program = jax.jit(over_regions(mesh, loss_fn))
    (loss, _), grads = jax.device_get(program(*placed, keys(regions)))
    (home, _), home_grads = plain_steps(CONFIG, params, tokens(regions))

    assert np.abs(loss - home).max() > 1e-3
    mean, home_mean = jax.tree.map(
        lambda x: x.mean(0), ((loss, grads), (home, home_grads))
    )
    assert_close(mean, home_mean)


def test_a_codec_that_draws_is_refused():
    with pytest.raises(ValueError, match=r"stage_compress='int8\(stoch.*needs a key"):
        build_codec("int8(stochastic=True)")
