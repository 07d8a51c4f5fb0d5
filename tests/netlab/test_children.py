"""Programs that are started together end together."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from cocodc_jax.netlab.children import Group, exit_code

# JAX runs in this process; in a launcher it does not.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

ROOT = pathlib.Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).touch())
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""


def start(group, program, log=None, *arguments):
    command = [sys.executable, "-S", "-c", program, *map(str, arguments)]
    group.start(command, dict(os.environ), log)


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def group():
    found = Group(grace_s=30)
    yield found
    found.kill()
    found.wait()


def test_all_go_well(group, tmp_path):
    start(group, "print('one')", tmp_path / "log")
    start(group, "pass")
    assert group.wait() == 0
    assert (tmp_path / "log").read_text() == "one\n"


def test_the_first_to_fail_is_explained_and_ends_the_others(group, tmp_path, capfd):
    begin_s = time.monotonic()
    start(group, SLEEP)
    lines = "\\n".join(f"line {i}" for i in range(30))
    fatal = "*** Check failure stack trace: ***\\n    @ 0x7f"
    program = f"print('''{lines}\\n{fatal}'''); raise SystemExit(7)"
    start(group, program, tmp_path / "log")
    assert group.wait() == 7
    assert time.monotonic() - begin_s < 30
    _, err = capfd.readouterr()
    head, *tail = err.splitlines()
    assert head == f"process 1 ended with exit code 7; {tmp_path / 'log'}"
    assert tail == [f"  line {i}" for i in range(20, 30)]


def test_asked_once_they_may_finish_and_twice_they_are_killed(group, tmp_path):
    asked, ready = tmp_path / "asked", tmp_path / "ready"
    start(group, STUBBORN, None, asked, ready)
    wait_for(ready)
    group.stop()
    wait_for(asked)
    group.stop()
    assert group.wait() == 128 + signal.SIGKILL


def test_one_started_after_the_request_is_asked_too(group):
    group.stop()
    start(group, SLEEP)
    assert group.wait() == 128 + signal.SIGTERM


GROUP = f"""
import os, sys
from cocodc_jax.netlab.children import Group
group = Group(1)
group.start([sys.executable, "-S", "-c", {SLEEP!r}], dict(os.environ), None)
print(group._running[0].pid, flush=True)
group.wait()
"""
RUN = """
import sys
from cocodc_jax.netlab.children import run
program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run([sys.executable, "-S", "-c", program])
"""


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        (GROUP, signal.SIGKILL, -signal.SIGKILL),
        (RUN, signal.SIGKILL, -signal.SIGKILL),
        (RUN, signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
def test_children_die_with_their_parent(program, number, code):
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.send_signal(number)
    assert parent.returncode == code
    stat = pathlib.Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_program_starts_others_in_another_way():
    """Regions and the relay `die_with_parent`; `ip` and event commands end soon."""
    paths = [*ROOT.glob("cocodc_jax/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    starts = re.compile(r"subprocess\.(run|Popen|call|check_\w+)\(|os\.(system|spawn)")
    found = {path.name for path in paths if starts.search(path.read_text())}
    assert found == {
        *("children.py", "kernel.py", "launch.py", "monitor.py", "region.py")
    }


def test_exit_codes_are_as_in_a_shell():
    assert [exit_code(c) for c in (0, 3, -9)] == [0, 3, 137]
