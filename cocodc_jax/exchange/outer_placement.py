"""Where the state of an outer model that regions share lies, and how programs take it.

- On the host's own CPU, whole in each process: what steps there is a program of its
  own, beside the accelerators. So it is where messages cross between hosts.
- Divided over the devices of each region, in their memory (ZeRO, stage 1).
- Divided likewise, but in the memory of the devices' hosts ("pinned"): where syncs and
  inner steps are one program of accelerators (`program/segment.py`). Of P parameters of
  4 bytes with Nesterov's momentum a host then keeps 8 P / (hosts of a region) bytes,
  and an accelerator none. A program takes in what it steps, a fragment at a time, each
  device its own part of it, and puts it back: no device ever holds a fragment whole
  that regions do not hold whole themselves.

What is no array like a parameter, as a count of steps, lies on the devices.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from cocodc_jax.exchange.sync_spec import SyncSpec
from cocodc_jax.sharding.transfer import PINNED
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.outer import SharedOuter

PyTree = Any


@dataclasses.dataclass(frozen=True)
class OuterPlace:
    """Where outer state lies.

    Attributes:
      spec: of the run.
      outer: the optimizer.
    """

    spec: SyncSpec
    outer: SharedOuter

    @property
    def on_mesh(self) -> bool:
        """Whether the outer step is a program of the inner mesh."""
        return self.outer.placement == "divided" or self.spec.overlap

    @property
    def memory_kind(self) -> str | None:
        """Of the devices' memories the one that state lies in; None is their own."""
        if self.outer.placement == "divided" or not self.spec.overlap:
            return None
        device = self.spec.mesh.devices.flat[0]
        there = {memory.kind for memory in device.addressable_memories()}
        return PINNED if PINNED in there else None

    def lay(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Return the shardings of a fragment's parameters or optimizer state."""
        shardings = self.spec.shardings
        if not self.on_mesh:
            return shardings.on_host(fragment_id, tree)
        return shardings.divided(fragment_id, tree, self.memory_kind)

    def load(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Take parameters or state into the devices' memory, in a program of the mesh.

        Each device takes its own part.
        """
        return jax.device_put(tree, self.spec.shardings.divided(fragment_id, tree))

    def offload(self, fragment_id: int, tree: PyTree) -> PyTree:
        """Undo `load`."""
        return jax.device_put(tree, self.lay(fragment_id, tree))

    def given(self, params: Fragment, opt_state: PyTree) -> tuple[Fragment, PyTree]:
        """Return the arguments of `broadcast`."""
        return params, None if self.outer.start is None else opt_state

    def broadcast(
        self, fragment_id: int, params: Fragment, opt_state: PyTree
    ) -> Fragment:
        """Make what regions are given of a fragment, in a program of the mesh.

        Args:
          fragment_id: which.
          params: the outer fragment.
          opt_state: of it; only where regions do not start from `params` themselves.
        """
        params = self.load(fragment_id, params)
        if self.outer.start is not None:
            params = self.outer.start(params, self.load(fragment_id, opt_state))
        where = self.spec.shardings.fragments[fragment_id]
        return jax.lax.with_sharding_constraint(params, where)
