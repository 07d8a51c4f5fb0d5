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
(the second equation), or those of a linear router over hashed n-grams; each also with
the best few experts only.

Source: branch-train-merge and related methods; from memory, unchecked (the posterior
too).
Differs from the paper: not known.
Defaults: it has no numbers of its own.
Measured here: as a method it ends at 2.131, DiLoCo at 1.838 (docs/results/methods.md).

As experts of different sources, in nats a token: one alone 1.967, the average of their
parameters 2.231, an even mixture 1.833, the posterior 1.818, the linear router 1.810 (4
passes a token each), DiLoCo on the same data 1.819 at one pass (one seed), by

    python -m experiments.studies.merge_experts --preset=tiny \
        --references=diloco,data_parallel --workdir=DIR
"""

from cocodc_jax.sync import Method


def apart() -> Method:
    """Exchange nothing: regions are experts, merged when they are done."""
    return Method(name="apart")
