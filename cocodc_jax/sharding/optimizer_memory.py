"""Placement of the inner optimizer's state: on the device, or in host memory.

Of P parameters of 4 bytes Adam keeps 8 P bytes that a step needs once, at its end. In
the pinned memory of the accelerators' hosts they leave accelerator memory for
activations. Each inner step loads a device's share and stores it back: 16 bytes per
parameter over the host link, concurrently with matrix products if the compiler finds
room. Leaves that are not shaped like a parameter stay on the devices.

In a segment with syncs (`program/segment.py`) a TPU's compiler (libtpu 0.0.42) then
peels the last step off the scan, and makes a message arrive before that step.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from cocodc_jax.sharding.transfer import PINNED
from cocodc_jax.sync.method import Method

PyTree = Any

MEMORIES = ("device", "host")


def check_memory(memory: str) -> None:
    """Refuse a value that is not in `MEMORIES`."""
    if memory not in MEMORIES:
        raise ValueError(
            f"optimizer_memory={memory!r} is unknown; use one of {MEMORIES}"
        )


def memory_kind(memory: str, mesh: Mesh, method: Method) -> str | None:
    """Return JAX's memory kind for `memory`; None is the devices' default.

    Refused where a method uses the state outside inner steps and merges.
    """
    check_memory(memory)
    if memory == "device":
        return None
    device = mesh.devices.flat[0]
    there = sorted(each.kind for each in device.addressable_memories())
    if PINNED not in there:
        raise ValueError(
            f"optimizer_memory={memory!r} needs memory of the kind {PINNED!r}, and "
            f"{device.platform} has {there}; use 'device'"
        )
    sync = method.sync
    if sync is not None and (sync.moments or sync.robust):
        what = "averages moments" if sync.moments else "puts regions back"
        raise ValueError(
            f"optimizer_memory={memory!r} is not for method={method.name!r}, which "
            f"{what}; use 'device'"
        )
    return PINNED


def load(opt_state: PyTree, lies: PyTree) -> PyTree:
    """Load state from host memory to the devices, in a program of the mesh."""
    return _moved(opt_state, lies, jax.memory.Space.Device)


def offload(opt_state: PyTree, lies: PyTree) -> PyTree:
    """Invert `load`."""
    return _moved(opt_state, lies, jax.memory.Space.Host)


def _moved(opt_state: PyTree, lies: PyTree, space: Any) -> PyTree:
    def one(x, sharding):
        if isinstance(x, optax.MaskedNode):
            return x
        return jax.device_put(x, space) if sharding.memory_kind == PINNED else x

    return jax.tree.map(
        one, opt_state, lies, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
