"""How processes connect and agree, as far as one process can test it."""

import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from cocodc_jax.run import processes, resume
from cocodc_jax.run.processes import Processes, check_alike, check_shares


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        processes = Processes(address, 2, 0)
        with pytest.raises(ValueError, match=f"{address}': process 0 cannot listen on"):
            processes.start(num_regions=4)


def test_a_port_out_of_range_is_refused():
    with pytest.raises(ValueError, match="cannot listen on port 99999"):
        Processes("127.0.0.1:99999", 2, 0).start(num_regions=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": -1}, "num_processes=-1 must be at least 1, or 0"),
        ({"num_processes": 2}, "coordinator_address='' must be host:port"),
        ({"num_processes": 2, "coordinator_address": "here", "process_id": 0},
         "coordinator_address='here' must be host:port"),
        ({"num_processes": 2, "coordinator_address": "here:1", "process_id": 2},
         "process_id=2 must be 0 to 1"),
        ({"coordinator_address": "here:1"},
         "coordinator_address='here:1' was given, but num_processes is 1; say how"),
        ({"process_id": 1}, "process_id=1 was given, but num_processes is 1; say how"),
        ({"num_processes": 0, "process_id": 1},
         "process_id=1 was given, but num_processes is 0; leave it out"),
        ({"start_timeout_s": 0}, "start_timeout_s=0 must be at least 1"),
        ({"heartbeat_timeout_s": -1}, "heartbeat_timeout_s=-1 must be at least 1"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_by_each_process(fields, message):
    with pytest.raises(ValueError, match=message):
        Processes(**fields)


def test_processes_must_divide_regions_or_their_devices_evenly():
    check_shares(4, 2)
    check_shares(2, 4, devices_per_region=6)
    for call, message in (
        (lambda: check_shares(4, 3), "num_processes=3 must divide regions=4"),
        (
            lambda: Processes("127.0.0.1:1", 6, 1).start(num_regions=4),
            "num_processes=6 must divide regions=4, so",
        ),
        (
            lambda: check_shares(4, 8, devices_per_region=3),
            r"num_processes=8 makes 2 processes of each of regions=4, .*stages \* "
            r"data_axis \* expert_axis \* sequence_axis \* model_axis = 3 devices; .*"
            "multiple of 2, as with data_axis=2, or use num_processes=4",
        ),
        (
            lambda: Processes("127.0.0.1:1", 8, 1).start(num_regions=4),
            "model_axis = 1 devices; .*num_processes=4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("process", "count", "regions", "window", "ratios"),
    [
        (1, 2, (2, 3), [[5, 6], [7, 8]], [0.75]),
        (0, 1, (0, 1, 2, 3), [[1, 2, 5, 6], [3, 4, 7, 8]], [0.5]),
        (3, 8, (1,), [[2], [4]], [0.5]),
    ],
    ids=["the same", "one", "two to a region"],
)
def test_saved_losses_follow_their_regions_to_other_processes(
    monkeypatch, process, count, regions, window, ratios
):
    saved = [
        {
            "progress": {"window": [[1.0, 2.0], [3.0, 4.0]], "ratios": [0.5]},
            "stream": {"regions": {"0": {}, "1": {}}},
        },
        {
            "progress": {"window": [[5.0, 6.0], [7.0, 8.0]], "ratios": [0.75]},
            "stream": {"regions": {"2": {}, "3": {}}},
        },
    ]
    monkeypatch.setattr(resume.jax, "process_index", lambda: process)
    monkeypatch.setattr(resume.jax, "process_count", lambda: count)
    sums = resume.progress(saved, regions)
    assert np.array(sums["window"]).tolist() == window
    assert sums["ratios"] == ratios
    for of_process, past in zip(saved, ([[0.1], [1.1]], [[2.1], [3.1]]), strict=True):
        of_process["progress"] |= {"window": [], "spikes": {"past": past, "is_on": []}}
    pasts = [[r + 0.1] for r in regions]
    spikes = {"past": pasts, "is_on": []}
    assert resume.progress(saved, regions)["spikes"] == spikes
    assert resume.progress(saved, regions)["window"] == []


def set_environment(monkeypatch, count):
    """Set what a launcher of `count` processes passes to process 0."""
    monkeypatch.setenv(processes.ADDRESS, "10.0.0.1:80")
    monkeypatch.setenv(processes.ID, "0")
    monkeypatch.setenv(processes.COUNT, count)


def test_a_launcher_passes_processes_by_the_environment(monkeypatch):
    set_environment(monkeypatch, "3")
    assert Processes.from_environment() == Processes("10.0.0.1:80", 3, 0)


def test_arguments_take_the_place_of_the_environment(monkeypatch):
    set_environment(monkeypatch, "3")
    processes_of_run = Processes.from_environment(process_id=2, heartbeat_timeout_s=7)
    expected = Processes("10.0.0.1:80", 3, 2, heartbeat_timeout_s=7)
    assert processes_of_run == expected


def test_an_environment_of_one_process_is_none(monkeypatch):
    set_environment(monkeypatch, "1")  # As the lab does with one region.
    assert Processes.from_environment() == Processes()


def test_an_invalid_environment_is_refused(monkeypatch):
    set_environment(monkeypatch, "many")
    with pytest.raises(ValueError, match="COCODC_NUM_PROCESSES='many'.*whole number"):
        Processes.from_environment()


def test_processes_of_different_code_are_refused(monkeypatch):
    def from_another_checkout(value):
        return [value, value, {**value, "code": "0123456789ab"}]

    monkeypatch.setattr(processes, "gather", from_another_checkout)
    digest = processes.code_digest()
    with pytest.raises(ValueError, match=f"code is '{digest}' in process 0, '0123456"):
        check_alike({"run": {"steps": 3}})


def test_processes_of_different_values_are_refused(monkeypatch):
    monkeypatch.setattr(
        processes, "gather", lambda value: [value, {**value, "text": 1}]
    )
    with pytest.raises(ValueError, match="text is 'a' in process 0, 1 in 1"):
        check_alike({"text": "a"})


def test_equal_processes_pass_the_check(monkeypatch):
    monkeypatch.setattr(processes, "gather", lambda value: [value, value])
    check_alike({"run": {"steps": 3}})


def test_the_digest_of_the_code_changes_with_a_file(monkeypatch, tmp_path):
    digests = {processes.code_digest()}
    monkeypatch.setattr(processes.cc, "__file__", str(tmp_path / "__init__.py"))
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "a.py").write_text(text)
        digests.add(processes.code_digest())
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"coordinator_address": "localhost:5"}, "localhost:5"),
        ({"coordinator_address": "[::1]:5"}, "[::1]:5"),
        ({"coordinator_address": "host0:5"}, None),
        (
            {
                "coordinator_address": "host0:5",
                "coordinator_bind_address": "10.0.0.4:5",
            },
            "10.0.0.4:5",
        ),
    ],
)
def test_the_coordinator_listens_on_this_machine_alone_if_all_are_on_it(
    monkeypatch, fields, address
):
    met = {}
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **named: met.update(named)
    )
    Processes(**fields, num_processes=2, process_id=0)._meet([])
    assert met["coordinator_bind_address"] == address


@pytest.mark.parametrize(
    ("num", "message"),
    [
        (1, "coordinator_bind_address='x' has no meaning for one process; leave it"),
        (2, "coordinator_bind_address='x' must be host:port of this machine"),
    ],
)
def test_an_invalid_bind_address_is_refused(num, message):
    where = {"coordinator_address": "host0:5", "process_id": 0} if num > 1 else {}
    with pytest.raises(ValueError, match=message):
        Processes(**where, num_processes=num, coordinator_bind_address="x")


def test_output_of_gloo_is_left_out_of_standard_output():
    code = (
        "import os, sys\n"
        "from cocodc_jax.run.processes import keep_for_python\n"
        "print('first')\n"
        "keep_for_python(sys.stdout)\n"
        "os.write(1, b'[Gloo] Rank 0 is connected to 1 peer ranks\\n')\n"
        "print('last')\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "first\nlast\n"
