"""Prometheus metrics of one process over HTTP (`pip install cocodc_jax[monitoring]`).

One connection is served at a time, each for a few seconds at most: further ones wait in
the system's queue and take no file descriptors, so a flood can hold up scrapes and not
the training.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from cocodc_jax._extras import extra
from cocodc_jax.run.live_metrics import COUNTER, METRICS, LiveMetrics

_TIMEOUT_S = 5.0
_POLL_S = 0.1  # How soon it ends.


class PortError(OSError):
    """The port of the metrics cannot be listened at."""


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client went away, or took too long."""


class _Collector:
    """Reads `LiveMetrics` whenever they are scraped."""

    def __init__(self, live: LiveMetrics, labels: Mapping[str, str]):
        self._live, self._labels = live, labels

    def collect(self) -> Iterator[Any]:
        """Yield the families of all metrics."""
        from prometheus_client import core

        families = {COUNTER: core.CounterMetricFamily}
        values = self._live.values()
        for metric in METRICS:
            make = families.get(metric.kind, core.GaugeMetricFamily)
            names = (*self._labels, *metric.labels)
            family = make(metric.name, metric.help, labels=names)
            for labels, value in values.get(metric.name, {}).items():
                if value is not None:
                    family.add_metric([*self._labels.values(), *labels], value)
            yield family


@contextlib.contextmanager
def serving(
    port: int, live: LiveMetrics, labels: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """Serve the metrics on all addresses of this machine.

    Raises:
      PortError: if the port is taken, or not for this user.
      MissingExtraError: if the package is not installed.
    """
    with extra("monitoring"):
        from prometheus_client import CollectorRegistry, MetricsHandler
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(live, labels))  # pyright: ignore[reportArgumentType]
    handler: Any = MetricsHandler.factory(registry)
    handler.timeout = _TIMEOUT_S
    try:
        server = _Server(("", port), handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is none"
        raise PortError(
            f"metrics_port: this process cannot listen on port {port}: {reason}; name "
            "a free one (each process takes its own, from --metrics_port on)"
        ) from error
    with server:
        thread = threading.Thread(
            target=server.serve_forever, args=(_POLL_S,), daemon=True
        )
        thread.start()
        try:
            yield server.server_address[:2]  # pyright: ignore[reportReturnType]
        finally:
            server.shutdown()
            thread.join()
