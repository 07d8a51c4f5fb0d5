"""Programs that are started together end together, and regions live and die alone."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from cocodc_jax.netlab import children
from cocodc_jax.netlab.children import Group, exit_code
from tests.waiting import is_over, wait_until

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


@pytest.fixture
def group():
    group = Group(grace_s=30)
    yield group
    group.kill()
    group.wait()


def test_output_of_children_is_in_their_log(group, tmp_path):
    start(group, "print('one')", tmp_path / "log")
    start(group, "pass")
    assert group.wait() == 0
    assert (tmp_path / "log").read_text() == "one\n"


def test_the_first_child_to_fail_is_explained_and_ends_the_others(
    group, tmp_path, capfd
):
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


def test_children_finish_after_one_request_and_are_killed_after_two(group, tmp_path):
    asked = tmp_path / "asked"
    ready = tmp_path / "ready"
    start(group, STUBBORN, None, asked, ready)
    wait_until(ready.exists)
    group.stop()
    wait_until(asked.exists)
    group.stop()
    assert group.wait() == 128 + signal.SIGKILL


def test_a_child_that_starts_after_the_request_is_asked_too(group):
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
    wait_until(lambda: is_over(child), 10)


def test_only_known_modules_start_other_programs():
    """Regions and the relay `die_with_parent`; other programs end soon."""
    paths = [*ROOT.glob("cocodc_jax/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    starts = re.compile(r"subprocess\.(run|Popen|call|check_\w+)\(|os\.(system|spawn)")
    names = {path.name for path in paths if starts.search(path.read_text())}
    known = {"children.py", "launch.py", "monitor.py", "network.py", "region.py"}
    assert names == known


def test_exit_codes_are_as_in_a_shell():
    assert [exit_code(c) for c in (0, 3, -9)] == [0, 3, 137]


REFUSED = "print('more'); print('error: --regions=0 is wrong\\n'); raise SystemExit(2)"
# Process 1 fails, and so process 0 is killed.
OF_TWO = """
import sys, time
time.sleep(60) if "--process_id=0" in sys.argv else sys.exit("error: out of memory")
"""


def started(program, log, num_processes=1):
    command = [sys.executable, "-S", "-c", program]
    region = children.Region(command, log, num_processes)
    region.start()
    return region


@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_line_of_a_region_that_failed_is_shown(restarts, tmp_path, capfd):
    log = tmp_path / "region_1" / "output.log"
    regions = [started("pass", tmp_path / "log"), started(REFUSED, log)]
    assert children.wait(regions, lambda: restarts) == 2
    message = (
        f"region 1 ended with exit code 2, see {log}: error: --regions=0 is wrong\n"
    )
    assert capfd.readouterr().err == message


def test_a_region_that_fails_at_once_again_and_again_is_given_up(tmp_path, capfd):
    region = started("raise SystemExit('error: no room')", tmp_path / "log")
    assert children.wait([region], lambda: True) == 1
    assert region.lives == 5
    *again, last = capfd.readouterr().err.splitlines()
    assert again == ["region 0 ended with exit code 1; starting it again"] * 4
    message = f"region 0 ended with exit code 1, see {tmp_path / 'log'}: error: no room"
    assert last == message


def test_a_region_that_cannot_restart_fails_even_if_stderr_is_unwritable(
    tmp_path, monkeypatch
):
    region = started("raise SystemExit(1)", tmp_path / "log")
    region._log = tmp_path / "log" / "no folder"
    with open(os.devnull) as unwritable:
        monkeypatch.setattr(sys, "stderr", unwritable)
        assert children.wait([region], lambda: True) == 1


def test_a_key_that_did_not_fit_on_the_disk_is_made_again(tmp_path):
    (tmp_path / "key").touch()
    assert len(children.make_key(tmp_path).read_bytes()) == 32


def test_a_region_that_ran_for_long_is_restarted_any_number_of_times(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(children, "_BRIEF_S", 0.0)
    region = started("raise SystemExit(1)", tmp_path / "log")
    answers = iter([*[True] * 14, False])  # It is asked twice of each new life.
    assert children.wait([region], lambda: next(answers)) == 1
    assert region.lives == 8


def test_the_shown_line_is_of_the_process_that_failed(tmp_path, capfd):
    region = started(OF_TWO, tmp_path / "output.log", num_processes=2)
    assert children.wait([region], lambda: False)
    message = f", see {tmp_path / 'output_1.log'}: error: out of memory\n"
    assert capfd.readouterr().err.endswith(message)


def test_a_region_of_which_one_process_refuses_its_flags_is_not_restarted(tmp_path):
    program = OF_TWO.replace('"error: out of memory"', "2")
    region = started(program, tmp_path / "output.log", num_processes=2)
    assert children.wait([region], lambda: True) == 2
    assert region.lives == 1


def test_output_on_the_terminal_is_not_repeated(capfd):
    assert children.wait([started("raise SystemExit(3)", None)], lambda: False) == 3
    assert capfd.readouterr().err == "region 0 ended with exit code 3\n"


def test_a_region_that_dies_during_a_stop_is_not_restarted(tmp_path, capfd):
    """A second Ctrl-C kills children, which is no reason to restart them."""
    region = started("import time; time.sleep(60)", tmp_path / "log")
    lines = []

    def restarts():
        return not lines

    def kill(*_):
        lines.append(True)
        region.send(signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert children.wait([region], restarts) == 128 + signal.SIGKILL
    finally:
        signal.signal(signal.SIGALRM, before)

    assert region.lives == 1


def test_a_region_that_starts_during_a_stop_is_stopped_too(tmp_path):
    region = started("raise SystemExit(1)", tmp_path / "log")
    region._command[-1] = "import time; time.sleep(60)"
    answers = iter([True, False, False])
    assert children.wait([region], lambda: next(answers)) == 128 + signal.SIGTERM
    assert region.lives == 2


def test_the_signal_that_killed_a_region_is_shown(tmp_path, capfd):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    region = children.Region([sys.executable, "-c", code], None)
    region.start()
    assert children.wait([region], lambda: False) == 137
    assert capfd.readouterr().err == "region 0 was killed by signal 9\n"
