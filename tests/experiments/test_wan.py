"""The network lab as a user runs it: real programs in namespaces, and its cleanup."""

import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from cocodc_jax.netlab import region
from experiments import wan
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).parents[2]
# Region 0 is the server; the others wait until it listens.
PRELUDE = """
import os, pathlib, socket, sys, time
region = int(os.environ["COCODC_PROCESS_ID"])

def meet():
    path = pathlib.Path(os.environ["LAB_TEST_READY"])
    if region == 0:
        path.touch()
    while not path.exists():
        time.sleep(0.01)

def udp(port=5000):
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("", port))
    meet()
    return bound
"""


def python(program, *arguments):
    return ["--", sys.executable, "-S", "-c", PRELUDE + program, *map(str, arguments)]


@pytest.fixture
def lab(tmp_path, capfd, monkeypatch):
    """Runs the lab; returns its exit code, region 0's output and traffic.json."""
    if lacks := region.missing():
        pytest.skip(f"no lab: {'; '.join(lacks)}")
    monkeypatch.setenv("LAB_TEST_READY", str(tmp_path / "ready"))

    def run(*arguments):
        code = wan.main(["wan", f"--logdir={tmp_path}", *arguments])
        out, err = capfd.readouterr()
        if code and "error" not in err:
            print(out, err)  # for the report of a failing test
        path = tmp_path / "traffic.json"
        traffic = json.loads(path.read_text()) if path.exists() else {}
        return code, out, traffic

    return run


def log(folder, region):
    return (folder / f"region_{region}.log").read_text()


ROUND_TRIPS = """
sock = udp()
if region == 0:
    others = int(os.environ["COCODC_NUM_PROCESSES"]) - 1
    while others:
        message, sender = sock.recvfrom(99)
        sock.sendto(message, sender)
        others -= message == b"e"
else:
    times = []
    for question in b"???????e":
        begin = time.monotonic()
        sock.sendto(bytes([question]), ("region0", 5000))
        sock.recv(99)
        times.append(time.monotonic() - begin)
    print(min(times))  # Others may need the processor.
"""


def test_a_region_gets_its_environment_and_the_delay_of_its_links(lab, tmp_path):
    tell = """
for name in ("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS", "LOCAL_ADDRESS"):
    print(os.environ["COCODC_" + name], flush=True)
print(sys.argv[1], socket.gethostbyname(socket.gethostname()), flush=True)
print("to stderr", file=sys.stderr, flush=True)
"""

    code, out, _ = lab("--latency_ms=40", *python(tell + ROUND_TRIPS, "r{region}"))
    assert code == 0
    printed = ["0", "2", "10.77.0.1:29400", "10.77.0.1", "r0 10.77.0.1"]
    assert out.splitlines() == printed
    assert sorted(log(tmp_path, 0).splitlines()) == sorted([*printed, "to stderr"])

    *printed, error, round_trip_s = log(tmp_path, 1).splitlines()
    assert printed == ["1", "2", "10.77.0.1:29400", "10.77.0.2", "r1 10.77.0.2"]
    assert error == "to stderr"
    assert float(round_trip_s) == pytest.approx(0.08, rel=0.1)


def test_each_direction_of_a_link_has_its_own_delay(lab, tmp_path):
    links = tmp_path / "links.yaml"
    links.write_text("""
regions: [here, near, far]
default: {bandwidth_gbps: 1, latency_ms: 20}
links:
  - {from: here, to: far, latency_ms: 100}
  - {from: far, to: here, latency_ms: 60}
""")

    code, _, traffic = lab(f"--links={links}", *python(ROUND_TRIPS))
    assert code == 0
    assert float(log(tmp_path, 1)) == pytest.approx(0.04, rel=0.1)
    assert float(log(tmp_path, 2)) == pytest.approx(0.16, rel=0.1)

    assert traffic["regions"] == ["here", "near", "far"]
    # 8 questions of a byte and 28 bytes of headers, and 8 answers.
    assert traffic["sent_bytes"] == [[0, 232, 232], [232, 0, 0], [232, 0, 0]]
    assert traffic["delivered_bytes"] == traffic["sent_bytes"]


