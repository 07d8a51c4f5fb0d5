"""The choice of an exchange: the one of "auto", and unsupported ones."""

import functools

import jax
import numpy as np
import optax
import pytest

from cocodc_jax import methods
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine.between_hosts import OnOuterMesh
from cocodc_jax.engine.crossing import InProgram
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.region_program import RegionProgram
from tests.program import tiny

FRAGMENTS = {"sync_interval": 4, "num_fragments": 2}


def test_zero_channels_are_refused():
    """Values other than the choices are refused too, see `run/test_help.py`."""
    with pytest.raises(ValueError, match="outer_channels=0 must be at least 1"):
        Transport(outer_channels=0)


def test_a_place_is_refused_without_elastic_regions():
    with pytest.raises(ValueError, match="place has no meaning for exchange='auto'"):
        Transport(place=Place(0, ("a:1",), b"k" * 32))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("co2", "its outer state is divided over the inner mesh"),
        ("delayed_nesterov", "a region that comes alone is answered at once"),
    ],
)
def test_methods_that_must_stay_in_the_program_are_refused_outside(name, why):
    method = methods.get(name)
    assert Transport("auto").resolve(method, num_processes=4) == "program"
    with pytest.raises(ValueError, match=f"exchange='outer' is not possible.*{why}"):
        Transport("outer").resolve(method, num_processes=4)


def test_parameters_of_two_dtypes_are_not_summed_as_bytes():
    method = methods.get("diloco", sync_interval=2)
    with jax.enable_x64(True):
        params = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float64)}
        make = functools.partial(
            RegionProgram, tiny.loss_fn, optax.sgd(0.1), method, params, 2
        )
        make(transport=Transport("program"))
        with pytest.raises(ValueError, match="float32 and float64 cannot be averaged"):
            make(transport=Transport("outer"))


def test_automatic_is_outside_for_several_processes_only():
    method = methods.get("diloco")
    assert Transport("auto").resolve(method, num_processes=2) == "outer"
    assert Transport("auto").resolve(method, num_processes=1) == "program"
    assert Transport("outer").resolve(method, num_processes=1) == "outer"
    assert Transport("program").resolve(method, num_processes=2) == "program"


def test_measured_delays_need_the_outer_mesh():
    method = methods.get("streaming_diloco", **FRAGMENTS, delay_steps="auto")
    assert Transport("auto").resolve(method, num_processes=1) == "outer"
    why = "exchange='program' is not possible .*'streaming_diloco'.*use"
    with pytest.raises(ValueError, match=why):
        Transport("program").resolve(method, num_processes=2)


def test_measured_delays_are_refused_with_a_divided_outer_state():
    method = methods.get("streaming_diloco", **FRAGMENTS, delay_steps="auto")
    why = "exchange='auto' is not .*, but its outer state is divided"
    with pytest.raises(ValueError, match=why):
        Transport("auto").resolve(method.placed("divided"), num_processes=2)


@pytest.mark.parametrize(
    ("exchange", "num_processes"), [("outer", 1), ("auto", 2)], ids=["asked", "auto"]
)
def test_more_channels_than_fragments_are_refused(exchange, num_processes):
    method = methods.get("streaming_diloco", **FRAGMENTS, delay_steps=2)
    two, three = (Transport(exchange, outer_channels=n) for n in (2, 3))
    assert two.resolve(method, num_processes) == "outer"
    why = "outer_channels=3 must be at most num_fragments=2: a fragment"
    with pytest.raises(ValueError, match=why):
        three.resolve(method, num_processes)


@pytest.mark.parametrize(
    ("name", "exchange", "num_processes"),
    [
        ("diloco", "auto", 1),
        ("diloco", "program", 4),
        ("co2", "auto", 4),
        ("data_parallel", "outer", 4),
        ("apart", "auto", 4),
    ],
)
def test_channels_without_messages_on_the_outer_mesh_are_refused(
    name, exchange, num_processes
):
    transport = Transport(exchange, outer_channels=2)
    why = (
        f"outer_channels=2 has no meaning for method='{name}' with exchange="
        f"'{exchange}' and processes={num_processes}: its messages do not cross on the "
        "outer mesh; use 1"
    )
    with pytest.raises(ValueError, match=why):
        transport.resolve(methods.get(name), num_processes)


def test_the_exchange_is_the_resolved_one():
    spec = tiny.shared_program("diloco")._syncs._spec
    inside, outside = (Transport().exchange_of(spec, k) for k in ("program", "outer"))
    assert isinstance(inside, InProgram)
    assert isinstance(outside, OnOuterMesh)
    # A message on the outer mesh has a device, and so its threads, to itself.
    assert inside.shares_mesh
    assert not outside.shares_mesh
