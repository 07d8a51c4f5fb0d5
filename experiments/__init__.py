"""Thin absl programs over cocodc_jax; `commands` runs them by name."""

import os

# On CPUs, QR and singular values run in SciPy's OpenBLAS. Its threads spin while they
# wait, and take cores from XLA: with other work on the machine a QR of 352 x 32 took
# 850 ms, and 0.5 ms in one thread, with equal bits.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
