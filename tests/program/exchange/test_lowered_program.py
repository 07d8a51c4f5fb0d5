"""The programs that a run lists are those that it runs, with the arguments it gives."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
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


class Recorder:
    """A compiled function that remembers what it was called with."""

    def __init__(self, program):
        self.program, self.calls = program, []

    def __call__(self, *arguments):
        # Shapes alone are evaluated with tracers, which lie nowhere.
        if not isinstance(jax.tree.leaves(arguments)[0], jax.core.Tracer):
            self.calls.append(jax.tree.map(described, arguments))
        return self.program(*arguments)


def described(x):
    """Return shape, dtype and where the parts lie; of host values nothing of that."""
    sharding = getattr(x, "sharding", None)
    spec = None
    if sharding is not None and x.ndim and len(sharding.device_set) > 1:
        spec = str(sharding.devices_indices_map(x.shape))
    return f"{np.shape(x)} {np.dtype(x.dtype).kind} {spec}"


def record(program):
    """Have a program remember the calls of everything that it lists."""
    program._steps = Recorder(program._steps)
    if program._syncs is None:
        return
    executor = program._syncs
    executor.merges = [Recorder(each) for each in executor.merges]
    outer, segments = executor._outer, executor._segments
    if segments is not None:
        make_segment, of_starts = segments._make, {}
        segments._make = lambda segment, sync: of_starts.setdefault(
            segment.before, Recorder(make_segment(segment, sync))
        )
    if hasattr(outer, "_exchange"):
        make = outer._exchange._make
        made = {}
        outer._exchange._make = lambda k, rank, state: made.setdefault(
            k, Recorder(make(k, rank, state))
        )
    else:
        outer._send = [Recorder(each) for each in outer._send]
        outer._step = Recorder(outer._step)


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
    record(program)
    state = tiny.start(program)
    num_steps = program.steps_to_event(state) or 2
    for _ in range(4):
        state, _ = tiny.finish(program, state, num_steps)
    batches = shapes_of_batches(num_steps)
    listed = {each.name: each for each in program.list_programs(batches)}
    called = {n: x for n, x in listed.items() if isinstance(x.program, Recorder)}
    per_fragment = {"data_parallel": 0, "noloco": 3}.get(name, 2)
    if overlap == "yes":  # The window is all.
        per_fragment = 1
    assert len(called) == 1 + per_fragment * len(program.fragments)
    seen = 0
    for each in called.values():
        expected = jax.tree.map(described, each.arguments)
        for call in each.program.calls:
            seen += 1
            assert call == expected, each.name
    assert seen >= 4


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
