"""Keep freed host memory in the process, so that CPU programs reuse it.

XLA's CPU backend allocates a program's temporaries at every call and frees them
afterwards. glibc maps such large blocks and returns them to the kernel, so each call
touches new pages, which the kernel must find and clear: a third of a second for every
scan of a small transformer in four regions. Pages that the process keeps serve the next
call. The price is about three times the memory, since blocks of many sizes come and go.
"""

from __future__ import annotations

import ctypes
import os

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT_BYTES = 2**31 - 1  # INT_MAX; glibc returns a larger free tail.


def keep_freed_memory() -> bool:
    """Keep memory that this process frees; call before JAX starts.

    Only glibc's first arena can hold blocks of any size, and a thread stays with the
    arena that it started in. So all threads that start after this call share one arena.

    Returns:
      Whether the C library does so: glibc, unless the environment configures it
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
