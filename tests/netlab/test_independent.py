"""Regions that live and die alone: who ended badly says why."""

import signal
import sys

import pytest

from cocodc_jax.netlab import independent

# JAX runs in this process; in a launcher it does not.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

REFUSED = "print('more'); print('error: --regions=0 is wrong\\n'); raise SystemExit(2)"
# Process 1 fails, and so process 0 is killed.
OF_TWO = """
import sys, time
time.sleep(60) if "--process_id=0" in sys.argv else sys.exit("error: out of memory")
"""


def started(program, log, num_processes=1):
    command = [sys.executable, "-S", "-c", program]
    region = independent.Region(command, log, num_processes)
    region.start()
    return region


def never():
    return False


@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_line_of_who_ended_badly_is_shown(restarts, tmp_path, capfd):
    log = tmp_path / "region_1" / "output.log"
    regions = [started("pass", tmp_path / "log"), started(REFUSED, log)]
    assert independent.wait(regions, lambda: restarts) == 2
    told = f"region 1 ended with 2, see {log}: error: --regions=0 is wrong\n"
    assert capfd.readouterr().err == told


def test_who_dies_at_once_again_and_again_is_given_up(tmp_path, capfd):
    region = started("raise SystemExit('error: no room')", tmp_path / "log")
    assert independent.wait([region], lambda: True) == 1
    assert region.lives == 5
    *again, last = capfd.readouterr().err.splitlines()
    assert again == ["region 0 ended with 1: again"] * 4
    assert last == f"region 0 ended with 1, see {tmp_path / 'log'}: error: no room"


def test_who_lived_for_long_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(independent, "_BRIEF_S", 0.0)
    region = started("raise SystemExit(1)", tmp_path / "log")
    answers = iter([*[True] * 14, False])  # It is asked twice of each new life.
    assert independent.wait([region], lambda: next(answers)) == 1
    assert region.lives == 8


def test_of_several_processes_it_is_that_of_the_one_that_failed(tmp_path, capfd):
    region = started(OF_TWO, tmp_path / "output.log", num_processes=2)
    assert independent.wait([region], never)
    told = f", see {tmp_path / 'output_1.log'}: error: out of memory\n"
    assert capfd.readouterr().err.endswith(told)


def test_what_one_of_several_processes_refuses_is_not_started_again(tmp_path):
    program = OF_TWO.replace('"error: out of memory"', "2")
    region = started(program, tmp_path / "output.log", num_processes=2)
    assert independent.wait([region], lambda: True) == 2
    assert region.lives == 1


def test_what_is_written_to_the_terminal_is_not_told_again(capfd):
    assert independent.wait([started("raise SystemExit(3)", None)], never) == 3
    assert capfd.readouterr().err == "region 0 ended with 3\n"


def test_who_dies_after_all_were_told_to_stop_is_not_started_again(tmp_path, capfd):
    """A second Ctrl-C kills them, which is no reason to begin anew."""
    region = started("import time; time.sleep(60)", tmp_path / "log")
    told = []

    def restarts():
        return not told

    def kill(*_):
        told.append(True)
        region.send(signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert independent.wait([region], restarts) == 128 + signal.SIGKILL
    finally:
        signal.signal(signal.SIGALRM, before)
    assert region.lives == 1


def test_who_is_started_as_all_are_told_to_stop_is_told_too(tmp_path):
    region = started("raise SystemExit(1)", tmp_path / "log")
    region._command[-1] = "import time; time.sleep(60)"
    answers = iter([True, False, False])
    assert independent.wait([region], lambda: next(answers)) == 128 + signal.SIGTERM
    assert region.lives == 2
