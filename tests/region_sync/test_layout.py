"""A trainer's mesh and the engine's are two views of the same devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.region_sync.layout import layout_of, relabeled

DEVICES = np.array(jax.devices()[:8])


def mesh_of(axis_type=AxisType.Explicit, **axes):
    shape = tuple(axes.values())
    devices = DEVICES[: np.prod(shape)].reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def put(mesh, shape, *spec):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def buffers(x):
    return {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def test_entering_moves_no_byte_where_the_regions_are_not_the_first_axis():
    mesh = mesh_of(fsdp=2, pods=2, tensor=2)
    x = put(mesh, (4, 8, 6), "pods", "fsdp", "tensor")
    layout = layout_of({"w": x}, 4, "stacked")
    before = buffers(x)
    expected = np.array(x)

    entered = layout.enter({"w": x})["w"]
    assert layout.mesh.shape["region"] == 2
    assert layout.specs["w"] == P("data", "model")
    assert buffers(entered) == before
    np.testing.assert_array_equal(entered, expected)

    left = layout.leave({"w": entered}, {"w": x.sharding})["w"]
    assert left.sharding == x.sharding
    assert buffers(left) == before


def test_arrays_that_enter_are_donated():
    x = put(mesh_of(pods=2), (2, 8), "pods")
    layout_of({"w": x}, 2, "stacked").enter({"w": x})
    assert x.is_deleted()


def test_one_array_at_two_paths_enters_as_two():
    x = put(mesh_of(pods=2), (2, 8), "pods")
    entered = layout_of({"a": x, "b": x}, 2, "stacked").enter({"a": x, "b": x})
    np.testing.assert_array_equal(entered["a"], entered["b"])


def test_arrays_on_another_order_of_devices_enter_without_a_move():
    # The engine has the regions first, so that its devices are in another order.
    x = put(mesh_of(fsdp=2, pods=2), (2, 8), "pods", "fsdp")
    layout = layout_of({"w": x}, 2, "stacked")
    entered = layout.enter({"w": x})["w"]
    assert list(layout.mesh.devices.flat) != list(x.sharding.mesh.devices.flat)
    assert buffers(entered) == buffers(x)


def test_regions_may_be_sharded_over_two_axes_of_the_mesh():
    mesh = mesh_of(dcn=2, slices=2, fsdp=2)
    x = put(mesh, (4, 8), ("dcn", "slices"), "fsdp")
    expected = np.array(x)
    layout = layout_of({"w": x}, 4, "stacked")
    assert layout.mesh.shape["region"] == 4
    np.testing.assert_array_equal(layout.enter({"w": x})["w"], expected)


def test_one_regions_own_arrays_get_an_axis_and_lose_it():
    mesh = mesh_of(fsdp=4)
    x = put(mesh, (8, 3), "fsdp")
    expected = np.asarray(x)
    layout = layout_of({"w": x}, 2, "own")

    entered = layout.enter({"w": x})
    assert entered["w"].shape == (1, 8, 3)

    left = layout.leave(entered, {"w": x.sharding})["w"]
    assert left.sharding == x.sharding
    np.testing.assert_array_equal(left, expected)


def test_arrays_of_one_device_have_a_mesh_of_one_device():
    x = jnp.ones((2, 3))
    layout = layout_of({"w": x}, 2, "stacked")
    assert layout.mesh.size == 1
    assert layout.enter({"w": x})["w"].shape == (2, 3)


def test_an_array_of_other_shards_is_moved():
    mesh = mesh_of(AxisType.Auto, a=2, b=2)
    x = put(mesh, (4, 4), "a")
    moved = relabeled(x, NamedSharding(mesh, P(None, "b")))
    assert moved.sharding.spec == P(None, "b")
    np.testing.assert_array_equal(moved, x)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": jnp.ones((3, 2))}, r"'w' of shape \(3, 2\), .* must be the regions=2"),
        (
            {
                "v": put(mesh_of(pods=2, fsdp=2), (2, 2), "pods"),
                "w": put(mesh_of(pods=2, fsdp=2), (2, 2), "fsdp"),
            },
            r"regions of 'v' over the mesh axes \('pods',\)",
        ),
        (
            {
                "v": put(mesh_of(pods=2), (2, 2), "pods"),
                "w": put(mesh_of(pods=4), (2, 4), None, "pods"),
            },
            "all leaves must be over one mesh",
        ),
    ],
)
def test_arrays_without_a_layout_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        layout_of(arrays, 2, "stacked")
