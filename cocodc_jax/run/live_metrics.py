"""Prometheus metrics of a process: the loop's hooks write them, scrapes read them.

Nothing waits for a device. Units are in the names, as is Prometheus's convention.
"""

import collections
import contextlib
import socketserver
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from cocodc_jax._extras import extra
from cocodc_jax.chips import mfu
from cocodc_jax.train.hooks import Clock

GAUGE = "gauge"
COUNTER = "counter"
# Kinds of `network.faults.Finding`, whose counters start at 0: the rate of a counter
# that appears with its first fault would miss that fault.
_FAULTS = (
    "gone",
    "link",
    "network",
    "partition",
    "receiver",
    "region",
    "sender",
    "silent",
    "slow",
)
_TURNS = 256  # Their median is the time of an undisturbed step.


class Metric(NamedTuple):
    """One of `METRICS`, by the name that it is exposed as."""

    name: str
    kind: str  # Counters start anew with a process.
    help: str
    labels: tuple[str, ...] = ()  # Besides those of the process.


METRICS = (
    Metric("cocodc_step", GAUGE, "Inner steps done whose losses were read."),
    Metric("cocodc_planned_steps", GAUGE, "Inner steps of the full run."),
    Metric("cocodc_loss", GAUGE, "Mean training loss of these regions, in nats."),
    Metric("cocodc_eval_loss", GAUGE, "Held-out loss of the mean model, in nats."),
    Metric("cocodc_tokens_per_second", GAUGE, "Of all regions of this job, last turn."),
    Metric("cocodc_mfu_ratio", GAUGE, "Model FLOPs over the devices' peak."),
    Metric(
        "cocodc_goodput_ratio",
        GAUGE,
        "Share of the time since the run began that undisturbed steps would take.",
    ),
    Metric("cocodc_fragments_in_flight", GAUGE, "Fragments on their way."),
    Metric("cocodc_members", GAUGE, "Regions that take part now."),
    Metric(
        "cocodc_fault",
        GAUGE,
        "1 for each fault of a region or link while it is named.",
        ("kind", "where"),
    ),
    Metric(
        "cocodc_checkpoint_step", GAUGE, "Step of the newest checkpoint that was begun."
    ),
    Metric(
        "cocodc_checkpoint_timestamp_seconds",
        GAUGE,
        "Unix time at which this process began its newest checkpoint.",
    ),
    Metric(
        "cocodc_progress_timestamp_seconds",
        GAUGE,
        "Unix time at which the last losses were read.",
    ),
    Metric("cocodc_stall_seconds_total", COUNTER, "Time spent waiting for means."),
    Metric("cocodc_sent_bytes_total", COUNTER, "Sent by one region, of the full run."),
    Metric(
        "cocodc_syncs_total",
        COUNTER,
        "Syncs by outcome: applied; of those, late (after their slot) and missed "
        "(without this region's message).",
        ("outcome",),
    ),
    Metric("cocodc_faults_total", COUNTER, "Faults that were named.", ("kind",)),
    Metric("cocodc_loss_spikes_total", COUNTER, "Loss spikes of these regions."),
)

Values = dict[str, dict[tuple[str, ...], float | None]]


