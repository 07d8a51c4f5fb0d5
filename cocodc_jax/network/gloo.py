"""Seconds of gloo's collectives: what JAX's CPU processes do over a network.

XLA runs the exchanges between CPU devices of several processes with gloo over TCP. Its
all-reduce is a ring reduce-scatter, then a ring all-gather, of a vector that is cut
into N segments of at most 1 MiB, the same number S = N / M >= 2 for each of M ranks.
Its all-gather is a ring of messages cut into halves, S = 2. In each phase every rank
takes the steps

    i = 0, 1, ..., (M - 1) S - 1:    wait until segment i - 2 is received and sent, then
                                     report "ready for i" to one neighbour and send i
                                     to the other (the all-gather: send i, then report)

and a segment leaves when its receiver reports that it is ready. So at most two are
under way, and each pair of them takes a round trip besides its bytes. On equal links,
with a delay of a seconds that is longer than half a segment's x, and S even, M > 2
ranks take

    all-reduce    (M - 1) S (2 a + x) + 2 x         a plain ring: 2 (M - 1) (a + S x)

Of two ranks, each is both neighbours of the other, and everything that it sends leaves
through one connection in order: the report "ready" waits behind the segments that were
given to the connection before it. Then the starts matter. If the ranks start at
different times, as regions do that wait for each other's fragments, an all-gather of
two takes half as long again, besides the delays, as if they start together.

Not in the model: TCP, and a line that all connections of a region share. Windows and
pacing make exchanges on new connections up to a fifth longer, lost packets more
(`experiments.probe_network` measures it). A send ends when its first byte leaves,
because the socket's buffer holds a segment; that takes a `net.core.wmem_max` of 1 MiB
or more.

Sources: github.com/pytorch/gloo: gloo/allreduce.cc (ring), gloo/allgather.cc,
gloo/transport/tcp/pair.cc; github.com/openxla/xla,
xla/backends/cpu/collectives/gloo_communicator.cc for the algorithms that XLA chooses.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from cocodc_jax.network.links import LinkState, transfer_s

_MOST_BYTES = 2**20  # Of a segment.
_VALUE_BYTES = 4  # Segments hold whole float32 values.
_HEADER_BYTES = 52  # Of a packet: IPv4, and TCP with timestamps.


def payload_share(mtu_bytes: int) -> float:
    """Return the share of a link's bytes that is left for data.

    Each packet of `mtu_bytes` has 20 bytes of IPv4 header, 20 of TCP and 12 of its
    timestamps. `Link` counts payload, so multiply a wire's rate by this share.

    >>> round(payload_share(1500), 3)
    0.965
    """
    return 1 - _HEADER_BYTES / mtu_bytes


@dataclasses.dataclass(frozen=True)
class Phase:
    """One pass around the ring."""

    # Bytes that each rank sends in each step, float64 `[steps, M]`; for 0 neither a
    # segment nor a report is sent.
    sizes: np.ndarray
    hop: int  # Rank r sends to rank r + hop: 1 or -1.
    sends_first: bool  # Whether a rank sends before it reports that it is ready.


def all_reduce_phases(num_ranks: int, num_bytes: float) -> list[Phase]:
    """Return the two phases of an all-reduce of a `num_bytes` float32 vector."""
    if num_ranks == 1 or num_bytes < 1:
        return []
    most = min(math.ceil(num_bytes / (2 * num_ranks)), _MOST_BYTES)
    segment = _round_up(most, _VALUE_BYTES)
    num = _round_up(max(math.ceil(num_bytes / segment), 2 * num_ranks), num_ranks)
    sizes = np.clip(num_bytes - segment * np.arange(num), 0.0, segment)
    per_rank = num // num_ranks
    gathered = np.arange(num - per_rank)[:, None] + per_rank * np.arange(num_ranks)
    scattered = gathered + per_rank

    return [Phase(sizes[part % num], -1, False) for part in (scattered, gathered)]


def all_gather_phases(num_ranks: int, num_bytes: float) -> list[Phase]:
    """Return the only phase of an all-gather of `num_bytes` of each rank."""
    first = num_bytes // 2
    halves = np.tile([first, num_bytes - first], num_ranks - 1)
    return [Phase(np.repeat(halves[:, None], num_ranks, axis=1), 1, True)]


PHASES = {"gloo": all_reduce_phases, "gloo_gather": all_gather_phases}


def seconds_of(
    state: LinkState, phases: Sequence[Phase], starts_s: Sequence[float]
) -> list[float]:
    """Return when each rank ends a collective, in seconds."""
    clock = list(starts_s)
    outlets = [_Outlet() for _ in starts_s]
    for phase in phases:
        clock = _run(state, phase, clock, outlets)
    return clock


def exchange(
    state: LinkState, name: str, num_bytes: float
) -> tuple[Callable[[Sequence[float]], list[float]], list[float]]:
    """Return a function from starts to ends of each rank, and the bytes each sends."""
    phases = PHASES[name](state.num_regions, num_bytes)
    sent = sum((x.sizes.sum(axis=0) for x in phases), np.zeros(state.num_regions))
    return functools.partial(seconds_of, state, phases), sent.tolist()


@dataclasses.dataclass
class _Outlet:
    """A rank's connection to the neighbour that it sends segments to."""

    free_s: float = -math.inf  # When all that was given to it has left.
    before_s: float = -math.inf  # `free_s` before the last segment was given to it.
    given_s: float = -math.inf  # When the last segment was given to it.

    def report(self, time_s: float) -> float:
        """Return when a report given to it at `time_s` leaves; reports take no time."""
        is_behind = self.given_s <= time_s
        return max(time_s, self.free_s if is_behind else self.before_s)

    def send(self, time_s: float, busy_s: float) -> tuple[float, float]:
        """Take a segment; return when its first byte leaves, and when its last does."""
        begin = max(time_s, self.free_s)
        self.given_s = time_s
        self.before_s = self.free_s
        self.free_s = begin + busy_s
        return begin, self.free_s


