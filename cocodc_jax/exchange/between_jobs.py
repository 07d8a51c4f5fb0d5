"""The exchange between regions that are jobs of their own: host to host, by threads.

Each region is a JAX process that knows no other one's devices. Its message is encoded
by the program of the outer mesh, into one flat row; a thread copies it to the host when
it is made, gives it to the `Link`, and waits for the decision of which messages the
mean is. All rows then go to the outer device, where the program that takes the mean is
that of the outer mesh as well: one process with all regions has the same numbers.

There are always M rows. Who is not in the mean has a weight of 0 and somebody else's
row, so nothing is compiled when a region dies or comes back. Inner steps never wait:
the main thread does, at the merge, for a mean that is late, if `Place.late_mean` says
so. A message that came too late for its mean is decoded where it came from, so that the
region's work can be kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from cocodc_jax.core.pending_mean import MeanResult, PendingMean
from cocodc_jax.core.state import RegionState
from cocodc_jax.elastic.inside import Listener, Speaker
from cocodc_jax.elastic.link import Link
from cocodc_jax.elastic.messages import Decision, SyncId
from cocodc_jax.elastic.place import Place
from cocodc_jax.exchange.base import Exchange, Times
from cocodc_jax.exchange.between_hosts import OnOuterMesh
from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding import transfer
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.robust import VERDICT
from cocodc_jax.sync.schedules.base import Event

PyTree = Any

_REMEMBERED = 256  # Syncs of which is known who was in the mean, if nobody asks.


class BetweenJobs(Exchange):
    """The programs of the outer mesh, and the threads between them.

    Attributes:
      link: to the other regions; None while this one rehearses, alone.
      in_mean: regions in the mean of the syncs that arrived, by sync; whoever reads an
        entry takes it away.
    """

    def __init__(self, spec: SyncSpec, place: Place):
        """Compile nothing yet."""
        self._spec, self._place = spec, place
        self.goes_on = place.late_mean == "merge"
        self._programs = OnOuterMesh(spec, "direct", is_alone=True)
        self.link: Link | Speaker | Listener | None = None
        self.in_mean: dict[SyncId, tuple[int, ...]] = {}

    @property
    def num_regions(self) -> int:
        """Regions whose messages there are at most, M."""
        return self._place.num_regions

    @property
    def region(self) -> int:
        """Which of them this is."""
        return self._place.region

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Return of a verdict on all regions that on this one, `[1]`."""
        return verdict[self.region, None]

    def send(
        self,
        event: Event,
        weights: tuple[float, ...],
        times: Times,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Fragment | None, PendingMean, dict[str, jax.Array], PyTree]:
        """Send a fragment; see `Exchange.send`."""
        staged, buffer, state, arriving = self._programs.encoded(
            event, weights, times, region, stale_params, compressor_state
        )
        sync, link = event.sync_id, self.link

        def decide() -> tuple[bytes | None, Decision]:
            row = transfer.local_rows(buffer)[0].tobytes()  # Waits for the steps.
            if link is None:
                return row, Decision(0, sync, {self.region: row})
            return row, link.send(sync, row, times[0]).result()

        mean = self._in_thread(sync, decide, arriving, buffer)
        return staged, mean, {}, state

    def list_programs(
        self,
        fragment_id: int,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Callable, tuple]:
        """Return the program that encodes a fragment; see `Exchange.listed`."""
        return self._programs.list_programs(
            fragment_id, region, stale_params, compressor_state
        )

    def _in_thread(
        self, sync: SyncId, decide: Callable, arriving: Callable, like: Any
    ) -> PendingMean:
        """Have a thread wait for `decide() -> (own row, decision)`; take the mean."""
        future: Future = Future()

        def carry() -> None:
            try:
                row, decision = decide()
                self.in_mean[sync] = tuple(sorted(decision.rows))
                while len(self.in_mean) > _REMEMBERED:
                    self.in_mean.pop(next(iter(self.in_mean)), None)
                future.set_result(
                    self._landed(sync, row, decision.rows, arriving, like)
                )
            except BaseException as error:  # It is the main thread's at the merge.
                future.set_exception(error)

        threading.Thread(target=carry, name=f"sync {sync}", daemon=True).start()
        return PendingMean(future)

    def _landed(
        self,
        sync: SyncId,
        own: bytes | None,
        rows: Mapping[int, bytes],
        arriving: Callable,
        like: Any,
    ) -> MeanResult:
        """Take the mean of what was decided."""
        # Of each process; the same in all of a region.
        here, host = self._programs.places(sync[0])

        def mean_of(rows: Mapping[int, bytes]) -> tuple[Fragment, dict]:
            table, weights = _table(
                rows, self.num_regions, like.shape[1], like.dtype, own
            )
            mean, _, told = arriving(jax.device_put(table, here), weights)
            return transfer.declare((mean, told), host)

        mean, told = mean_of(rows)
        uncounted = None
        keeps = self._place.late_message == "keep"
        if keeps and own is not None and rows.get(self.region) != own:
            uncounted, _ = mean_of({self.region: own})
        return MeanResult(mean, uncounted, told.get(VERDICT))

    def awaited(self, sync: SyncId, rank: int = 0) -> PendingMean:
        """Wait for the mean of a sync that this region has sent nothing for."""
        assert self.link is not None
        future = self.link.expect(sync)
        arriving, like = self._programs.arriving(sync, rank)
        return self._in_thread(sync, lambda: (None, future.result()), arriving, like)

    @property
    def max_row_bytes(self) -> int:
        """The most bytes that a row has, of any fragment."""
        sync = self._spec.sync
        length = 8 if sync.robust else 0
        return length + max(
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
            for shapes in map(sync.message.encoded, self._spec.outer_shapes)
        )

    def abstract_mean(self, fragment_id: int, part: Fragment) -> Fragment:
        """Return shapes and shardings of a mean on its way; `part` the outer one's."""
        return self._programs.abstract_mean(fragment_id, part)

    def abstract_told(self, fragment_id: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return `{}`: what is told comes with the mean, as `MeanResult`."""
        del fragment_id
        return {}


def _table(
    rows: Mapping[int, bytes],
    num_regions: int,
    width: int,
    dtype: Any,
    spare: bytes | None = None,
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Lay out the rows of those in a mean, `[M, n]`, and their weights.

    `spare` is a row that can be decoded, for where there is none.
    """
    size = width * np.dtype(dtype).itemsize
    for region, row in rows.items():
        if len(row) != size:
            raise ValueError(
                f"the message of region {region} has {len(row)} bytes, not {size}"
            )
    # Of nobody: every region that had it is gone, and the mean is zero.
    blank = rows[min(rows)] if rows else spare or bytes(size)
    table = np.stack(
        [np.frombuffer(rows.get(r, blank), dtype) for r in range(num_regions)]
    )
    share = 1 / max(len(rows), 1)
    return table, tuple(share if r in rows else 0.0 for r in range(num_regions))
