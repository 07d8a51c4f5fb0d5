"""Goodput: the share of their time in which regions do steps that count.

Steps that are done again, or lost with a region, do not count. If each region fails at
the rate 1/F (F the mean time between failures, exponential), and progress is kept every
s seconds (by a sync for a region alone, by a checkpoint for all), the share is

    g = s / ((e^{rate s} - 1) (1 / rate + R))

with R the mean time until training goes on. A stretch of s seconds without a failure is
tried until it succeeds: e^{rate s} - 1 times the mean time of one failure and repair.

- Together, as one job: a failure of any of M regions ends all, and they go on from the
  last checkpoint, so rate = M / F. Daly (2006) has the same formula with failures
  during a restart, from memory.
- Alone, each region a separate job: rate = 1 / F, s is the time between syncs, and the
  others go on. A quorum above one region makes the remaining regions wait. If only time
  is lost, with availability a = F / (F + R) and quorum q,

      g = sum_{k >= q} (k / M) C(M, k) a^k (1 - a)^(M - k)

  There is no formula for lost progress; `simulated` draws it.
- Alone, if the others wait w seconds at a mean before they go on without a missing
  region: until it has been silent for `dead_after_s`, or is back in another life. No
  region takes a step meanwhile. So of the *steps* of a run a region misses those of
  R - w seconds in F + R - w, and of the *time* all regions lose w at each of the
  M / (F + R) failures a second:

      g_steps = F / (F + R - w),    g_time = g_steps (1 - M w / (F + R))

  Both ignore lost progress, and are equal without a wait.
"""

import dataclasses
import heapq
import math

import numpy as np

from cocodc_jax.network.links import check


@dataclasses.dataclass(frozen=True)
class Failures:
    """How regions fail and come back."""

    between_s: float  # F, mean seconds that a region trains before it fails.
    repair_s: float  # R, mean seconds until it trains again, time to join included.

    def __post_init__(self):
        between_s = self.between_s
        repair_s = self.repair_s
        check(0 < between_s < math.inf, "between_s", between_s, "positive and finite")
        check(0 <= repair_s < math.inf, "repair_s", repair_s, "finite and not negative")


def kept_share(rate: float, repair_s: float, kept_s: float) -> float:
    """Return the share of time whose progress is kept, g of the module.

    >>> round(kept_share(1 / 90, 10, 0), 6)
    0.9
    """
    if kept_s == 0:
        return 1 / (1 + rate * repair_s)
    tries = math.expm1(min(rate * kept_s, 700))
    return kept_s / (tries * (1 / rate + repair_s))


def together(failures: Failures, num_regions: int, checkpoint_s: float) -> float:
    """Return the goodput if any region's failure stops all."""
    rate = num_regions / failures.between_s
    return kept_share(rate, failures.repair_s, checkpoint_s)


def alone(failures: Failures, sync_s: float) -> float:
    """Return the goodput if the others go on, however few."""
    return kept_share(1 / failures.between_s, failures.repair_s, sync_s)


def of_steps(failures: Failures, wait_s: float) -> float:
    """Return the share of a run's steps that a region does, g_steps of the module.

    Args:
      failures: of a region.
      wait_s: w, mean seconds of a failure for which all regions wait, at most R.

    >>> of_steps(Failures(90, 10), wait_s=0), of_steps(Failures(90, 10), wait_s=10)
    (0.9, 1.0)
    """
    rule = f"between 0 and repair_s={failures.repair_s}"
    check(0 <= wait_s <= failures.repair_s, "wait_s", wait_s, rule)
    return failures.between_s / (failures.between_s + failures.repair_s - wait_s)


def of_time(failures: Failures, num_regions: int, wait_s: float) -> float:
    """Return the share of their time in which regions train, g_time of the module.

    It is 0 if the waits of all regions fill the time. `wait_s` is as for `of_steps`.

    >>> of_time(Failures(90, 10), num_regions=4, wait_s=0)
    0.9
    >>> of_time(Failures(90, 10), num_regions=4, wait_s=10)
    0.6
    """
    waiting = num_regions * wait_s / (failures.between_s + failures.repair_s)
    return of_steps(failures, wait_s) * max(0.0, 1 - waiting)


def simulated(
    failures: Failures,
    num_regions: int,
    quorum: int,
    sync_s: float,
    seconds: float,
    seed: int = 0,
) -> float:
    """Draw failures, and return the goodput if regions go on only with a quorum.

    Times between failures and repairs are exponential. A region that waits makes and
    loses no progress, but can fail. It keeps its progress every `sync_s` seconds.
    """
    rule = f"between 1 and the number of regions, {num_regions}"
    check(1 <= quorum <= num_regions, "quorum", quorum, rule)
    rng = np.random.default_rng(seed)
    is_there = np.ones(num_regions, bool)
    worked_s = np.zeros(num_regions)
    events = [(rng.exponential(failures.between_s), m) for m in range(num_regions)]
    heapq.heapify(events)

    now_s = 0.0
    kept_s = 0.0
    while now_s < seconds:
        event_s, m = heapq.heappop(events)
        until_s = min(event_s, seconds)
        if is_there.sum() >= quorum:
            worked_s += (until_s - now_s) * is_there
        now_s = until_s
        if now_s == seconds:
            break

        # Region m fails, or comes back.
        if is_there[m]:
            kept_s += _kept(float(worked_s[m]), sync_s)
            worked_s[m] = 0.0
        mean_s = failures.repair_s if is_there[m] else failures.between_s
        is_there[m] = not is_there[m]
        heapq.heappush(events, (now_s + rng.exponential(mean_s), m))

    kept_s += sum(_kept(work, sync_s) for work in worked_s.tolist())
    return kept_s / (num_regions * seconds)


def _kept(worked_s: float, sync_s: float) -> float:
    return worked_s // sync_s * sync_s if sync_s else worked_s
