"""How much a flood of requests for metrics slows Python threads.

    python -m experiments.studies.metrics_flood

A thread counts, in turn alone and while a process of its own asks for metrics as fast
as it can, over several connections at a time. Prints medians over the rounds: both
counts a second, their ratio, and the requests answered.
"""

import json
import multiprocessing
import socket
import statistics
import threading
import time

from cocodc_jax.run.live_metrics import LiveMetrics, serving

_ROUNDS, _SECONDS, _PAUSE_S, _CLIENTS = 5, 2.0, 1.0, 8
_REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"


def _count(seconds: float) -> float:
    """Return how often a second a Python thread counts."""
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += 1
    return count / seconds


def _flood(port: int, is_on, answered) -> None:
    """Ask for metrics while an event is set, over several connections at once."""

    def ask() -> None:
        while is_on.wait():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                    client.sendall(_REQUEST)
                    if client.recv(1 << 16).startswith(b"HTTP/1.0 200"):
                        with answered.get_lock():
                            answered.value += 1
            except OSError:
                pass

    for _ in range(_CLIENTS):
        threading.Thread(target=ask, daemon=True).start()
    threading.Event().wait()


def main() -> None:
    """Measure and print the result."""
    live = LiveMetrics(100, lambda step: step, 1)
    alone, flooded, answers = [], [], []
    with serving(0, live, {"region": "0", "process": "0"}) as (_, port):
        context = multiprocessing.get_context("spawn")
        is_on, answered = context.Event(), context.Value("i", 0)
        flood = context.Process(
            target=_flood, args=(port, is_on, answered), daemon=True
        )
        flood.start()
        is_on.set()
        while not answered.value:
            time.sleep(0.01)
        for _ in range(_ROUNDS):
            is_on.clear()
            time.sleep(_PAUSE_S)
            alone.append(_count(_SECONDS))
            is_on.set()
            time.sleep(_PAUSE_S)
            before = answered.value
            flooded.append(_count(_SECONDS))
            answers.append((answered.value - before) / _SECONDS)
        flood.terminate()
    result = {
        "counts_per_second_alone": round(statistics.median(alone)),
        "counts_per_second_in_a_flood": round(statistics.median(flooded)),
        "pace": round(statistics.median(flooded) / statistics.median(alone), 3),
        "answers_per_second": round(statistics.median(answers), 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
