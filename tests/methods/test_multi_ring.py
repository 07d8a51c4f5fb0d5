"""Several rings: what they carry, and what they do not go with."""

import dataclasses

import pytest

from cocodc_jax import methods
from cocodc_jax.sync.summed import ByRings


def test_its_parts():
    method = methods.get("multi_ring", num_rings=3)
    assert method.sync.message == ByRings(3)
    assert method.sync.merge.name == "replace"


def test_rings_carry_nothing_compressed():
    with pytest.raises(ValueError, match="compress='int8'.*partial sums"):
        methods.get("multi_ring", compress="int8")


def test_no_rings():
    with pytest.raises(ValueError, match="num_rings=0 must be positive"):
        methods.get("multi_ring", num_rings=0)


@pytest.mark.parametrize("name", ["noloco", "diloco_demo", "eager"])
def test_rings_sum_for_one_outer_model(name):
    sync = methods.get(name).sync
    with pytest.raises(ValueError, match="ByRings sums pseudo-gradients on their way"):
        dataclasses.replace(sync, message=ByRings(2))
