"""Collectives between regions in a compiled program: the bytes of the message only.

The collectives are read from what XLA compiled for four regions on four devices.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.aot import hlo
from cocodc_jax.aot.collectives import KINDS
from cocodc_jax.core.state import RegionState
from cocodc_jax.core.sync import start
from cocodc_jax.engine.crossing import (
    Leaving,
    MeshCrossing,
    SyncSpec,
    Trainer,
    joined,
    shares_everywhere,
)
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.mesh import make_mesh, regional
from cocodc_jax.engine.outer_models import make_regional_send
from cocodc_jax.engine.placement import OuterPlacement, Shardings
from cocodc_jax.engine.region_map import LocalRegions
from cocodc_jax.program import inner_step as step
from cocodc_jax.sync.cutting import cut
from cocodc_jax.sync.messages import AsIs, Compressed
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.compressor import identity, message_bytes
from tests.program.tiny import assert_same

PARAMS = {"a": np.ones((40, 16), np.float32), "b": np.ones(30, np.float32)}
NUM_VALUES = 670
NUM_REGIONS = 4


def collectives(program, *args):
    """Bytes that a device gives to each kind of collective, in all: `{kind: bytes}`."""
    text = jax.jit(program).lower(*args).compile().as_text()
    bytes_of = collections.Counter()

    for part in hlo.parse(text):
        for instruction in part.instructions:
            if instruction.opcode not in KINDS:
                continue
            # The result of a gather is of all four.
            share = NUM_REGIONS if instruction.opcode == "all-gather" else 1
            bytes_of[instruction.opcode] += instruction.num_bytes // share

    return bytes_of


def shapes(tree, sharding, *lead):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=sharding),
        tree,
    )


def of_regions(mesh, tree):
    return shapes(tree, regional(mesh), NUM_REGIONS)


def of_all(mesh, tree):
    return shapes(tree, NamedSharding(mesh, P()))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(NUM_REGIONS)


def make_setting(mesh, sync):
    """The bytes of the model as one fragment."""
    fragments = cut(PARAMS, 1)
    shapes = jax.eval_shape(lambda x: x, PARAMS)
    specs = jax.tree.map(lambda _: P(), shapes)
    shardings = Shardings.of(mesh, fragments, optax.sgd(0.1), shapes, specs)

    regions = Regions.alike(NUM_REGIONS)
    local = LocalRegions.of(mesh, NUM_REGIONS)
    place = OuterPlacement("mesh", "mesh", shardings)
    trainer = Trainer(loss_fn, UserInputs(), optax.sgd(0.1))
    return SyncSpec(sync, regions, fragments, place, shapes, trainer, local, Devices())


def sent(mesh, compressor):
    """The collectives of one sync of the model."""
    message = Compressed(compressor) if compressor else AsIs()
    method = methods.get("diloco").with_sync(message=message)
    spec = make_setting(mesh, method.sync)
    part = spec.fragments.take(PARAMS, 0)
    state = jax.eval_shape(compressor.init, part) if compressor else ()

    def send(*arguments):
        return start(MeshCrossing(spec, 0, Leaving(*arguments)))

    placed = of_regions(mesh, (PARAMS, state, np.float32(0), np.ones(2, np.uint32)))
    params, state, weights, keys = placed
    bytes_of = collectives(send, params, of_all(mesh, part), state, weights, keys, None)
    if compressor is None:
        return bytes_of, message_bytes(part)
    message, _ = jax.jit(compressor.encode)(part, compressor.init(part))
    return bytes_of, sum(np.asarray(x).nbytes for x in jax.tree.leaves(message))


@pytest.mark.parametrize("name", ["fp4", "int8", "ef+dct:8"])
def test_a_compressed_message_stays_compressed(mesh, name):
    """The gathers are of the message, and of each region's weight, a float32."""
    bytes_of, num_bytes = sent(mesh, compression.parse(name))
    assert bytes_of == {"all-gather": num_bytes + 4}
    assert num_bytes < 4 * NUM_VALUES / 3


def encoded(name):
    """A message, and the compressor's new state."""
    compressor = compression.parse(name)
    return jax.jit(compressor.encode)(PARAMS, compressor.init(PARAMS))


