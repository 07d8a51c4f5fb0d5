r"""`data_parallel`: gradients averaged over all regions at every step, the reference.

At every inner step each region m computes the gradient of its own batch, and all take
the same step by the mean:

$$
\begin{align*}
g &= \frac{1}{M} \sum_m g^m, \qquad g^m = \nabla L(\theta; \text{batch of } m) \\
\theta &\leftarrow \mathrm{inner}(\theta, g)
\end{align*}
$$

There is no outer optimizer, no schedule and no drift. M regions take one step on M
times the batch, so per step it is ahead of every method whose regions train apart. It
sends a message as large as the model at every step, and all regions wait for the
slowest. With `compress` each region encodes its gradient, and the mean is that of the
decoded messages; without it gradients are all-reduced.

Source: textbook. Derived here, and a test: `diloco` with H = 1, eta = 1, no momentum
and SGD inside is this method.
Differs from the paper: there is none.
Defaults: it has no numbers of its own.
Measured here: docs/results/methods.md.
"""

from cocodc_jax.sync import Method
from cocodc_jax.sync.per_step import mean_gradients


def data_parallel() -> Method:
    """Average gradients over all regions at every step: the reference."""
    return Method(name="data_parallel", per_step=mean_gradients())
