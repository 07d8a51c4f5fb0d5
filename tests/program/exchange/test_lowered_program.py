"""The programs that a run lists are those that it runs, with the arguments it gives."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.engine.transport import Transport
from tests.program import tiny

SHORT = dict(sync_interval=4, num_fragments=2, delay_steps=2)
FAMILY = {
    "data_parallel": {},
    "cocodc": SHORT,
    "streaming_diloco": SHORT | dict(compress="int8"),
    "noloco": dict(sync_interval=4),
}
FUSED = "streaming_diloco, fused"


def described(x):
    """Return shape, dtype and shard shapes; nothing for host values."""
    sharding = getattr(x, "sharding", None)
    spec = None
    if sharding is not None and x.ndim and len(sharding.device_set) > 1:
        spec = str(sharding.devices_indices_map(x.shape))
    return f"{np.shape(x)} {np.dtype(x.dtype).kind} {spec}"


class Watched(Devices):
    """Devices that record the arguments of named programs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def jit(self, function, name="", sent_bytes=0, **options):
        program = super().jit(function, **options)

        def call(*arguments):
            if name:
                shapes = jax.tree.map(described, arguments)
                self.calls.setdefault(name, []).append(shapes)
            return program(*arguments)

        return call


def shapes_of_batches(num_steps):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype),
        tiny.make_batch(0),
    )


@pytest.mark.parametrize("name", [*FAMILY, FUSED])
def test_programs_are_listed_with_the_arguments_that_they_get(name):
    data, overlap = (1, "yes") if name == FUSED else (2, "auto")
    mesh = make_mesh(tiny.NUM_REGIONS, data, devices=jax.devices()[:4])
    name = name.split(",")[0]

    program = tiny.program_of(
        methods.get(name, **FAMILY[name]),
        mesh,
        param_specs=tiny.SPECS | {"embed": P(None, "model")},
        transport=Transport(overlap=overlap),
    )

    watched = Watched()
    program._use(program._assemble(watched))

    state = tiny.start(program)
    num_steps = program.steps_to_event(state) or 2
    for _ in range(4):
        state, _ = tiny.finish(program, state, num_steps)

    batches = shapes_of_batches(num_steps)
    listed = {lowered.name: lowered for lowered in program.list_programs(batches)}
    program.mean_params(state)

    per_fragment = {"data_parallel": 0, "noloco": 3}.get(name, 2)
    if overlap == "yes":  # The window is all.
        per_fragment = 1

    assert len(listed) == 3 + per_fragment * len(program.fragments)
    assert watched.calls.keys() == listed.keys()

    for lowered in listed.values():
        expected = jax.tree.map(described, lowered.arguments)
        for call in watched.calls[lowered.name]:
            assert call == expected, lowered.name


def sent_by(program):
    """Lower each program of two steps; return the bytes it sends."""
    listed = program.list_programs(shapes_of_batches(2))
    for lowered in listed:
        lowered.program.lower(*lowered.arguments)
    return {lowered.name: lowered.sent_bytes for lowered in listed}


def test_a_program_lists_the_bytes_it_sends():
    streaming, parallel = map(
        tiny.shared_program, ("streaming_diloco", "data_parallel")
    )
    sizes = streaming.fragments.num_params

    sent = sent_by(streaming)
    for k, size in enumerate(sizes):
        assert sent[f"send fragment {k}"] == 4 * size
    assert sent["inner steps"] == 0

    assert sent_by(parallel)["inner steps"] == 2 * 4 * sum(sizes)


def of_moments(moments):
    method = methods.get("des_loc", sync_interval=2, sync_moments=moments)
    return tiny.program_of(method, optimizer=optax.adam(0.1))


@pytest.mark.parametrize("moments", ["2,3", "0,1"])
def test_means_of_moments_are_listed(moments):
    """Each set that ever goes along, with its bytes."""
    program = of_moments(moments)
    sent = sent_by(program)
    one = 4 * sum(program.fragments.num_params)
    sets = {"2,3": ("mu", "nu", "mu, nu"), "0,1": ("nu",)}[moments]
    assert {n: x for n, x in sent.items() if n.startswith("mean of moments")} == {
        f"mean of moments {names}": one * len(names.split(",")) for names in sets
    }


def test_arguments_are_of_types_that_jax_has():
    """JAX 0.11 warns of float64 while x64 is off."""
    program = of_moments("2,3")
    listed = program.list_programs(shapes_of_batches(1))
    for leaf in jax.tree.leaves([lowered.arguments for lowered in listed]):
        assert jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
