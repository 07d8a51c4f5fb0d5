"""Values that move between devices, in one process; several are tested end to end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import transfer
from cocodc_jax.engine.mesh import make_mesh, outer_device, regional
from tests.program.tiny import assert_same

TREE = {"w": np.arange(24.0, dtype=np.float32).reshape(4, 6), "n": np.arange(4)}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4, data=2)


@pytest.fixture(scope="module")
def outside(mesh):
    return SingleDeviceSharding(outer_device(mesh))


def test_host_values_are_placed_as_asked(mesh, outside):
    placed = transfer.put(TREE, {"w": regional(mesh, P("data")), "n": outside})
    assert_same(placed, TREE)
    assert placed["w"].sharding == regional(mesh, P("data"))
    assert placed["n"].devices() == {outer_device(mesh)}
    everywhere = NamedSharding(mesh, P())
    placed = transfer.put(TREE, everywhere)
    assert {x.sharding for x in placed.values()} == {everywhere}


def test_device_arrays_move_off_the_mesh_and_back(mesh, outside):
    inside = NamedSharding(mesh, P(None, ("data", "model")))
    near = transfer.put({"w": TREE["w"]}, inside)
    far = transfer.move(near, outside)
    assert far["w"].devices() == {outer_device(mesh)}
    back = transfer.move(far, {"w": inside})
    assert back["w"].sharding == inside
    assert_same(back, near)


def test_a_copy_that_the_first_device_has_is_borrowed(mesh):
    everywhere = transfer.put(TREE, NamedSharding(mesh, P()))
    first = SingleDeviceSharding(mesh.devices.flat[0])
    borrowed = transfer.borrow(everywhere, dict.fromkeys(TREE, first))

    assert_same(borrowed, TREE)
    assert {x.sharding for x in borrowed.values()} == {first}
    for name, x in borrowed.items():
        copy = everywhere[name].addressable_data(0)
        assert x.unsafe_buffer_pointer() == copy.unsafe_buffer_pointer()


def test_a_copy_on_other_devices_is_moved_to_be_borrowed(mesh, outside):
    everywhere = transfer.put(TREE, NamedSharding(mesh, P()))
    borrowed = transfer.borrow(everywhere, dict.fromkeys(TREE, outside))
    assert_same(borrowed, TREE)
    assert {x.sharding for x in borrowed.values()} == {outside}


def test_rows_gather_on_one_device_in_the_order_of_regions(mesh, outside):
    rows = transfer.put(TREE, regional(mesh))
    gathered = transfer.gather_rows(rows, outside)
    assert_same(gathered, TREE)
    assert {x.device for x in jax.tree.leaves(gathered)} == {outer_device(mesh)}


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_of_a_process_are_its_rows_in_order(axis):
    """`local_rows` joins the rows of this process, each place once."""
    mesh = make_mesh(4, data=2, devices=jax.devices()[7::-1])  # Against device order.
    x = np.arange(32.0).reshape(8, 4) if axis == 0 else np.arange(32.0).reshape(4, 8)
    spec = P("region") if axis == 0 else P(None, "region")
    placed = transfer.put(x, NamedSharding(mesh, spec))

    parts = transfer._own_rows(placed, axis)
    assert len(parts) == 4  # Not 8: a region's two devices hold the same rows.
    np.testing.assert_array_equal(np.concatenate(parts, axis), x)

    np.testing.assert_array_equal(transfer.local_rows(placed, axis), x)
    assert transfer.first_local_row(placed, axis) == 0


def test_a_move_returns_before_its_array_is_computed(mesh, outside):
    """A transfer of an array that is still being computed returns at once."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 100, lambda _, y: jnp.sin(y @ y), x)

    square = transfer.put(np.eye(300, dtype=np.float32), NamedSharding(mesh, P()))
    slow(square).block_until_ready()
    moved = transfer.move(slow(square), outside)
    assert not moved.is_ready()
    moved.block_until_ready()


@dataclasses.dataclass
class OfOneProcess:
    """As much of a sharding as a process sees that has some of its devices."""

    sharding: NamedSharding
    ids: list

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.addressable_devices_indices_map(shape)
        return {d: index for d, index in indices.items() if d.id in self.ids}


def give_parts(shape, sharding, part):
    indices = sharding.addressable_devices_indices_map(shape)
    return shape, {device.id: part(index) for device, index in indices.items()}


@pytest.mark.parametrize(
    "ids",
    [[2], [7], [0, 1, 6, 7]],
    ids=["member of shard 1", "member of shard 3", "shards 0 and 3"],
)
def test_a_process_gives_its_devices_their_parts_of_its_rows(monkeypatch, ids):
    mesh = make_mesh(4, data=2)
    x = np.arange(2 * 8 * 4).reshape(2, 8, 4)  # Steps, regions, batch.
    columns = sorted({2 * (i // 2) + j for i in ids for j in range(2)})
    mine = OfOneProcess(NamedSharding(mesh, P(None, "region", "data")), ids)
    monkeypatch.setattr(jax, "make_array_from_callback", give_parts)
    shape, parts = transfer.put_own(x[:, columns], mine, 8, axis=1)

    assert shape == x.shape
    assert sorted(parts) == ids

    for i, part in parts.items():
        rows = slice(i // 2 * 2, i // 2 * 2 + 2)
        half = slice(i % 2 * 2, i % 2 * 2 + 2)
        np.testing.assert_array_equal(part, x[:, rows, half])


@pytest.mark.parametrize("spec", [P(None, "region", "data"), P(None, "region")])
def test_one_process_gives_and_holds_every_row(mesh, spec):
    x = np.arange(2 * 8 * 4).reshape(2, 8, 4)
    sharding = NamedSharding(mesh, spec)
    placed = transfer.put_own(x, sharding, 8, axis=1)
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, x)
    assert transfer.first_local_row(placed, 1) == 0


@pytest.mark.parametrize(
    ("num_columns", "num_shares"), [(7, 3), (6, 3), (1, 2), (5, 1)]
)
def test_shares_of_a_message_are_equal_and_together_whole(num_columns, num_shares):
    x = np.arange(1, 2 * num_columns + 1, dtype=np.uint8).reshape(2, num_columns)
    width = -(-num_columns // num_shares)
    parts = [
        transfer._columns(jnp.asarray(x), i * width, width) for i in range(num_shares)
    ]
    assert {part.shape for part in parts} == {(2, width)}

    joined = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(joined[:, :num_columns], x)
    assert not joined[:, num_columns:].any()
