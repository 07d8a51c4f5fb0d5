"""Regions that are processes of one job, in both forms that a trainer may have."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cocodc_jax as cc
from cocodc_jax.netlab.children import free_addresses
from tests.region_sync import regression as plain
from tests.region_sync import worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def in_one():
    """One program over both regions: their heads `[R, 8, 2]`, and the outer one."""
    name, options = worker.METHOD
    method = cc.methods.get(name, **options)
    params = plain.stacked(plain.make_params())
    sync = cc.RegionSync(method, params, plain.NUM_REGIONS)
    params, _, state = plain.train(sync, params, worker.NUM_STEPS)
    return params["head"], sync.outer_params(state, params)["head"]


def assert_equals_one_process(paths, in_one):
    """Compare parameters that processes wrote with those of one program.

    Args:
      paths: pairs of a region and a file with its head, and that of the outer model.
      in_one: the fixture.
    """
    heads, outer = in_one
    for region, path in paths:
        head, outer_head = np.load(path).values()
        np.testing.assert_allclose(head, heads[region], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outer_head, outer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "form", [pytest.param("stacked", marks=pytest.mark.slow), "processes"]
)
def test_two_processes_train_what_one_process_does(form, tmp_path, in_one):
    (address,) = free_addresses(1)
    paths = [tmp_path / f"{process}.npz" for process in range(2)]
    command = [sys.executable, "-m", "tests.region_sync.worker", address, "2"]
    children = [
        subprocess.Popen([*command, str(process), form, str(path)], cwd=ROOT)
        for process, path in enumerate(paths)
    ]
    assert [child.wait(120) for child in children] == [0, 0]

    assert_equals_one_process(enumerate(paths), in_one)


@pytest.mark.parametrize(
    "num_processes", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)]
)
def test_elastic_regions_of_several_processes_train_what_one_process_does(
    num_processes, tmp_path, in_one
):
    addresses = ",".join(free_addresses(2))
    children = []
    paths = []

    for region, num in enumerate(num_processes):
        (coordinator,) = free_addresses(1)
        for process in range(num):
            path = tmp_path / f"{region}_{process}.npz"
            words = [coordinator, num, process, "elastic", path, region, addresses]
            command = [sys.executable, "-m", "tests.region_sync.worker"]
            children.append(subprocess.Popen([*command, *map(str, words)], cwd=ROOT))
            paths.append((region, path))

    assert [child.wait(240) for child in children] == [0] * len(children)

    assert_equals_one_process(paths, in_one)
