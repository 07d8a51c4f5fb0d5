"""Host memory that programs on the CPU are given again, not anew.

XLA's CPU backend allocates a program's temporaries at every call and frees them after
it. glibc takes pieces so large from the kernel and hands them back, so that each call
touches new pages, which the kernel must find and clear: a third of a second for every
scan of a small transformer in four regions, whatever its length. Kept by the process,
the pages of the call before serve the next. The price is memory that stays with the
process, about three times what it had, since pieces of many sizes come and go.
"""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT_BYTES = 2**31 - 1  # An int's largest; what is free at the end beyond goes back.


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees; call before JAX starts.

    Only the first arena can hold pieces of any size, and a thread stays with the arena
    that it began with: so there is one for all threads that begin after this.

    Returns:
      Whether the C library does so: glibc, unless the environment tells it what to do
      (`GLIBC_TUNABLES`, `MALLOC_...`).
    """
    if any(x == "GLIBC_TUNABLES" or x.startswith("MALLOC_") for x in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # Another C library, or none.
        return False
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return all([mallopt(name, value) for name, value in wanted])
