"""Cache compiled programs on disk, so that a command compiles only what is new.

JAX's persistent compilation cache is off by default. `JAX_COMPILATION_CACHE_DIR` sets
another folder than the user's, and `JAX_ENABLE_COMPILATION_CACHE=false` disables it.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import sys
import time

from cocodc_jax.paths import cache_dir

DIR = "JAX_COMPILATION_CACHE_DIR"
MIN_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"

# Below JAX's default of 1 s: a run has dozens of small programs.
_MIN_COMPILE_S = 0.05
_KEPT_S = 30 * 24 * 3600.0


def keep_programs() -> pathlib.Path | None:
    """Enable the compilation cache, here and in commands started from here."""
    if DIR in os.environ or os.environ.get("JAX_ENABLE_COMPILATION_CACHE") == "false":
        return None
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_compilation_cache_dir is not None:
        return None
    try:
        folder = cache_dir() / "xla" / _machine()
        # Its content is executed: no other user may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_unused(folder)
    except (OSError, ValueError):  # Not writable, another user's, or nowhere.
        return None

    os.environ[DIR] = str(folder)
    os.environ.setdefault(MIN_TIME, str(_MIN_COMPILE_S))
    if jax is not None:  # Imported: it has read its environment.
        jax.config.update("jax_compilation_cache_dir", str(folder))
        least_s = float(os.environ[MIN_TIME])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)
    return folder


def _machine() -> str:
    """Name the kind of processor: machines may share a home folder, but not code."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("model name", "flags", "Features")
        text += "\n".join(sorted({x for x in lines if x.startswith(kinds)}))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _forget_unused(folder: pathlib.Path) -> None:
    """Remove programs that were not read for a month."""
    limit_s = time.time() - _KEPT_S
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # Removed by another command.
            times = path.stat()
            if max(times.st_atime, times.st_mtime) < limit_s:
                path.unlink()
