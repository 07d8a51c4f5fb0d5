r"""`apart`: regions that never exchange anything, and are merged when they are done.

    theta^m <- inner(theta^m, g^m)             all along, in every region m by itself

All begin with the same parameters. While they train, the average of their parameters,
(1/M) sum_m theta^m, is evaluated. Afterwards `experiments.studies.merge_experts` uses
them as experts: an even mixture of their predictions, a posterior over them from the
first P tokens of a text (p_m proportional to prod_t p_m(x_t | x_<t)), a linear router
over hashed n-grams, or the best few of either.

Source: branch-train-merge and its kin; from memory, unchecked (the posterior too).
Defaults: it has no numbers of its own.
Measured here: as a method it ends at 2.131, DiLoCo at 1.838 (840k parameters, 480
steps, 4 regions of the same data, one seed), by

    python -m experiments.compare --preset=tiny --methods=all --target_method=diloco

As experts of different sources, in nats a token: one alone 1.967, the average of their
parameters 2.231, an even mixture 1.833, the posterior 1.818, the linear router 1.810 (4
passes a token each), DiLoCo on the same data 1.819 at one pass (one seed), by

    python -m experiments.studies.merge_experts --preset=tiny \\
        --references=diloco,data_parallel --workdir=DIR
"""

from __future__ import annotations

from cocodc_jax.sync.method import Method


def apart() -> Method:
    """Exchange nothing: regions are experts, merged when they are done.

    What is evaluated is the average of their parameters;
    `experiments.studies.merge_experts` makes an ensemble with a router of them.
    """
    return Method(name="apart")
