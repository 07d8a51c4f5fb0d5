"""The programs that a run lists are those that it runs, with the arguments it gives."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.exchange.programs import Devices
from cocodc_jax.exchange.transport import Transport
from cocodc_jax.sharding.mesh import make_mesh
from tests.program import tiny

FAMILY = {
    "data_parallel": {},
    "cocodc": dict(sync_interval=4, num_fragments=2, delay_steps=2),
    "streaming_diloco": dict(
        sync_interval=4, num_fragments=2, delay_steps=2, compress="int8"
    ),
    "noloco": dict(sync_interval=4),
}
FUSED = "streaming_diloco, fused"


def described(x):
    """Return shape, dtype and where the parts lie; of host values nothing of that."""
    sharding = getattr(x, "sharding", None)
    spec = None
    if sharding is not None and x.ndim and len(sharding.device_set) > 1:
        spec = str(sharding.devices_indices_map(x.shape))
    return f"{np.shape(x)} {np.dtype(x.dtype).kind} {spec}"


class Watched(Devices):
    """Devices that remember what programs with names were called with."""

    def __init__(self):
        self.calls = {}

    def jit(self, function, name="", sent_bytes=0, **options):
        program = super().jit(function, **options)

        def call(*arguments):
            if name:
                found = jax.tree.map(described, arguments)
                self.calls.setdefault(name, []).append(found)
            return program(*arguments)

        return call


def shapes_of_batches(num_steps):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype),
        tiny.make_batch(0),
    )


@pytest.mark.parametrize("name", [*FAMILY, FUSED])
def test_programs_are_listed_with_the_arguments_that_they_get(name):
    data = 1 if name == FUSED else 2
    mesh = make_mesh(tiny.NUM_REGIONS, data, devices=jax.devices()[:4])
    overlap = "yes" if name == FUSED else "auto"
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
    listed = {each.name: each for each in program.list_programs(batches)}
    program.mean_params(state)
    per_fragment = {"data_parallel": 0, "noloco": 3}.get(name, 2)
    if overlap == "yes":  # The window is all.
        per_fragment = 1
    assert len(listed) == 3 + per_fragment * len(program.fragments)
    assert watched.calls.keys() == listed.keys()
    for each in listed.values():
        expected = jax.tree.map(described, each.arguments)
        for call in watched.calls[each.name]:
            assert call == expected, each.name


def test_a_program_lists_what_it_sends():
    program = tiny.make_program("streaming_diloco")
    batches = shapes_of_batches(2)
    listed = {each.name: each for each in program.list_programs(batches)}
    sizes = program.fragments.num_params
    for k, size in enumerate(sizes):
        assert listed[f"send fragment {k}"].sent_bytes == 4 * size
    assert listed["inner steps"].sent_bytes == 0
    control = tiny.make_program("data_parallel")
    steps = next(x for x in control.list_programs(batches) if x.name == "inner steps")
    assert steps.sent_bytes == 2 * 4 * sum(sizes)


def of_moments(moments):
    method = methods.get("des_loc", sync_interval=2, sync_moments=moments)
    return tiny.program_of(method, optimizer=optax.adam(0.1))


@pytest.mark.parametrize("moments", ["2,3", "0,1"])
def test_means_of_moments_are_listed(moments):
    """Each set that ever goes along, with its bytes."""
    program = of_moments(moments)
    batches = shapes_of_batches(2)
    found = {each.name: each for each in program.list_programs(batches)}
    found = {n: x for n, x in found.items() if n.startswith("mean of moments")}
    one = 4 * sum(program.fragments.num_params)
    sets = {"2,3": ("mu", "nu", "mu, nu"), "0,1": ("nu",)}[moments]
    assert {name: each.sent_bytes for name, each in found.items()} == {
        f"mean of moments {names}": one * len(names.split(",")) for names in sets
    }
    for each in found.values():
        each.program.lower(*each.arguments)


def test_arguments_are_of_types_that_jax_has():
    """JAX 0.11 warns of float64 while x64 is off."""
    program = of_moments("2,3")
    listed = program.list_programs(shapes_of_batches(1))
    for leaf in jax.tree.leaves([each.arguments for each in listed]):
        assert jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
