r"""`dct_threshold` (arXiv 2010.08899): gradients above a threshold, the others kept.

DCT is dynamic communication thresholding here, not a cosine transform. At every inner
step, in each region m, per tensor, with error feedback $e^m$ from zero, the entries of
at least a threshold $c^m$ are sent:

$$
\begin{align*}
e^m &\leftarrow e^m + g^m \\
q^m_j &= \begin{cases} e^m_j & |e^m_j| \ge c^m \\ 0 & \text{otherwise} \end{cases} \\
e^m &\leftarrow e^m - q^m
\end{align*}
$$

All regions take the same step by the mean:

$$
g = \frac{1}{M} \sum_m q^m, \qquad \theta \leftarrow \mathrm{inner}(\theta, g)
$$

Every L steps $c^m$ becomes the k-th largest $|e^m_j|$, with k = density * size. Between
two sorts a step costs a comparison. A message has room for 1.5 k entries, as its size
must not vary; further entries wait in $e^m$ for the next sort.

Source: arXiv 2010.08899, thresholds kept for L iterations, and error feedback. L is
from memory (about a thousand there); the room of a message is ours.
Differs from the paper: it thresholds what crosses between the parts of a divided model
too (from memory); here gradients only.
Defaults: published L about 1000 (from memory); here density 0.01, L 10.
Measured here: docs/results/methods.md; the run is short.
"""

from cocodc_jax.sync import Method
from cocodc_jax.sync.per_step import compressed_gradients
from cocodc_jax.transforms import compression


def dct_threshold(compress: str = "ef+threshold:0.01") -> Method:
    """Build dynamic communication thresholding (arXiv 2010.08899).

    Args:
      compress: the compressor with its error feedback.
    """
    return Method(
        name="dct_threshold", per_step=compressed_gradients(compression.parse(compress))
    )
