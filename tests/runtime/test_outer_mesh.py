"""Messages that cross on the outer mesh, beside the inner steps: the same numbers."""

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.runtime.program import RegionProgram


def final(tiny, method, exchange):
    program = RegionProgram(
        tiny.loss_fn, optax.sgd(0.05, 0.9), method, tiny.make_params(), 4,
        exchange=exchange,
    )  # fmt: skip
    state, _ = tiny.finish(program, tiny.start(program), 12)
    arrays = tiny.host((state.region, state.outer, state.senders))
    return arrays, state.bytes_sent, state


@pytest.mark.parametrize("compress", [None, "int8", "ef+topk:0.1"])
def test_either_exchange_gives_the_same_run(tiny, compress):
    method = methods.get(
        "streaming_diloco",
        sync_interval=4,
        num_fragments=2,
        delay_steps=3,
        compress=compress,
    )
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
    for flight in state.in_flight.values():
        for x in jax.tree.leaves(flight.mean_pseudo_gradient):
            assert not inner & set(x.devices())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noloco", "its outer parameters lie in the regions"),
        ("multi_ring", "its rings lie on the inner mesh"),
        ("co2", "its outer state is divided over the inner mesh"),
        ("delayed_nesterov", "a region that comes alone is answered at once"),
    ],
)
def test_what_must_stay_in_the_program_is_refused_outside(name, why):
    method = methods.get(name)
    assert not method.crosses_outside("auto", num_processes=4)
    with pytest.raises(ValueError, match=f"exchange='outer' is not possible.*{why}"):
        method.crosses_outside("outer", num_processes=4)


def test_automatic_is_outside_for_several_processes_only():
    method = methods.get("diloco")
    assert method.crosses_outside("auto", num_processes=2)
    assert not method.crosses_outside("auto", num_processes=1)
    assert method.crosses_outside("outer", num_processes=1)
    with pytest.raises(ValueError, match="exchange='wan' is unknown; use one of"):
        method.crosses_outside("wan", num_processes=1)
