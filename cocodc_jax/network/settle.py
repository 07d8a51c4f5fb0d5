"""What a collective takes where it is done again and again."""

import math
import statistics
from collections.abc import Callable, Sequence

from cocodc_jax.network.links import LinkState

_REPEATS = 10  # at most, until the staggering is the same as before
_SETTLING = 4  # of them, which do not count

# When each rank is done, of when each begins.
Exchange = Callable[[Sequence[float]], list[float]]


def settled_s(state: LinkState, exchange: Exchange) -> float:
    """Return the seconds that ranks wait for a collective that they do repeatedly.

    Each begins as long after its own end as the others do after theirs, as regions do
    that wait for each other's fragments. At first each begins the longest delay there
    and back after the rank before. It is the mean over ranks, who in the long run wait
    equally, and over repeats where there is no end to the change.
    """
    late_s = 2 * float(state.delay_s.max())
    starts = [late_s * rank for rank in range(state.num_regions)]
    taken: list[float] = []
    for _ in range(_REPEATS):
        ends = exchange(starts)
        taken.append((sum(ends) - sum(starts)) / len(starts))
        if math.isinf(taken[-1]):
            return taken[-1]
        before, starts = starts, [end - min(ends) for end in ends]
        if all(map(math.isclose, starts, before)):
            return taken[-1]
    return statistics.fmean(taken[_SETTLING:])