def _run(
    state: LinkState, phase: Phase, clock: list[float], outlets: list[_Outlet]
) -> list[float]:
    """Return when each rank ends a phase, from when each starts; uses the outlets."""
    ranks = range(state.num_regions)
    to = [(rank + phase.hop) % len(ranks) for rank in ranks]
    source = [(rank - phase.hop) % len(ranks) for rank in ranks]
    rate = state.bytes_per_s.tolist()
    delay = state.delay_s.tolist()

    # Of the last two segments, the older first: when a rank's own began to leave, and
    # when the neighbour's had arrived.
    begun, came = ([[-math.inf] * len(ranks)] * 2 for _ in range(2))
    for sizes in phase.sizes.tolist():
        clock = list(map(max, clock, begun[0], came[0]))
        now_begun, now_came = ([-math.inf] * len(ranks) for _ in range(2))

        def send(
            rank: int,
            time_s: float,
            size: float,
            now_begun: list[float] = now_begun,
            now_came: list[float] = now_came,
        ) -> None:
            target = to[rank]
            busy_s = transfer_s(size, rate[rank][target])
            begin, end = outlets[rank].send(time_s, busy_s)
            now_begun[rank] = begin
            now_came[target] = end + delay[rank][target]

        # When a rank's report reaches the rank that it receives from. In the order of
        # the clocks, as no report arrives before the clock of its sender.
        reports_s: dict[int, float] = {}
        for rank in sorted(ranks, key=clock.__getitem__):
            has_report = reports_s.get(to[rank], math.inf) < clock[rank]
            if phase.sends_first and has_report and sizes[rank]:
                send(rank, clock[rank], sizes[rank])
            report_s = clock[rank]
            if to[rank] == source[rank]:  # One of two ranks: the same connection.
                report_s = outlets[rank].report(report_s)
            reports_s[rank] = report_s + delay[rank][source[rank]]

        for rank in ranks:
            if sizes[rank] and now_begun[rank] == -math.inf:
                send(rank, max(clock[rank], reports_s[to[rank]]), sizes[rank])

        begun = [begun[1], now_begun]
        came = [came[1], now_came]

    return list(map(max, clock, *begun, *came))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
