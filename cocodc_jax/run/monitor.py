"""Monitoring of a run: Prometheus metrics, and a command that runs on events."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from cocodc_jax._extras import check_installed
from cocodc_jax.network.faults import Finding
from cocodc_jax.run.live_metrics import LiveMetrics, serving
from cocodc_jax.sync.robust import NOT_FINITE
from cocodc_jax.train.finite import NonFiniteLossError
from cocodc_jax.train.hooks import Clock, Hooks

TIMEOUT_S = 60.0
_WAITING = 32
# Of a run that was asked to stop, whose machine may be taken away soon.
_STOPPED_S = 5.0


class Event(NamedTuple):
    """An event for an operator, of a step and a region if it has one."""

    name: str  # One of `EVENTS`.
    message: str  # A line.
    step: int | None = None  # Inner steps done.
    region: int | None = None


EVENTS = (
    "fault",
    "fault_ended",
    "region_lost",
    "region_returned",
    "loss_spike",
    "non_finite",
    "finished",
    "stopped",
    "failed",
)


@contextlib.contextmanager
def running(
    command: str, workdir: str, timeout_s: float = TIMEOUT_S
) -> Iterator[Callable[[Event], None]]:
    """Run a command for each event, one at a time and in order.

    A command that takes too long is killed, with its children. Events that arrive while
    too many wait are dropped. At its end the context waits for commands, for twice the
    limit of one, or for `_STOPPED_S` if the run was asked to stop. Standard error
    reports what was killed or dropped.
    """
    waiting: queue.Queue[Event | None] = queue.Queue(_WAITING)
    patience_s = 2 * timeout_s

    def hand_over(event: Event) -> None:
        nonlocal patience_s
        if event.name == "stopped":
            patience_s = _STOPPED_S
        try:
            waiting.put_nowait(event)
        except queue.Full:
            _say(f"{_WAITING} events wait; {event.name} is dropped ({event.message})")

    def run_all() -> None:
        while (event := waiting.get()) is not None:
            try:
                _run(command, workdir, timeout_s, event)
            except Exception as error:  # Whatever it is: the run goes on.
                _say(f"{event.name}: {error}")

    thread = threading.Thread(target=run_all, daemon=True)
    thread.start()
    try:
        yield hand_over
    finally:
        end = time.monotonic() + patience_s
        with contextlib.suppress(queue.Full):
            waiting.put(None, timeout=patience_s / 2)
        thread.join(max(end - time.monotonic(), 0))
        if thread.is_alive():
            _say("commands still run or wait; the program ends without them")


def _run(command: str, workdir: str, timeout_s: float, event: Event) -> None:
    about = event._asdict() | {"workdir": workdir, "time": time.time()}
    about["event"] = about.pop("name")

    environment = {
        f"COCODC_{name.upper()}": "" if about[name] is None else str(about[name])
        for name in ("event", "step", "region", "message", "workdir")
    }

    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            shell=True,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # So that all of it can be killed.
        )
        try:
            process.communicate(json.dumps(about).encode(), timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _say(f"{event.name}: killed after {timeout_s:g} s")
            return

        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            end = f" ({lines[-1][:200]})" if lines else ""
            _say(f"{event.name}: exit code {process.returncode}{end}")


def _ignore(event: Event) -> None:
    """Run no command."""


def _say(line: str) -> None:
    print(f"warning: --on_event: {line}", file=sys.stderr, flush=True)


class Monitor:
    """Passes a process's events to its metrics and to the command."""

    def __init__(
        self,
        live: LiveMetrics,
        notify: Callable[[Event], None],
        own_region: int | None = None,
        delay_steps: int | None = None,
    ):
        self.live = live
        self._notify = notify
        self._own_region = own_region
        self._delay_steps = delay_steps
        self._step = 0
        self._not_finite: set[int] = set()

    def extend(
        self, hooks: Hooks, step: int, began: tuple[int, float], saved_step: int | None
    ) -> Hooks:
        """Return a loop's hooks, extended by those of the metrics."""
        self._step = step
        self.live.begin(step, began, saved_step)

        def watch_record(record: dict[str, Any]) -> None:
            hooks.record(record)
            self._record(record)

        def watch_clock(clock: Clock) -> None:
            hooks.clock(clock)
            self._step = clock.step
            self.live.turn(clock)

        def watch_snapshot(progress: dict[str, Any]) -> dict[str, Any]:
            self.live.saving()
            return hooks.snapshot(progress)

        return dataclasses.replace(
            hooks, record=watch_record, clock=watch_clock, snapshot=watch_snapshot
        )

    def notify(
        self,
        name: str,
        message: str,
        step: int | None = None,
        region: int | None = None,
    ) -> None:
        """Pass on an event, by default of the current step and of this job's region."""
        step = self._step if step is None else step
        region = region if self._own_region is None else self._own_region
        self._notify(Event(name, message, step, region))

    def ended(self, step: int, planned_steps: int, eval_loss: float | None) -> None:
        """Note that the loop ended, at its last step or by a request to stop."""
        self._step = step
        loss = "" if eval_loss is None else f", eval_loss {eval_loss:.4f}"
        if step == planned_steps:
            self.notify("finished", f"finished at step {step}{loss}")
        else:
            self.notify("stopped", f"asked to stop: at step {step} of {planned_steps}")

    def fault(self, is_on: bool, finding: Finding, message: str) -> None:
        """Note that a fault began or ended."""
        where = "-".join(map(str, finding.where))
        self.live.fault(finding.kind, where, is_on)

        if finding.kind == "gone":
            name = "region_lost" if is_on else "region_returned"
            if not is_on:
                message = f"region {where} takes part again"
        else:
            name = "fault" if is_on else "fault_ended"
            if not is_on:
                message = f"no longer: {message}"
        region = finding.where[0] if len(finding.where) == 1 else None
        self._notify(Event(name, message, self._step, region))

    def merged(self, own_counts: bool) -> None:
        """Note whether this region's message was in a mean."""
        if not own_counts:
            self.live.count("cocodc_syncs_total", "missed")

    def _record(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "eval":
            self.live.put("cocodc_eval_loss", record["eval_loss"])
        elif kind == "spike":
            self.live.count("cocodc_loss_spikes_total")
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.4g}"
            text = f"loss {loss}, usually {record['usual']:.4g}"
            self.notify("loss_spike", text, record["step"], record["region"])
        elif kind == "sync":
            self.live.count("cocodc_syncs_total", "applied")
            age = record["apply_step"] - record["start_step"]
            if self._delay_steps is not None and age > self._delay_steps:
                self.live.count("cocodc_syncs_total", "late")

            # Regions whose message was not finite, until one of theirs is.
            verdict = record.get("left_out", ())
            now = {region for region, why in enumerate(verdict) if why == NOT_FINITE}
            for region in sorted(now - self._not_finite):
                text = f"the message of region {region} is not finite, and is left out"
                self._notify(Event("non_finite", text, record["step"], region))
            self._not_finite = now


