"""The request to end a run after a checkpoint: SIGTERM, or Ctrl-C."""

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

# Where JAX's runtime notes that one of a run's processes received SIGTERM.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_ASK_S = 0.2


class Stop:
    """The request to end a run after a checkpoint; call it once in every turn.

    With several processes, it returns True in all of them from the same call on, the
    first one that none of them has reached yet.
    """

    def __init__(self, reached: Callable[[], bool], is_asked: Callable[[], bool]):
        self._reached = reached
        self._is_asked = is_asked

    def __call__(self) -> bool:
        """Return whether to end the run now; every process must call it."""
        return self._reached()

    def is_asked(self) -> bool:
        """Return whether a process was asked to stop; any thread may call this."""
        return self._is_asked()


class StopListener:
    """Listens for the request to stop, from the first call of `listen` to the exit.

    Before that, SIGTERM ends the process at once, as nothing is lost.
    """

    def __init__(self):
        self._exits = contextlib.ExitStack()
        self._stop: Stop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()

    def listen(self) -> Stop:
        """Listen from now on; return the request."""
        if self._stop is None:
            self._stop = self._exits.enter_context(stop_signal())
        return self._stop

    def hears_request(self) -> bool:
        """Return whether to stop; False before `listen`. Every process must call it."""
        return self._stop is not None and self._stop()


@contextlib.contextmanager
def stop_signal() -> Iterator[Stop]:
    """Stop the run after a checkpoint on SIGTERM, as schedulers send before they kill.

    So does Ctrl-C with one process; a second one ends the run at once.
    """
    if jax.process_count() > 1:
        yield _stop_of_several_processes()
        return

    received: list[int] = []

    def terminate(number: int, _: Any) -> None:
        received.append(number)

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        print("stopping after a checkpoint; Ctrl-C again ends at once", file=sys.stderr)

    handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    before = {number: signal.getsignal(number) for number in handlers}
    # Background jobs of shells ignore it; None is a handler that is not Python's.
    if before[signal.SIGINT] in (signal.SIG_IGN, None):
        del handlers[signal.SIGINT]

    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield Stop(lambda: bool(received), lambda: bool(received))
    finally:
        for number in handlers:
            signal.signal(number, before[number])


def _stop_of_several_processes() -> Stop:
    """Return the request of a run whose processes stop at the same call."""
    calls = itertools.count(1)
    is_asked = False

    def should_stop() -> bool:
        nonlocal is_asked
        if not is_asked:  # It returns True only once.
            is_asked = multihost_utils.reached_preemption_sync_point(next(calls))
        return is_asked

    return Stop(should_stop, _notices())


def _notices() -> Callable[[], bool]:
    """Return a function that returns whether any process received SIGTERM.

    Processes may call it in the middle of a turn, where they cannot agree on a call of
    `Stop`.
    """
    is_noticed = False
    looked_s = -_ASK_S

    def is_asked() -> bool:
        nonlocal is_noticed, looked_s
        now = time.monotonic()
        if is_noticed or now - looked_s < _ASK_S:
            return is_noticed

        looked_s = now
        client = distributed.global_state.client
        # It raises an error while there is no notice.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            is_noticed = client is not None and bool(client.key_value_try_get(_NOTICE))
        return is_noticed

    return is_asked