class LiveMetrics:
    """The numbers behind `METRICS` of one process."""

    def __init__(
        self,
        planned_steps: int,
        tokens_at: Callable[[int], int],
        num_regions: int | None,
        peak_tokens_per_second: float | None = None,
        now: Callable[[], float] = time.time,
    ):
        # Returns how many regions take part, None if that is not known.
        self.members: Callable[[], int | None] = lambda: num_regions
        self._now = now
        self._tokens_at = tokens_at
        self._peak = peak_tokens_per_second
        self._lock = threading.Lock()

        self._step = 0
        self._began = (0, now())
        self._stall_s = 0.0
        self._step_s: collections.deque[float] = collections.deque(maxlen=_TURNS)
        self._values: Values = {
            "cocodc_planned_steps": {(): planned_steps},
            "cocodc_stall_seconds_total": {(): 0.0},
            "cocodc_loss_spikes_total": {(): 0},
            "cocodc_syncs_total": {(x,): 0 for x in ("applied", "late", "missed")},
            "cocodc_fault": {},
            "cocodc_faults_total": {(x,): 0 for x in _FAULTS},
        }

    def put(self, name: str, value: float | None) -> None:
        """Set a metric without further labels."""
        with self._lock:
            self._values[name] = {(): value}

    def count(self, name: str, *labels: str) -> None:
        """Add 1 to a counter."""
        with self._lock:
            counts = self._values[name]
            counts[labels] = (counts.get(labels) or 0) + 1

    def begin(
        self, step: int, began: tuple[int, float], saved_step: int | None
    ) -> None:
        """Note where training starts, and the run began: at a step and a time."""
        self._step = step
        self._began = began
        self._stall_s = 0.0
        self.put("cocodc_step", step)
        self.put("cocodc_checkpoint_step", saved_step)
        self.put("cocodc_stall_seconds_total", 0.0)

    def turn(self, clock: Clock) -> None:
        """Set the metrics of a turn from the loop's clock."""
        tokens = self._tokens_at(clock.step) - self._tokens_at(self._step)
        with self._lock:
            if tokens and clock.step > self._step:
                seconds = tokens / clock.tokens_per_second
                seconds -= clock.stall_s - self._stall_s
                self._step_s.append(max(seconds, 0.0) / (clock.step - self._step))

            self._step = clock.step
            self._stall_s = clock.stall_s
            self._values |= {
                "cocodc_step": {(): clock.step},
                "cocodc_loss": {(): clock.loss},
                "cocodc_tokens_per_second": {(): clock.tokens_per_second},
                "cocodc_mfu_ratio": {(): mfu(clock.tokens_per_second, self._peak)},
                "cocodc_fragments_in_flight": {(): clock.in_flight},
                "cocodc_progress_timestamp_seconds": {(): self._now()},
                "cocodc_sent_bytes_total": {(): clock.bytes_sent},
                "cocodc_stall_seconds_total": {(): clock.stall_s},
            }

    def saving(self) -> None:
        """Note that a checkpoint of the current step begins."""
        self.put("cocodc_checkpoint_step", self._step)
        self.put("cocodc_checkpoint_timestamp_seconds", self._now())

    def fault(self, kind: str, where: str, is_on: bool) -> None:
        """Note that a fault began or ended."""
        if is_on:
            self.count("cocodc_faults_total", kind)
        with self._lock:
            faults = self._values["cocodc_fault"]
            faults.pop((kind, where), None)
            if is_on:
                faults[kind, where] = 1.0

    def values(self) -> Values:
        """Return all values that are known, by name and then by further labels."""
        members = self.members()
        with self._lock:
            return {name: dict(of) for name, of in self._values.items()} | {
                "cocodc_goodput_ratio": {(): self._goodput()},
                "cocodc_members": {(): members},
            }

    def _goodput(self) -> float | None:
        """Return `timeline.goodput` of this process's turns."""
        began_step, began_s = self._began
        steps = self._step - began_step
        seconds = self._now() - began_s
        if not self._step_s or seconds <= 0:
            return None
        return min(steps * statistics.median(self._step_s) / seconds, 1.0)


_TIMEOUT_S = 5.0
_POLL_S = 0.1  # How soon it ends.
# After a request the server rests for a multiple of the processor time that the request
# took, and at least for a fixed time. So requests take at most a twentieth of the time
# of Python's threads, whatever is sent.
_REST = 19
_LEAST_REST_S = 0.01
_MOST_REST_S = 2.0


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 16

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request, then rest."""
        begin_s = time.thread_time()
        try:
            super().process_request(request, client_address)
        finally:
            rest_s = _REST * (time.thread_time() - begin_s)
            time.sleep(min(max(rest_s, _LEAST_REST_S), _MOST_REST_S))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client went away, or took too long."""


@contextlib.contextmanager
def serving(
    port: int, live: LiveMetrics, labels: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """Serve the metrics on all addresses of this machine.

    It serves one connection at a time, for a few seconds at most. Other connections
    wait in the system's queue and take no file descriptors. Between two connections the
    server rests. So a flood of requests can delay scrapes, but not the training.
    """
    with extra("monitoring"):
        from prometheus_client import CollectorRegistry, MetricsHandler, core

    registry = CollectorRegistry(auto_describe=False)
    families = {COUNTER: core.CounterMetricFamily, GAUGE: core.GaugeMetricFamily}

    class Collector:
        def collect(self) -> Iterator[Any]:
            """Yield the families of all metrics, as they are when they are scraped."""
            values = live.values()
            for metric in METRICS:
                names = [*labels, *metric.labels]
                family = families[metric.kind](metric.name, metric.help, labels=names)
                for further_labels, value in values.get(metric.name, {}).items():
                    if value is not None:
                        family.add_metric([*labels.values(), *further_labels], value)
                yield family

    registry.register(Collector())  # pyright: ignore[reportArgumentType]
    handler: Any = MetricsHandler.factory(registry)
    handler.timeout = _TIMEOUT_S
    try:
        server = _Server(("", port), handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is none"
        raise OSError(
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
            threading.Thread(target=server.shutdown, daemon=True).start()
            thread.join(_TIMEOUT_S)  # A slow client holds neither up.
