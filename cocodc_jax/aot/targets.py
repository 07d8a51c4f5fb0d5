"""Machines to compile for: their descriptions, and devices without the hardware.

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

# What CUDA reports of a device of compute capability 9.0, which H100 and H200 share.
_GPU_LIMITS = f"""
threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
shared_memory_per_block: {48 * 2**10} shared_memory_per_block_optin: {227 * 2**10}
shared_memory_per_core: {228 * 2**10} core_count: 132 fpus_per_core: 128
block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1}
block_dim_limit_z: {2**16 - 1} thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
thread_dim_limit_z: 64 l2_cache_size: {50 * 2**20} clock_rate_ghz: 1.98
registers_per_core_limit: {2**16} registers_per_block_limit: {2**16}
"""
_GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
    "h200": ("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}


def _gpu_config(name: str, memory_bytes: int, memory_bps: int) -> str:
    """Return a GPU's description for XLA, a `GpuTargetConfigProto` as text."""
    return (
        f"gpu_device_info {{ {_GPU_LIMITS} device_memory_size: {memory_bytes} "
        f"memory_bandwidth: {memory_bps} cuda_compute_capability {{ major: 9 }} "
        'runtime_version: "12.8.0" driver_version: "12.8.0" '
        f'dnn_version: "9.8.0" name: "{name}" }} '
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "{name}"'
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine."""

    chip: Chip  # Of which kind its chips are.
    shape: tuple[int, ...]  # Of one slice, in chips; for GPUs the number of hosts.
    slices: int = 1  # 1 for GPUs.

    @classmethod
    def parse(cls, text: str, slices: int = 1) -> Target:
        """Read a target such as `v5e:4x4`; a `ValueError` names the flag.

        Args:
          text: the target.
          slices: the number of such slices.
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
        if slices < 1:
            raise ValueError(f"slices={slices} must be at least 1")
        if slices > 1 and chip.platform == "cuda":
            hosts = math.prod(dims) * slices
            raise ValueError(
                f"slices={slices} is of TPUs; give GPUs' hosts as "
                f"target={chip.name}:{hosts}"
            )

        return cls(chip, dims, slices)

    def check_installed(self) -> None:
        """Raise ValueError if the machine's compiler is not installed."""
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
        """Return the environment variables with which the compiling process starts.

        They keep JAX itself on the CPU, let several processes compile at once, and keep
        libtpu from asking the network which TPU this is.
        """
        always = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
        if self.chip.platform == "cuda":
            untuned = "--xla_gpu_autotune_level=0"
            return always | {"CUDA_VISIBLE_DEVICES": "-1", "XLA_FLAGS": untuned}
        return always | {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
            "XLA_FLAGS": "",
        }

    def devices(self) -> list[Any]:
        """Return devices to compile for, not to run on, ordered by slice."""
        from jax.experimental import topologies

        if self.chip.platform == "cuda":
            description = topologies.get_topology_desc(
                platform="cuda",
                topology_name=self.chip.topology,
                target_config=_gpu_config(*_GPUS[self.chip.name]),
                topology=f"1x{math.prod(self.shape)}x{GPUS_PER_HOST}",
            )
            return list(description.devices)

        shape = "x".join(map(str, self.shape))
        # Hosts of 2 x 2 chips, as is usual; of 1 along a side that is odd.
        host = [2 if size % 2 == 0 else 1 for size in self.shape[:2]]
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{self.chip.topology}:{shape}",
            num_slices=self.slices,
            chips_per_host_bounds=[*host, 1],
        )

        # A single slice has no number.
        return sorted(
            description.devices, key=lambda x: (getattr(x, "slice_index", 0), x.id)
        )

    def per_device(self, num_devices: int) -> Chip:
        """Return what one of `num_devices` devices of the machine can do.

        JAX shows a 7x chip as two devices.
        """
        share = self.num_chips / num_devices
        chip = self.chip
        return dataclasses.replace(
            chip,
            hbm_bytes=int(chip.hbm_bytes * share),
            flops=chip.flops * share,
            hbm_bps=chip.hbm_bps * share,
            link_bps=chip.link_bps * share,
            network_bps=chip.network_bps * share,
        )

    def __str__(self) -> str:
        """Return the target as it is written."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
