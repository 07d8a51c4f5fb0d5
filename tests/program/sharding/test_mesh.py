"""The inner mesh's shape, the device of the outer state, and memory that is kept."""

import dataclasses
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cocodc_jax.engine import mesh as mesh_module
from cocodc_jax.engine.mesh import (
    INSIDE,
    check_channels,
    inner_devices,
    make_mesh,
    outer_device,
    outer_mesh,
    regional,
)


@pytest.mark.parametrize(
    ("num_devices", "num_regions", "data", "model", "length"),
    [
        (9, 4, 1, 1, 4),
        (9, 4, 2, 1, 4),
        (9, 4, 2, 2, 2),
        (3, 4, 1, 1, 2),  # Three devices would not hold equal blocks of four regions.
        (1, 4, 1, 1, 1),
        (9, 6, 1, 2, 3),
        (9, 1, 2, 4, 1),
    ],
)
def test_the_region_axis_is_as_long_as_devices_and_regions_allow(
    num_devices, num_regions, data, model, length
):
    devices = jax.devices()[:num_devices]
    mesh = make_mesh(num_regions, data, model, devices)
    ones = dict.fromkeys(mesh.axis_names, 1)
    assert dict(mesh.shape) == ones | {"region": length, "data": data, "model": model}
    assert list(mesh.devices.flat) == devices[: length * data * model]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_mesh_axes_are_region_stage_data_expert_sequence_and_model():
    mesh = make_mesh(2, data=1, stage=2, sequence=2)
    assert tuple(mesh.shape.items()) == (
        ("region", 2),
        ("stage", 2),
        ("data", 1),
        ("expert", 1),
        ("sequence", 2),
        ("model", 1),
    )
    assert list(mesh.devices.flat) == jax.devices()[:8]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "model": 3}, r"4 \* 1 \* 1 \* 3 = 12 devices, but there are 9"),
        ({"data": 2, "stage": 5}, r"5 \* 2 \* 1 \* 1 \* 1 = 10 devices.*lower stages"),
        ({"num_regions": 0}, "regions=0 must be at least 1"),
        *(({name: 0}, f"{name}=0 must be at least 1") for name in INSIDE),
    ],
)
def test_invalid_sizes_of_a_mesh_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**{"num_regions": 2} | sizes)


def test_the_outer_device_computes_for_no_region_where_one_is_spare():
    assert outer_device(make_mesh(8)) == jax.devices()[8]
    assert outer_device(make_mesh(1)) not in make_mesh(1).devices
    assert outer_device(make_mesh(9)) == jax.devices()[0]


