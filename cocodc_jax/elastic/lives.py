"""Lives: which start of a region is the newer one.

A region may run twice: a scheduler moves it while its old machine is frozen, or two
people start it. Every start is a *life* with a number, its boot, and of two lives the
one with the higher number is newer. The number is

    the time of the start, in units of 2^20 ns (a millisecond) | 19 random bits

so lives of machines whose clocks agree are in the order of their starts, and no two are
equal. Clocks may differ. So a region that has just started asks the others which lives
of its own region they know, and takes a number above them (`above`) before it says its
first word. Only a process that was held up, or has spoken already, does not: it cannot
know whether it is the older one. If it has no seat yet, it ends for a newer life only
when a dead one would be forgotten.

A region that returns in its process, as after a cut, is no new start: its number grows
by 1 (`returned`), and it stays below that of any other start since.
"""

import secrets
import time

_START_BITS = 20  # Below them is the time.
_RANDOM_BITS = 19  # The rest are for returns in one process.


def new_boot() -> int:
    """Return the number of a life that starts now."""
    start = time.time_ns() >> _START_BITS << _START_BITS
    return start + secrets.randbelow(1 << _RANDOM_BITS)


def returned(boot: int) -> int:
    """Return the number of a life that returns in the process of life `boot`.

    >>> returned(5)
    6
    """
    return boot + 1


def above(known: int, boot: int) -> int:
    """Return a number above life `known` and its returns, for a life of number `boot`.

    >>> above(3 << 20, 7) == (4 << 20) + 7
    True
    """
    random = boot & ((1 << _RANDOM_BITS) - 1)
    return (((known >> _START_BITS) + 1) << _START_BITS) + random
