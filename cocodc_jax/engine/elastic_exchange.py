"""Exchange between elastic regions: host to host, on threads.

Each region is a JAX process that does not see the others' devices. A thread copies its
encoded message, one flat row, to the host once it is computed, passes it to the `Link`,
and waits for the decision which messages are averaged. All rows then go to the outer
device, where the outer mesh's program averages them. The numbers equal those of one
process with all regions.

There are always M rows. A region that is not in the mean has weight 0 and a copy of
another row, so nothing is recompiled when a region dies or comes back. Inner steps
never wait; the merge waits for a late mean, if `Place.late_mean` is "wait". A region
decodes its own message if it came too late for the mean, to keep its progress.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from cocodc_jax.core import sync as core
from cocodc_jax.core.state import UNCOUNTED, VERDICT_OF_ALL, InFlight, PendingMean
from cocodc_jax.core.sync import Extras
from cocodc_jax.elastic.inside import ProcessLink
from cocodc_jax.elastic.messages import NO_EPOCH, Decision, SyncId
from cocodc_jax.elastic.place import Place
from cocodc_jax.engine import transfer
from cocodc_jax.engine.between_hosts import OnOuterMesh
from cocodc_jax.engine.crossing import Sending, Sent, SyncSpec
from cocodc_jax.files import say
from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.sync.robust import VERDICT
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.transforms.compressor import message_bytes

_REMEMBERED = 256  # Syncs whose members are remembered until read.


class ElasticExchange(OnOuterMesh):
    """Programs of the outer mesh, and the threads that carry messages between them."""

    is_alone = True

    def __init__(self, spec: SyncSpec, place: Place):
        super().__init__(spec, "direct")
        self._place = place
        self.goes_on = place.late_mean == "merge"
        # To the other regions; None while programs are compiled ahead.
        self.link: ProcessLink | None = None
        # Regions in the mean of the syncs that arrived; readers pop the entry.
        self.in_mean: dict[SyncId, tuple[int, ...]] = {}

    @property
    def num_regions(self) -> int:
        """Maximum number of regions that send messages, M."""
        return self._place.num_regions

    @property
    def region(self) -> int:
        """Index of this region."""
        return self._place.region

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this region from a verdict on all regions, `[1]`."""
        return verdict[self.region, None]

    def send(self, sending: Sending) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        return core.start(_ElasticCrossing(self, sending))

    def send_row(self, event: Event, buffer: jax.Array, step_s: float) -> Any:
        """Send a row on a thread; return the mean that will arrive.

        `step_s` are measured seconds of an inner step.
        """
        sync_id = event.sync_id
        link = self.link
        if not self._spec.devices.is_real:
            return self._spec.outer_shapes[event.fragment_id]

        def decide() -> tuple[bytes | None, Decision]:
            row = transfer.local_rows(buffer)[0].tobytes()  # Waits for the steps.
            if link is None:
                return row, Decision(NO_EPOCH, sync_id, {self.region: row})
            return row, link.send(sync_id, row, step_s).result()

        return self._in_thread(sync_id, event.rank, decide)

    def awaited(self, sync: SyncId, rank: int = 0) -> PendingMean:
        """Wait for the mean of a sync that this region sent no message for."""
        assert self.link is not None
        future = self.link.expect(sync)
        return self._in_thread(sync, rank, lambda: (None, future.result()))

    def _in_thread(self, sync: SyncId, rank: int, decide: Callable) -> PendingMean:
        """Average on a thread, which waits for `decide() -> (own row, decision)`."""
        future: Future = Future()
        arriving = self.arriving(sync, rank)
        like = self.row_shape(sync[0], rank)

        def carry() -> None:
            try:
                row, decision = decide()
                rows = _sound(sync, decision.rows, like)
                self._note_members(sync, rows)
                future.set_result(
                    self._landed(
                        sync=sync, row=row, rows=rows, arriving=arriving, like=like
                    )
                )
            except BaseException as error:  # The main thread raises it at the merge.
                future.set_exception(error)

        threading.Thread(target=carry, name=f"sync {sync}", daemon=True).start()
        if self.link is None:
            return PendingMean(future)
        return PendingMean(future, self.link.wait_for)

    def _note_members(self, sync: SyncId, rows: Mapping[int, bytes]) -> None:
        """Remember which regions are in a mean, until a reader takes it."""
        self.in_mean[sync] = tuple(sorted(rows))
        while len(self.in_mean) > _REMEMBERED:
            self.in_mean.pop(next(iter(self.in_mean)), None)

    def _landed(
        self,
        sync: SyncId,
        row: bytes | None,
        rows: Mapping[int, bytes],
        arriving: Callable,
        like: jax.ShapeDtypeStruct,
    ) -> InFlight:
        """Average the messages that were decided on; `row` is the region's own."""
        # Of each process; equal in all processes of a region.
        here, host = self.places(sync[0])

        def mean_of(rows: Mapping[int, bytes]) -> tuple[Fragment, dict]:
            table, weights = _table(rows, self.num_regions, like, spare=row)
            arrived = arriving(jax.device_put(table, here), weights)
            return transfer.declare(arrived, host)

        mean, extras = mean_of(rows)
        kept = {VERDICT_OF_ALL: extras[VERDICT]} if extras else {}

        keeps_late = self._place.late_message == "keep"
        if keeps_late and row is not None and rows.get(self.region) != row:
            kept[UNCOUNTED], _ = mean_of({self.region: row})
        return InFlight(mean, kept)

    @property
    def max_row_bytes(self) -> int:
        """Maximum bytes of a row, over all fragments."""
        sync = self._spec.sync
        sizes = [
            message_bytes(sync.message.encoded(part))
            for part in self._spec.outer_shapes
        ]
        return max(sizes) + (8 if sync.robust else 0)

    def arrives_with(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return `{}`: all that arrives with a mean is in its `PendingMean`."""
        return {}


@dataclasses.dataclass(frozen=True)
class _ElasticCrossing:
    """A `core.sync.Crossing` whose message crosses, and arrives, on a thread."""

    exchange: ElasticExchange
    sending: Sending

    def leave(self) -> tuple[tuple[Any, jax.Array], PyTree]:
        return self.exchange.leave(self.sending)

    def cross(self, left: tuple[Any, jax.Array]) -> tuple[Any, Any]:
        copies, buffer = left
        step_s, _ = self.sending.times
        return copies, self.exchange.send_row(self.sending.event, buffer, step_s)

    def arrive(self, crossed: tuple[Any, Any]) -> tuple[Any, Extras]:
        copies, mean = crossed
        return mean, copies


def _sound(sync: SyncId, rows: Mapping[int, bytes], like: Any) -> dict[int, bytes]:
    """Return the rows of the right size.

    All regions have equal rows and expect the same size, so they leave out the same
    senders.
    """
    size = _row_bytes(like)
    for region, row in sorted(rows.items()):
        if len(row) != size:
            say(
                f"the message of region {region} for fragment {sync[0]} at step "
                f"{sync[1]} has {len(row)} bytes, not {size}: it is left out"
            )
    return {region: row for region, row in rows.items() if len(row) == size}


def _row_bytes(like: Any) -> int:
    return like.shape[1] * np.dtype(like.dtype).itemsize


def _table(
    rows: Mapping[int, bytes], num_regions: int, like: Any, spare: bytes | None = None
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Stack the rows `[M, n]` of a mean and their weights; `spare` fills gaps.

    `like` has the shape of one row, `[1, n]`, and its dtype.
    """
    # Every region that had a row is gone: the mean is zero.
    blank = spare or bytes(_row_bytes(like))
    if rows:
        blank = rows[min(rows)]

    all_rows = [rows.get(region, blank) for region in range(num_regions)]
    table = np.stack([np.frombuffer(row, like.dtype) for row in all_rows])
    share = 1 / max(len(rows), 1)
    weights = tuple(share if m in rows else 0.0 for m in range(num_regions))
    return table, weights