@pytest.mark.parametrize("name", ["fp4", "int8", "ef+dct:8"])
def test_a_message_of_a_window_crosses_as_one_buffer_in_shares(name):
    """Of two devices a region each receives half of every message, rounded up."""
    mesh = make_mesh(NUM_REGIONS, 2, devices=jax.devices()[: 2 * NUM_REGIONS])
    message, _ = encoded(name)
    crossing = jax.jit(lambda messages: shares_everywhere(mesh, messages))
    text = crossing.lower(of_regions(mesh, message)).compile().as_text()
    num_bytes = message_bytes(message)
    (gathered,) = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    assert gathered.startswith(f"u8[{NUM_REGIONS},1,{-(-num_bytes // 2)}]")


def test_messages_come_out_of_the_buffer_as_they_went_in(mesh):
    message, _ = encoded("int8")
    messages = jax.tree.map(lambda x: np.stack([np.asarray(x)] * 4), message)
    one = jax.eval_shape(lambda x: x, message)
    there_and_back = jax.jit(lambda x: joined(mesh, shares_everywhere(mesh, x), one))
    assert_same(there_and_back(jax.device_put(messages, regional(mesh))), messages)


def test_an_uncompressed_message_is_summed(mesh):
    bytes_of, num_bytes = sent(mesh, None)
    assert bytes_of == {"all-reduce": num_bytes}
    assert num_bytes == 4 * NUM_VALUES


def sent_to_neighbours(mesh, sync):
    """The collectives of one sync of the model, and the model as a fragment."""
    spec = make_setting(mesh, sync)
    outer = sync.outer
    part = spec.fragments.take(PARAMS, 0)
    compressor = sync.message.compressor() or identity()
    send = make_regional_send(spec, 0)
    state = jax.eval_shape(lambda p: outer.init(p, compressor), part)
    placed = of_regions(mesh, (PARAMS, part, state, np.ones(2, np.uint32)))
    return collectives(send, *placed, of_all(mesh, np.int32(0))), part


def test_a_pair_exchanges_between_two(mesh):
    """Parameters and pseudo-gradient, in each of the three matchings it may be."""
    bytes_of, _ = sent_to_neighbours(mesh, methods.get("noloco").sync)
    assert bytes_of == {"collective-permute": 3 * 2 * 4 * NUM_VALUES}


def test_neighbours_on_a_ring_send_one_message_each_way(mesh):
    """One message each way, in 8 bits with a scale for 256 values."""
    sync = methods.get("lt_admm").sync
    bytes_of, part = sent_to_neighbours(mesh, sync)
    message = sync.message.num_bytes(part, NUM_REGIONS)
    assert bytes_of == {"collective-permute": 2 * message}
    assert message < 4 * NUM_VALUES / 3


def loss_fn(params, batch, key):
    return jnp.sum(params["a"] * batch) + jnp.sum(params["b"]) * batch, {}


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("data_parallel", {}, "all-reduce"),
        ("data_parallel", {"compress": "fp4"}, "all-gather"),
        pytest.param(
            "demo", {"compress": "dct:8"}, "all-gather", marks=pytest.mark.slow
        ),
        ("distributed_lion", {}, "all-gather"),
        ("apart", {}, None),
        ("diloco", {}, None),
    ],
)
def test_an_exchange_at_every_step_sends_its_message_and_no_more(
    mesh, name, options, kind
):
    method = methods.get(name, **options)
    made = method.per_step
    state = ()
    num_bytes = 0
    if made is not None:
        memory = made.init(PARAMS)
        state = jax.eval_shape(lambda: memory)
        message, _ = made.send(PARAMS, memory, jax.random.key(0))
        num_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(message))

    local = LocalRegions.of(mesh, NUM_REGIONS)
    steps = step.make_steps(loss_fn, optax.sgd(0.1), mesh, local, made)
    region = RegionState(PARAMS, optax.sgd(0.1).init(PARAMS), None, state)
    region = of_regions(mesh, region._replace(key=np.ones(2, np.uint32)))
    batches = jax.ShapeDtypeStruct(
        (3, NUM_REGIONS), np.float32, sharding=NamedSharding(mesh, P(None, "region"))
    )
    bytes_of = collectives(steps, region, batches, None, None, ())
    assert bytes_of == ({kind: num_bytes} if kind else {})
