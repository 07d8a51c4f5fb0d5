"""Virtual devices asked for too late, as in the second cell of a notebook."""

import os
import re
import subprocess
import sys

SCRIPT = """
import jax, jax.numpy as jnp
import cocodc_jax as cc
jnp.zeros(2)
cc.use_cpu_devices(3)
assert len(jax.devices()) == 3
"""


def run(**env):
    words = [sys.executable, "-c", SCRIPT]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(words, env=kept | env, capture_output=True, text=True)


def test_devices_asked_for_too_late_name_what_to_do_and_that_does_it():
    done = run()
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: use_cpu_devices(3) comes after JAX has start")
    assert "restart the kernel" in last
    name, value = re.search(r"set (\w+)=(\d+) in the environment", last).groups()
    assert run(**{name: value}).returncode == 0
