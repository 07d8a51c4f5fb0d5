"""Waiting for other processes."""

import contextlib
import pathlib
import signal
import time


def wait_until(condition, seconds=240.0):
    """Return when the condition holds; fail if it does not for so long."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"not so within {seconds} s"
        time.sleep(0.01)


def is_over(pid):
    """Return whether a process is gone or a zombie."""
    try:
        return ") Z " in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@contextlib.contextmanager
def at_once(seconds=5):
    """Raise in the main thread if it blocks, say on a pipe without a writer."""

    def late(*_):
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
