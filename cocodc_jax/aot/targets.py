"""Machines to compile for: how one is described, and its devices without it.

A target is written `v5e:4x4`, a slice of 16 TPU chips, or `h100:4`, four hosts of eight
GPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from typing import Any

from cocodc_jax.chips import CHIPS, Chip

GPUS_PER_HOST = 8
# What each platform's compiler comes with, and the extra that installs it.
_MODULES = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
      chip: what it is made of.
      shape: of one slice in chips, or of GPUs the number of hosts.
      slices: how many; 1 for GPUs.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str, slices: int = 1) -> Target:
        """Read `v5e:4x4`.

        Args:
          text: chip and shape.
          slices: how many such slices; a GPU's hosts are all in its shape.

        Raises:
          ValueError: naming the flag, its value and what would be right.
        """
        name, _, shape = text.lower().partition(":")
        chip = CHIPS.get(name.removeprefix("tpu"))
        if chip is None:
            raise ValueError(f"target={text!r} is no chip of {', '.join(CHIPS)}")
        sizes = re.fullmatch(r"\d+(?:x\d+)*", shape)
        dims = tuple(int(size) for size in shape.split("x")) if sizes else ()
        if len(dims) != chip.axes or 0 in dims:
            example = {1: "4", 2: "4x4", 3: "4x4x4"}[chip.axes]
            raise ValueError(
                f"target={text!r} has no shape of a {chip.name}; write it as "
                f"{chip.name}:{example}"
                f"{', in hosts of 8 GPUs' if chip.platform == 'cuda' else ''}"
            )
        if slices < 1 or (slices > 1 and chip.platform == "cuda"):
            raise ValueError(
                f"slices={slices} must be at least 1"
                if slices < 1
                else f"slices={slices} is of TPUs; give GPUs' hosts as "
                f"target={chip.name}:{math.prod(dims) * slices}"
            )
        return cls(chip, dims, slices)

    def check_installed(self) -> None:
        """Refuse a machine whose compiler is not installed.

        Raises:
          ValueError: with the command that installs it.
        """
        platform = self.chip.platform
        if not any(importlib.util.find_spec(name) for name in _MODULES[platform]):
            raise ValueError(
                f"target={self} needs the compiler of that platform; install it with "
                f"pip install 'cocodc_jax[{platform}]'"
            )

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        per_host = GPUS_PER_HOST if self.chip.platform == "cuda" else 1
        return math.prod(self.shape) * self.slices * per_host

    def environment(self) -> dict[str, str]:
        """Return what must be set before JAX starts in the process that compiles.

        JAX itself stays on the CPU, several processes may compile at once, and nothing
        asks the network which TPU this is. The TPU's compiler needs to be given it.
        """
        always = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
        if self.chip.platform == "cuda":
            return always | {
                "CUDA_VISIBLE_DEVICES": "-1",
                "XLA_FLAGS": "--xla_gpu_autotune_level=0",
            }
        return always | {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
            "XLA_FLAGS": "",
        }

    def devices(self) -> list[Any]:
        """Return devices that can only be compiled for, slice by slice."""
        from jax.experimental import topologies

        if self.chip.platform == "cuda":
            from cocodc_jax.aot import gpu

            found = topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.chip.topology,
                target_config=gpu.TARGETS[self.chip.name],
                topology=f"1x{math.prod(self.shape)}x{GPUS_PER_HOST}",
            )
            return list(found.devices)
        shape = "x".join(map(str, self.shape))
        # Hosts of 2 x 2 chips, as is usual; of less where a side is odd.
        host = [2 if size % 2 == 0 else 1 for size in self.shape[:2]]
        found = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{self.chip.topology}:{shape}",
            num_slices=self.slices,
            chips_per_host_bounds=[*host, 1],
        )
        # A single slice has no number.
        return sorted(found.devices, key=lambda x: (getattr(x, "slice_index", 0), x.id))

    def per_device(self, num_devices: int) -> Chip:
        """Return what one of `num_devices` devices of the machine can do.

        JAX shows a 7x chip as two devices.
        """
        share = self.num_chips / num_devices
        numbers = {
            name: getattr(self.chip, name) * share
            for name in ("flops", "hbm_bps", "link_bps", "network_bps")
        }
        return dataclasses.replace(
            self.chip, hbm_bytes=int(self.chip.hbm_bytes * share), **numbers
        )

    def __str__(self) -> str:
        """Return the target as it is written."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
