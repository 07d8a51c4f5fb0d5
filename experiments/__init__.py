"""Thin absl programs over cocodc_jax; `commands` runs them by name."""

import os

# QR and singular values on CPUs are SciPy's OpenBLAS, which JAX loads with the first of
# them. Its threads wait by turning, and so take the cores from XLA's: beside other work
# a QR of 352 x 32 took 850 ms, in one thread half of one. Its bits are the same.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
