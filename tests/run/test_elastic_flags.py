"""Where elastic regions are: what is refused, and named."""

import re
import sys

import pytest
from absl.flags import FlagValues

from cocodc_jax.run import flags
from cocodc_jax.run.elastic_flags import ElasticFlags
from cocodc_jax.run.processes import Processes
from experiments import train

ADDRESSES = "a:1,b:2"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return str(path)


def test_a_place(key_file):
    place = ElasticFlags(ADDRESSES, "", 1, key_file, min_regions=2).place("elastic", 2)
    assert (place.region, place.num_regions, place.min_regions) == (1, 2, 2)
    assert ElasticFlags().place("outer", 2) is None


def test_a_place_without_ports(key_file, tmp_path):
    place = ElasticFlags(via=f"{tmp_path}/new", region_id=2, key_file=key_file).place(
        "elastic", 3
    )
    assert (place.region, place.num_regions, place.addresses) == (2, 3, ())
    assert (tmp_path / "new").is_dir()


BOTH = {"region_addresses": ADDRESSES, "key_file": "KEY"}


@pytest.mark.parametrize(
    ("fields", "exchange", "message"),
    [
        ({"region_id": 0}, "outer", "have no meaning for exchange='outer'"),
        ({"via": "x"}, "outer", "have no meaning for exchange='outer'"),
        ({}, "elastic", "exchange='elastic' needs region_addresses or via"),
        ({"via": "x"}, "elastic", "exchange='elastic' needs key_file"),
        (BOTH, "elastic", "region_id=-1 must be 0 to 1"),
        (BOTH | {"via": "x"}, "elastic", "via='x' needs no region_addresses='a:1,b:2'"),
        (
            {"via": "/dev/null/x", "region_id": 0, "key_file": "KEY"},
            "elastic",
            "via='/dev/null/x' cannot be reached",
        ),
    ],
)
def test_what_is_missing_is_named(key_file, fields, exchange, message):
    if "key_file" in fields:
        fields = {**fields, "key_file": key_file}
    with pytest.raises(ValueError, match=re.escape(message)):
        ElasticFlags(**fields).place(exchange, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beat_s": 0.0}, "beat_s=0.0 must be above 0"),
        ({"max_behind_syncs": 0}, "max_behind_syncs=0 must be 1 or more"),
        ({"grace_s": float("inf")}, "grace_s=inf must be above 0"),
        ({"dead_after_s": 1.0}, "dead_after_s=1.0 must be at least three times beat_s"),
    ],
)
def test_times_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ElasticFlags(**fields)


def test_a_job_is_none_of_its_launchers_processes(monkeypatch):
    for name, value in [("NUM_PROCESSES", "4"), ("PROCESS_ID", "2")]:
        monkeypatch.setenv(f"COCODC_{name}", value)
    monkeypatch.setenv("COCODC_COORDINATOR_ADDRESS", "region0:29400")
    found = {}
    for words in [(), ("--exchange=elastic", "--region_id=2")]:
        monkeypatch.setattr(flags, "FLAGS", FlagValues())
        monkeypatch.setattr(sys, "argv", ["train", *words])
        train.define()
        flags.parse(sys.argv)
        found[words] = flags.processes().num_processes
    assert list(found.values()) == [4, Processes().num_processes]


def test_a_region_of_several_processes_sees_no_lateness_by_its_own_clock():
    ElasticFlags(late_mean="wait").check_several(4)
    with pytest.raises(ValueError, match=r"late_mean='merge' .*num_processes=4"):
        ElasticFlags(late_mean="merge").check_several(4)
