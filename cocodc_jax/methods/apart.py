r"""`apart`: regions that never exchange anything; evaluation takes their mean.

All begin with the same parameters. Each region m trains alone until the end:

$$
\theta^m \leftarrow \mathrm{inner}(\theta^m, g^m)
$$

Evaluation uses the mean of their parameters, $\frac{1}{M} \sum_m \theta^m$.

Source: branch-train-merge and related methods; all from memory, unchecked.
Differs from the paper: not known.
Defaults: it has no numbers of its own.
Measured here: as a method, and as experts of different sources that are merged when
they are done: docs/results/methods.md.
"""

from cocodc_jax.sync import Method


def apart() -> Method:
    """Exchange nothing: each region trains alone."""
    return Method(name="apart")