TRANSFER = """
def counted(which):
    line = [x for x in open("/proc/net/dev") if "wan0" in x][0]
    return int(line.split(":")[1].split()[which])

size = int(sys.argv[1])
if region == 0:
    server = socket.create_server(("", 5000))
    meet()
    connection, _ = server.accept()
    got, marks, buffer = 0, [], bytearray(1 << 20)
    while number := connection.recv_into(buffer):
        got += number
        marks.append((time.monotonic(), got))
    steady = [mark for mark in marks if mark[1] > size / 3]
    seconds, number = (b - a for a, b in zip(steady[0], steady[-1]))
    print(got, number * 8 / 1e6 / seconds, counted(8))
else:
    meet()
    with socket.create_connection(("region0", 5000)) as connection:
        connection.sendall(bytes(size))
    time.sleep(0.5)
    print(counted(8))
"""


def test_tcp_fills_the_link_and_bytes_are_counted(lab, tmp_path):
    size = 20_000_000
    flags = ("--bandwidth_mbit=100", "--latency_ms=10")
    code, out, traffic = lab(*flags, *python(TRANSFER, size))
    assert code == 0

    received_bytes, mbit, answered_bytes = out.split()
    assert int(received_bytes) == size

    # Headers are 52 bytes of a packet of 12,500.
    assert float(mbit) == pytest.approx(100, rel=0.1)
    (_, back), (sent, _) = traffic["sent_bytes"]
    delivered = traffic["delivered_bytes"][1][0]
    assert size * 1.004 < delivered < size * 1.01

    # The counter of the interface is equal, but for packets after it was read.
    assert sent == pytest.approx(int(log(tmp_path, 1)), abs=500)
    assert back == pytest.approx(int(answered_bytes), abs=500)
    assert 0 < traffic["relay_cpu_s"] < traffic["wall_s"]


def test_tcp_begins_with_more_than_a_packet(lab):
    paths = [f"/proc/sys/net/ipv4/tcp_{name}mem" for name in "rw"]
    before = [pathlib.Path(path).read_text() for path in paths]
    code, out, _ = lab("--bandwidth_mbit=1000", "--", "cat", *paths)
    assert code == 0

    for line in out.splitlines():
        _, usual, high = map(int, line.split())
        assert usual >= 10 * 65000
        # 1 Gbit/s for two round trips.
        assert high >= 4 * 1e9 / 8 * 0.2

    assert [pathlib.Path(path).read_text() for path in paths] == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], "reno\n0\n"), (["--slow_start_after_idle"], "reno\n1\n")],
)
def test_flags_set_tcp_whatever_this_machine_uses(lab, flags, expected):
    names = ("congestion_control", "slow_start_after_idle")
    paths = [f"/proc/sys/net/ipv4/tcp_{name}" for name in names]
    assert lab(*flags, "--", "cat", *paths)[:2] == (0, expected)


DATAGRAMS = """
number, gap_s = int(sys.argv[1]), float(sys.argv[2])
sock, got = udp(), []
if region == 0:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    while (message := sock.recv(99)) != b"end":
        got.append(int(message))
    print(*got)
else:
    begin = time.monotonic()
    for i in range(number):
        sock.sendto(b"%d" % i, ("10.77.0.1", 5000))
        time.sleep(max(0.0, begin + (i + 1) * gap_s - time.monotonic()))
    for _ in range(20):  # some get lost
        sock.sendto(b"end", ("10.77.0.1", 5000))
"""


def test_a_link_loses_the_share_that_it_is_to_lose(lab):
    flags = ("--loss=0.2", "--latency_ms=1", "--seed=1")
    code, out, traffic = lab(*flags, *python(DATAGRAMS, 2000, 0.0002))
    assert code == 0
    lost = 2000 - len(out.split())
    assert abs(lost - 400) < 5 * math.sqrt(2000 * 0.2 * 0.8)  # five sigmas
    assert lost <= traffic["lost_packets"][1][0] <= lost + 20


def test_an_outage_of_a_second(lab, tmp_path):
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(
        "[{start_s: 0.6, duration_s: 1, bandwidth_factor: 0, from: region1}]"
    )

    flags = ("--latency_ms=10", f"--schedule={schedule}")
    code, out, traffic = lab(*flags, *python(DATAGRAMS, 200, 0.01))
    assert code == 0
    received = [int(word) for word in out.split()]
    missing = sorted(set(range(200)) - set(received))
    assert missing == list(range(missing[0], missing[-1] + 1))
    assert len(missing) == pytest.approx(100, abs=10)
    assert traffic["outage_packets"] == [[0, 0], [len(missing), 0]]


def processes():
    """The parent of every process."""
    out = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                out[int(path.parent.name)] = int(parent)
    return out


