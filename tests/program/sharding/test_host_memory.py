"""What programs on the CPU free stays with the process."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource, threading
from cocodc_jax.sharding.mesh import keep_freed_memory

def faults(size=100 << 20):
    b"x" * size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        b"x" * size
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
print(keep_freed_memory())
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(*found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own calls")
@pytest.mark.parametrize("chosen", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_pages_of_the_call_before_serve_the_next(chosen):
    names = ("GLIBC_TUNABLES", "MALLOC_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env=environment | chosen,
    )
    is_kept, faults = done.stdout.split()
    assert (is_kept == "True") == (not chosen)
    assert (int(faults) < 1000) == (not chosen)