def test_regional_puts_regions_first():
    mesh = make_mesh(2, data=2)
    assert regional(mesh).spec == P("region")
    assert regional(mesh, P("data", None)).spec == P("region", "data", None)


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a `jax.Device` as choosing among those of all processes needs."""

    process_index: int
    place: int

    def __str__(self):
        return f"{self.process_index}.{self.place}"


@pytest.fixture
def three_of_two_processes(monkeypatch):
    # Not sorted by process: ids of devices need not be.
    devices = [Device(p, i) for i in range(3) for p in (1, 0)]
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices)
    return devices


def test_every_process_gives_its_first_devices(three_of_two_processes):
    assert [str(d) for d in inner_devices(1)] == ["0.0", "1.0"]
    # Neighbours, which may share a region, are of one process.
    assert [str(d) for d in inner_devices(2)] == ["0.0", "0.1", "1.0", "1.1"]


@pytest.mark.parametrize(
    ("regions", "axes", "devices"),
    [
        (4, (1, 1), "0.0 0.1 1.0 1.1"),  # A spare one each for the outer state.
        (6, (1, 1), "0.0 0.1 0.2 1.0 1.1 1.2"),
        (8, (1, 1), "0.0 0.1 1.0 1.1"),  # Two regions a device.
        (2, (1, 1), "0.0 1.0"),
        (2, (2, 1), "0.0 0.1 1.0 1.1"),
        (2, (1, 3), "0.0 0.1 0.2 1.0 1.1 1.2"),
        (1, (2, 1), "0.0 1.0"),  # A region of two processes.
        (1, (2, 2), "0.0 0.1 1.0 1.1"),
    ],
)
def test_by_default_processes_share_the_regions_evenly(
    three_of_two_processes, monkeypatch, regions, axes, devices
):
    monkeypatch.setattr(mesh_module, "Mesh", lambda devices, *names, **_: devices)
    mesh = make_mesh(regions, *axes)
    assert " ".join(map(str, mesh.flat)) == devices

    # Devices that the caller passes are taken in their order.
    passed = three_of_two_processes[: mesh.size]
    assert list(make_mesh(regions, *axes, devices=passed).flat) == passed


@pytest.mark.parametrize(
    ("regions", "axes", "message"),
    [
        (3, (1, 1), "regions=3, each of 1 devices .* by 2 processes with 3 devices"),
        (1, (1, 1), "regions=1, .* so many whole processes; or pass devices"),
        (1, (3, 1), "regions=1, each of 3 devices"),
        (4, (5, 1), "regions=4, each of 5 devices"),
    ],
)
def test_processes_that_cannot_share_regions_evenly_are_refused(
    three_of_two_processes, regions, axes, message
):
    with pytest.raises(ValueError, match=message):
        make_mesh(regions, *axes)


def grid(devices, *shape):
    """A mesh of regions, stages, data and model, as far as `outer_mesh` looks at it."""
    return types.SimpleNamespace(devices=np.array(devices).reshape(*shape, 1))


@pytest.fixture
def rows_of(monkeypatch):
    """Gives the outer devices, those of a region in a row."""
    monkeypatch.setattr(mesh_module, "Mesh", lambda devices, *names, **_: devices)

    def rows(inner, channel=0):
        mesh = outer_mesh(inner, channel)
        return mesh.reshape(len(mesh), -1).astype(str).tolist()

    return rows


def test_the_outer_mesh_has_a_spare_device_of_each_process_in_the_order_of_regions(
    three_of_two_processes, rows_of
):
    inner = grid(inner_devices(2)[::-1], 4, 1, 1)
    assert rows_of(inner) == [["1.2"], ["0.2"]]
    assert str(outer_device(inner, 0)) == "0.2"


@pytest.mark.usefixtures("three_of_two_processes")
def test_without_a_spare_device_the_outer_device_is_one_of_the_region():
    inner = grid(inner_devices(3), 6, 1, 1)
    assert str(outer_device(inner, 1)) == "1.0"


def test_each_channel_has_another_device_of_every_process(
    three_of_two_processes, rows_of
):
    inner = grid(inner_devices(1), 2, 1, 1)
    channels = [rows_of(inner, channel) for channel in range(2)]
    assert channels == [[["0.2"], ["1.2"]], [["0.1"], ["1.1"]]]
    check_channels(inner, 2)

    three_of_two_processes.remove(inner_devices(2)[3])  # Of process 1.
    why = "outer_channels=2 .* process 1 has 1; use fewer"
    with pytest.raises(ValueError, match=why):
        check_channels(inner, 2)

    check_channels(inner, 1)


def test_the_processes_of_a_region_are_members_of_its_row(monkeypatch, rows_of):
    devices = [Device(p, i) for p in range(6) for i in range(3)]
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices)
    inner = grid(inner_devices(2), 2, 3, 2)  # Three stages.
    assert outer_mesh(inner).shape == (2, 3, 1, 1)  # Along the stages.
    assert rows_of(inner) == [["0.2", "1.2", "2.2"], ["3.2", "4.2", "5.2"]]


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        # Three processes of two devices cannot be two regions of three devices.
        ([[(0, 0), (0, 1), (1, 0)], [(1, 1), (2, 0), (2, 1)]], r"[[0, 1], [1, 2]]"),
        ([[(0, 0), (0, 1)], [(1, 0), (2, 0)]], r"[[0], [1, 2]]"),
        ([[(0, 0), (1, 0)], [(0, 1), (1, 1)]], r"[[0, 1], [0, 1]]"),
    ],
    ids=["one in two regions", "uneven", "two in two regions"],
)
def test_a_process_that_is_part_of_two_regions_is_refused(shards, text):
    devices = [Device(p, i) for shard in shards for p, i in shard]
    with pytest.raises(ValueError, match=re.escape(f"are in the processes {text}")):
        outer_mesh(grid(devices, len(shards), 1, -1))


def test_the_outer_mesh_of_one_process_is_one_device():
    mesh = make_mesh(4)
    assert outer_mesh(mesh).shape == dict.fromkeys(("process", *INSIDE), 1)
    (device,) = outer_mesh(mesh).devices.flat
    where = mesh_module.outer_sharding(mesh), mesh_module.outer_rows(mesh)
    assert [x.device_set for x in where] == [{device}] * 2
    assert device == outer_device(mesh)


# --- Memory that programs on the CPU free stays with the process ---

CODE = """
import resource, threading
from cocodc_jax.engine.mesh import keep_freed_memory

def faults(size=100 << 20):
    b"x" * size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        b"x" * size
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

counts = []
print(keep_freed_memory())
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(*counts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own calls")
@pytest.mark.parametrize("chosen", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_memory_that_a_call_frees_is_reused_by_the_next(chosen):
    names = ("GLIBC_TUNABLES", "MALLOC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(names)}

    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env=environment | chosen,
    )

    is_kept, faults = done.stdout.split()
    assert (is_kept == "True") == (not chosen)
    assert (int(faults) < 1000) == (not chosen)
