r"""`apart`: regions that never exchange anything, and are merged when they are done.

All begin with the same parameters. Each region m trains alone until the end:

$$
\theta^m \leftarrow \mathrm{inner}(\theta^m, g^m)
$$

Evaluation uses the mean of their parameters, $\frac{1}{M} \sum_m \theta^m$. Afterwards
`experiments.studies.merge_experts` uses the regions as experts with weights $w_m$:

$$
p(x) = \sum_m w_m \, p_m(x), \qquad
w_m \propto \prod_{i \le P} p_m(x_i \mid x_{<i})
$$

The weights are even, or the posterior over experts from the first P tokens of a text
(the second equation), of all experts or the best few.

Source: branch-train-merge and related methods; all from memory, unchecked.
Differs from the paper: not known.
Defaults: it has no numbers of its own.
Measured here: as a method and as experts of different sources, which
`experiments.studies.merge_experts` merges: docs/results/methods.md.
"""

from cocodc_jax.sync import Method


def apart() -> Method:
    """Exchange nothing: regions are experts, merged when they are done."""
    return Method(name="apart")
