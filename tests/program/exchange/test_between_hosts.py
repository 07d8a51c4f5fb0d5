"""Messages that cross on the outer mesh, beside the inner steps: the same numbers."""

import functools

import jax
import pytest

from cocodc_jax import methods
from cocodc_jax.exchange.transport import Transport
from tests.numerics import assert_all_close
from tests.program import tiny


def final(method, exchange):
    program = tiny.program_of(method, transport=Transport(exchange))
    state, _ = tiny.finish(program, tiny.start(program), 12)
    arrays = tiny.host((state.region, state.sync.outer, state.sync.compressors))
    return arrays, state.bytes_sent, state


FRAGMENTS = {"num_fragments": 2}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming_diloco", FRAGMENTS),
        slow("streaming_diloco", FRAGMENTS | {"compress": "int8"}),
        slow("streaming_diloco", FRAGMENTS | {"compress": "ef+topk:0.1"}),
        (
            "streaming_diloco",
            FRAGMENTS | {"compress": "ef+topk:0.1", "merge_feedback": True},
        ),
        slow("decoupled_diloco", FRAGMENTS | {"compress": "int8"}),
        ("loscar", {}),
    ],
)
def test_either_exchange_gives_the_same_run(name, options):
    # Events are 2 steps apart, so that one length of a scan is compiled.
    method = methods.get(name, sync_interval=4, delay_steps=2, **options)
    inside, sent, _ = final(method, "program")
    outside, sent_outside, state = final(method, "outer")
    # Relative to each tensor: the outer mesh may sum in another order.
    assert_all_close(inside, outside, rtol=1e-5, atol=1e-6)
    assert sent == sent_outside
    # What is on its way is nowhere on the inner mesh.
    inner = set(jax.tree.leaves(state.region.params)[0].devices())
    for flight in state.sync.in_flight.values():
        for x in jax.tree.leaves(flight.mean):
            assert not inner & set(x.devices())
