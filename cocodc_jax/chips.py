"""Published rates of accelerators, and the share of them that a run uses (MFU).

Bandwidths are one way: what a device can receive while it sends as much.

Sources: TPU v5e, v5p, v6e and 7x, docs.cloud.google.com/tpu/docs/ with the name, their
tables of specifications (interconnect halved where the table says bidirectional; DCN of
v5e as the pod's divided by its chips); v4, the same, and its interconnect of six links
of 50 GB/s from arXiv 2304.01433, table 4; H100 and H200, NVIDIA's data sheets of the
SXM parts, dense bf16, NVLink's 900 GB/s both ways. From memory, not looked up: 7x's
bandwidths, the DCN of v4, v6e and 7x, the GPUs' 400 Gbit/s of network each, the peak
of the A100, and what JAX calls the GPUs.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

GIB = 2**30
GB = 10**9
TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory and rates of one chip, in bytes and bytes a second."""

    name: str  # As targets write it.
    platform: str  # tpu or cuda.
    hbm_bytes: int  # Main memory.
    flops: float  # bf16 matrix products a second, dense.
    hbm_bps: float  # To and from main memory.
    link_bps: float  # Received from chips of its slice or host.
    network_bps: float  # Received from other chips.
    axes: int  # Of a slice's shape; 1 for GPUs, whose shape is a number of hosts.
    topology: str  # The compiler's name for it.


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 32*GIB, 275*TERA, 1200*GB, 300*GB, 6.25*GB, 3, "v4"),
        # Of 16 GiB the compiler keeps a quarter of one for itself.
        Chip("v5e", "tpu", 63*GIB//4, 197*TERA, 819*GB, 200*GB, 3.125*GB, 2, "v5e"),
        Chip("v5p", "tpu", 95*GIB, 459*TERA, 2765*GB, 600*GB, 6.25*GB, 3, "v5p"),
        Chip("v6e", "tpu", 32*GIB, 918*TERA, 1638*GB, 400*GB, 12.5*GB, 2, "v6e"),
        Chip("7x", "tpu", 192*GIB, 2307*TERA, 7380*GB, 600*GB, 12.5*GB, 3, "tpu7x"),
        Chip("h100", "cuda", 80*GB, 989*TERA, 3350*GB, 450*GB, 50*GB, 1, "h100"),
        Chip("h200", "cuda", 141*GB, 989*TERA, 4800*GB, 450*GB, 50*GB, 1, "h200"),
    )
}  # fmt: skip
# By `jax.Device.device_kind`: libtpu's own names, and those that JAX has had for them.
_PEAKS = {
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5e": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v5p": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
    "TPU v6e": CHIPS["v6e"].flops,
    "TPU7x": CHIPS["7x"].flops / 2,  # JAX shows a chip as two devices.
    "NVIDIA H100 80GB HBM3": CHIPS["h100"].flops,
    "NVIDIA H200": CHIPS["h200"].flops,
    "NVIDIA A100-SXM4-40GB": 312 * TERA,
    "NVIDIA A100-SXM4-80GB": 312 * TERA,
}


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bf16 operations a second that one JAX device can do.

    >>> peak_flops("TPU v5 lite"), peak_flops("cpu")
    (197000000000000, None)
    """
    return _PEAKS.get(device_kind)


def peak_tokens_per_second(
    devices: Iterable[Any], flops_per_token: float
) -> float | None:
    """Return the rate that uses all of the devices' peaks; None if one is unknown."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / flops_per_token if len(known) == len(peaks) else None


def mfu(tokens_per_second: float | None, peak: float | None) -> float | None:
    """Return the model FLOPs utilization: a rate over `peak_tokens_per_second`.

    With f the model's operations per token (`models.flops_per_token`, PaLM's
    convention, arXiv 2204.02311, appendix B: forward and backward, without
    recomputation), P the sum of the devices' peaks and x the tokens per second,

        MFU = f x / P = x / (P / f)

    >>> mfu(200.0, 500.0), mfu(200.0, None)
    (0.4, None)
    """
    if tokens_per_second is None or peak is None:
        return None
    return tokens_per_second / peak
