"""What XLA's compiler for NVIDIA GPUs asks of a device that is not there.

In the text form of its `GpuTargetConfigProto`: what CUDA tells of a device of compute
capability 9.0, which H100 and H200 share, and their memories.
"""

from __future__ import annotations

_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
}


def _config(name: str, memory_bytes: int, memory_bps: int) -> str:
    numbers = _LIMITS | {
        "device_memory_size": memory_bytes,
        "memory_bandwidth": memory_bps,
    }
    info = " ".join(f"{key}: {value}" for key, value in numbers.items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: 9 }} "
        'runtime_version: "12.8.0" driver_version: "12.8.0" '
        f'dnn_version: "9.8.0" name: "{name}" }} '
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } '
        f'device_description_str: "{name}"'
    )


TARGETS = {
    "h100": _config("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
    "h200": _config("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}
