r"""`distributed_lion` (arXiv 2404.00438): one bit a parameter, at every step.

At every inner step each region m sends the signs of its momentum $u^m$, from zero, with
the new gradient, and keeps the momentum:

$$
\begin{align*}
d^m &= \mathrm{sign}(b_1 u^m + (1 - b_1) \, g^m) \\
u^m &\leftarrow b_2 u^m + (1 - b_2) \, g^m
\end{align*}
$$

The regions vote, or average, and all take the same step with weight decay w:

$$
\begin{align*}
d &= \mathrm{sign}\left(\sum_m d^m\right) \;\; \text{(majority)} \qquad \text{or} \qquad
d = \frac{1}{M} \sum_m d^m \;\; \text{(average)} \\
\theta &\leftarrow \theta - \gamma \, (d + w \, \theta)
\end{align*}
$$

The learning rate is `sign_lr_fraction` of AdamW's. A message is a bit already, so
`compress` has no meaning. With M = 1 it is Lion.

Source: Distributed Lion, Liu et al., arXiv 2404.00438; not checked against its code.
Differs from the paper: sign(0) is sent as +1, as a bit has no room for zero; a tie of
an even number of regions moves nothing.
Defaults: published b1 0.9, b2 0.99; here the same, majority vote.
Measured here: docs/results/methods.md.
"""

from cocodc_jax.sync import Inner, Method, PerStep
from cocodc_jax.transforms import lion
from cocodc_jax.transforms.numerics import check_choice, check_unit_interval


def distributed_lion(
    lion_beta1: float = 0.9,
    lion_beta2: float = 0.99,
    lion_vote: lion.VoteRule = "majority",
) -> Method:
    """Build Distributed Lion (arXiv 2404.00438): one bit a parameter at every step.

    Args:
      lion_beta1: weight b1 of the momentum in what is sent, in [0, 1).
      lion_beta2: decay b2 of the momentum, in [0, 1).
      lion_vote: what is made of the regions' signs, "majority" or "average".
    """
    return Method(
        name="distributed_lion",
        per_step=signs(lion_beta1, lion_beta2, lion_vote),
        inner=Inner("sgd", steps_by_sign=True),
    )


def signs(b1: float, b2: float, vote: str) -> PerStep:
    """Send the signs of the regions' updates; average them or put them to a vote."""
    check_unit_interval("lion_beta1", b1)
    check_unit_interval("lion_beta2", b2)
    check_choice("lion_vote", vote, lion.RULES)
    return PerStep(
        "signs",
        lion.init,
        lambda gradient, state, key: lion.send(gradient, state, b1, b2),
        lambda messages: lion.combine(messages, vote),
        why_uncompressed="its messages are one bit a parameter",
    )
