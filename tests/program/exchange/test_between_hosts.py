"""Messages that cross on the outer mesh, beside the inner steps: the same numbers."""

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.program.region_program import RegionProgram


def final(tiny, method, exchange):
    program = RegionProgram(
        tiny.loss_fn, optax.sgd(0.05, 0.9), method, tiny.make_params(), 4,
        transport=Transport(exchange),
    )  # fmt: skip
    state, _ = tiny.finish(program, tiny.start(program), 12)
    arrays = tiny.host((state.region, state.sync.outer, state.sync.compressors))
    return arrays, state.bytes_sent, state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", {"num_fragments": 2}),
        pytest.param(
            "streaming_diloco",
            {"num_fragments": 2, "compress": "int8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "streaming_diloco",
            {"num_fragments": 2, "compress": "ef+topk:0.1"},
            marks=pytest.mark.slow,
        ),
        (
            "streaming_diloco",
            {"num_fragments": 2, "compress": "ef+topk:0.1", "merge_feedback": True},
        ),
        pytest.param(
            "decoupled_diloco",
            {"num_fragments": 2, "compress": "int8"},
            marks=pytest.mark.slow,
        ),
        ("loscar", {}),
    ],
)
def test_either_exchange_gives_the_same_run(tiny, name, options):
    # Events are 2 steps apart, so that one length of a scan is compiled.
    method = methods.get(name, sync_interval=4, delay_steps=2, **options)
    inside, sent, _ = final(tiny, method, "program")
    outside, sent_outside, state = final(tiny, method, "outer")
    # Relative to each tensor: the outer mesh may sum in another order.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        inside,
        outside,
    )
    assert sent == sent_outside
    # What is on its way is nowhere on the inner mesh.
    inner = set(jax.tree.leaves(state.region.params)[0].devices())
    for flight in state.sync.in_flight.values():
        for x in jax.tree.leaves(flight.mean):
            assert not inner & set(x.devices())