MAX_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Monitoring:
    """Flags of a run that is watched from outside.

    Attributes:
      metrics_port: where process 0 serves Prometheus metrics, on all addresses of its
        machine; process N of region R, of so many processes each, has metrics_port + R
        * processes + N, with R 0 unless regions are elastic. 0 serves none.
      on_event: shell command that is run on faults, lost and returned regions, loss
        spikes, numbers that are not finite, and the end of the run; it gets the event
        as JSON on standard input, and in COCODC_EVENT, COCODC_STEP, COCODC_REGION,
        COCODC_MESSAGE and COCODC_WORKDIR. Empty runs none.
    """

    metrics_port: int = 0
    on_event: str = ""

    def __post_init__(self):
        if not 0 <= self.metrics_port <= MAX_PORT:
            raise ValueError(
                f"metrics_port={self.metrics_port} must be a port, at most {MAX_PORT}, "
                "or 0 to serve no metrics"
            )

    def check(self) -> None:
        """Refuse metrics if the package that serves them is missing."""
        if self.metrics_port:
            flag = f"metrics_port={self.metrics_port}"
            check_installed("prometheus_client", "monitoring", flag)

    @contextlib.contextmanager
    def watching(
        self,
        live: LiveMetrics,
        workdir: str,
        regions: Sequence[int],
        own_region: int | None,
        delay_steps: int | None,
    ) -> Iterator[Monitor]:
        """Monitor a run; an exception that ends it is an event."""
        place = (own_region or 0) * jax.process_count() + jax.process_index()
        labels = {
            "region": ",".join(map(str, regions)),
            "process": str(jax.process_index()),
        }
        with contextlib.ExitStack() as stack:
            if self.metrics_port:
                port = self.metrics_port + place
                host, port = stack.enter_context(serving(port, live, labels))
                print(f"metrics at http://{host}:{port}/metrics", file=sys.stderr)
            notify = _ignore
            if self.on_event:
                notify = stack.enter_context(running(self.on_event, workdir))

            monitor = Monitor(live, notify, own_region, delay_steps)
            try:
                yield monitor
            except NonFiniteLossError as error:
                monitor.notify("non_finite", str(error), error.step, error.region)
                raise
            except Exception as error:
                monitor.notify("failed", str(error))
                raise


NO_MONITORING = Monitoring()
