"""Evaluation: the plain mean over batches, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.train.evaluate import make_evaluate


def make_batches(tiny, num_batches):
    """Evaluation batches `[E, B, ...]`: the regions' training batches laid out."""
    batches = [tiny.make_batch(50 + i) for i in range(-(-num_batches // 4))]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    return jax.tree.map(lambda x: x[:num_batches], joined)


@pytest.mark.parametrize(
    ("length", "data", "model"), [(4, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2), (1, 2, 2)]
)
def test_an_evaluation_is_the_mean_of_the_batches_losses(tiny, length, data, model):
    mesh = make_mesh(4, data, model, jax.devices()[: length * data * model])
    batches = make_batches(tiny, 8)
    params = tiny.make_params()
    loss = make_evaluate(tiny.loss_fn, mesh, batches)(params)
    losses, _ = jax.vmap(tiny.loss_fn, (None, 0, None))(
        params, batches, jax.random.key(0)
    )

    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    # Float32 sums of eight losses in another order.
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_an_evaluation_compiles_once_for_equally_sharded_parameters(tiny):
    program = tiny.shared_program("diloco")
    traces = []

    def loss_fn(params, batch, key):
        traces.append(1)
        return tiny.loss_fn(params, batch, key)

    evaluate = make_evaluate(loss_fn, program.mesh, make_batches(tiny, 4))
    state = tiny.start(program)
    first = evaluate(program.mean_params(state))
    num_traces = len(traces)
    state, _ = tiny.finish(program, state, 4)
    later = evaluate(program.mean_params(state))
    assert len(traces) == num_traces
    assert later < first


@pytest.mark.parametrize("num_batches", [1, 6])
def test_batches_that_the_region_axis_does_not_divide_are_refused(tiny, num_batches):
    why = f"eval_batches={num_batches} is not a multiple .* axis, 4"
    with pytest.raises(ValueError, match=why):
        make_evaluate(tiny.loss_fn, make_mesh(4), make_batches(tiny, num_batches))


def test_the_key_of_an_evaluation_is_fixed(tiny):
    """Dropout left on would be the same at every evaluation."""

    def loss_fn(params, batch, key):
        return jax.random.uniform(key) + 0 * params["embed"].sum(), {}

    evaluate = make_evaluate(loss_fn, make_mesh(4), make_batches(tiny, 4))
    first, again = (evaluate(tiny.make_params()) for _ in range(2))
    assert first == again == jax.random.uniform(jax.random.key(0))