def family(pid):
    """Return a process and its descendants, but for one that Python keeps for pools."""
    parents = processes()
    pids = {pid}
    while more := {p for p, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return {p for p in pids if not is_tracker(p)}


def is_tracker(pid):
    """Return whether a process is the one that Python keeps after a pool."""
    try:
        return b"resource_tracker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def namespaces():
    out = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            out.add(os.readlink(path))
    return out


# A command with a child in another session, as a daemon.
LINGER = r"""
import subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, os.readlink("/proc/self/ns/net"), flush=True)
"""


def test_a_run_that_succeeds_leaves_no_process_and_no_namespace(lab, tmp_path):
    before = namespaces()
    assert lab("--regions=3", *python(LINGER))[0] == 0
    assert family(os.getpid()) == {os.getpid()}

    for number in range(3):
        pid, namespace = log(tmp_path, number).split()
        assert namespace not in before
        assert namespace not in namespaces()
        assert int(pid) not in processes()
    assert not pathlib.Path("/sys/class/net", region.DEVICE).exists()


def test_the_first_failure_ends_the_others(lab, tmp_path, capfd):
    program = """
import signal
if region == 1:
    time.sleep(0.5)
    print("what went wrong", file=sys.stderr)
    sys.exit(3)
if region == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ignores", flush=True)
try:
    time.sleep(60)
finally:
    print("not reached", flush=True)
"""

    begin_s = time.monotonic()
    arguments = ("--regions=3", "--grace_s=0.3", *python(LINGER + program))
    code = wan.main(["wan", f"--logdir={tmp_path}", *arguments])
    error = capfd.readouterr().err

    assert code == 3
    assert time.monotonic() - begin_s < 5  # the spare kill comes later
    assert f"wan: region 1 ended with exit code 3; {tmp_path}/region_1.log" in error
    assert "what went wrong" in error
    assert "region 2 ended" not in error
    assert "ignores" in log(tmp_path, 2)
    assert "not reached" not in log(tmp_path, 0) + log(tmp_path, 2)
    assert family(os.getpid()) == {os.getpid()}


def test_without_grace_regions_and_their_children_are_killed_at_once(lab, tmp_path):
    program = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
if region == 1:
    sys.exit(3)
time.sleep(60)
"""
    begin_s = time.monotonic()

    assert lab("--regions=2", "--grace_s=0", *python(LINGER + program))[0] == 3
    assert time.monotonic() - begin_s < 5  # the spare kill comes later
    assert int(log(tmp_path, 0).split()[0]) not in processes()


def test_a_command_that_is_killed_or_unknown(lab, tmp_path):
    assert lab(*python("os.kill(os.getpid(), 9)"))[0] == 128 + 9
    assert lab("--regions=1", "--", "/no/such/program")[0] == 127
    assert "/no/such/program: No such file" in log(tmp_path, 0)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + 15), (signal.SIGINT, 128 + 2), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_lab_leaves_no_process_and_no_namespace(
    number, code, lab, tmp_path
):
    words = python(LINGER + "time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.wan", f"--logdir={tmp_path}", *words],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a shell does, for Ctrl-C
    )
    logs = [tmp_path / f"region_{i}.log" for i in range(2)]
    wait_until(lambda: all(p.exists() and "net:[" in p.read_text() for p in logs))
    started = family(process.pid)

    # The lab, the relay, and for each region its keeper, the command and its child.
    assert len(started) == 2 + 2 * 3

    os.killpg(process.pid, number)
    wait_until(lambda: not started & set(processes()))

    _, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in error

    made = {path.read_text().split()[1] for path in logs}
    assert len(made) == 2
    assert not made & namespaces()
    assert lab("--", "true")[0] == 0  # and the next start works


def test_a_broken_relay_ends_the_run(lab, command, tmp_path):
    words = python(LINGER + "time.sleep(60)")
    process = command("experiments.wan", f"--logdir={tmp_path}", *words)
    path = tmp_path / "region_1.log"
    wait_until(lambda: path.exists() and "net:[" in path.read_text())

    started = family(process.pid)
    for pid in started:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"cocodc_jax.netlab.relay" in words:
            os.kill(pid, signal.SIGKILL)

    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "error: the relay broke" in error
    wait_until(lambda: not started & set(processes()))


def test_missing_permissions_are_named_before_anything_starts(
    monkeypatch, tmp_path, refused
):
    monkeypatch.setattr(region, "missing", lambda: ["this", "that"])
    error = refused(wan, f"--logdir={tmp_path / 'new'}", "--", "true")
    assert error == "the network lab lacks this; and that"
    assert not (tmp_path / "new").exists()


def plan(*arguments):
    values = wan.define_flags()
    command = values(["wan", "--logdir=/x", *arguments, "--", "true"])[1:]
    return wan.build_plan(values, command)


def test_flags_become_links():
    lab_plan = plan(
        "--regions=3", "--bandwidth_mbit=20", "--latency_ms=30", "--loss=0.1"
    )
    (links,) = lab_plan.conditions

    assert lab_plan.regions == ("region0", "region1", "region2")
    assert links.rate_bps[0][1] == pytest.approx(20e6)
    assert links.uplink_bps == (20e6,) * 3
    assert (links.delay_s[0][1], links.loss[0][1]) == (0.03, 0.1)
    assert (lab_plan.mtu_bytes, lab_plan.buffer_s) == (1500, math.inf)
    assert (lab_plan.congestion_control, lab_plan.restarts_slowly) == ("reno", False)


def test_flags_set_packets_buffers_and_slow_start():
    assert plan("--slow_start_after_idle").restarts_slowly
    assert plan("--mtu=9000", "--buffer_ms=30").mtu_bytes == 9000
    assert plan("--buffer_ms=30").buffer_s == 0.03


@pytest.fixture
def links_file(tmp_path):
    """Links of 2 Gbit/s that are out for the fourth second."""
    path = tmp_path / "links.yaml"
    path.write_text(
        "{regions: [a, b, c], default: {bandwidth_gbps: 2, latency_ms: 9},"
        " changes: [{start_s: 3, duration_s: 1, bandwidth_factor: 0}]}"
    )
    return path


def test_links_of_a_file_change_at_its_times(links_file):
    lab_plan = plan(f"--links={links_file}")

    assert lab_plan.conditions[0].uplink_bps == (math.inf,) * 3
    assert [c.start_s for c in lab_plan.conditions] == [0, 3, 4]
    # Sizes come from the usual rate of the links, not from the outage.
    assert lab_plan.mtu_bytes == 65000


def test_world_and_links_have_their_caps(links_file):
    capped = plan(f"--links={links_file}", "--bandwidth_mbit=500").conditions[0]
    assert (capped.uplink_bps[0], capped.rate_bps[0][1]) == (5e8, 2e9)

    world = plan("--world=us-east,europe-west", "--bandwidth_mbit=50").conditions[0]
    assert (world.uplink_bps[0], world.rate_bps[0][1]) == (5e7, 5e7)
    assert world.delay_s[0][1] == 0.035


def test_one_region_alone_has_long_packets(tmp_path):
    links = tmp_path / "links.yaml"
    links.write_text("{regions: [here], default: {bandwidth_gbps: 1, latency_ms: 1}}")
    assert plan(f"--links={links}").mtu_bytes == 65_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--regions=0 -- x", "--regions=0 must be from 1 to "),
        ("--bandwidth_mbit=0 -- x", "--bandwidth_mbit=0 must be positive"),
        ("--latency_ms=-1 -- x", "--latency_ms=-1 must be at least 0"),
        ("--loss=1 -- x", "--loss=1.0 must be in [0, 1)"),
        ("--mtu=100 -- x", "--mtu=100 must be from "),
        ("--grace_s=inf -- x", "--grace_s=inf must be below 86400, a day"),
        ("--bandwidth_mbit=nan -- x", "--bandwidth_mbit=nan must be finite"),
        ("--latency=1 -- x", "Unknown command line flag 'latency'. Did you"),
        ("--congestion_control=mine -- x", "--congestion_control=mine is not"),
        ("", "no command given; write it after --"),
        (
            "-- --preset=tiny",
            "the command begins with '--preset=tiny', which is a flag; write the "
            "program before it, as in -- python -m experiments.train --preset=tiny",
        ),
        ("--links=/no/such -- x", "--links=/no/such: No such file"),
        ("--schedule=/no/such -- x", "--schedule=/no/such: No such file"),
        ("--world=mars,us-east -- x", "--world=mars,us-east: region 'mars'"),
        ("--world=us-east --regions=2 -- x", "--regions=2 does not combine"),
        ("--links=a --world=b -- x", "--world=b does not combine with --li"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(words, message, monkeypatch, refused):
    monkeypatch.setattr(region, "missing", list)
    assert refused(wan, *words.split()).startswith(message)
