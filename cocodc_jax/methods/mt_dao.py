r"""`mt_dao` (arXiv 2510.05361): momenta slow enough to outlive the steps between syncs.

`des_loc` around another inner optimizer, `transforms.mt_adam`, with a fast and a slow
momentum $u_1$, $u_2$ of weights $w_j$. In region m, H times between syncs:

$$
\begin{align*}
u^m_j &\leftarrow b_j u^m_j + (1 - b_j) \, g^m \\
s^m &\leftarrow b s^m + (1 - b) \, g^m \odot g^m \\
\theta^m &\leftarrow \theta^m - \gamma \, \frac{(1 - \sum_j w_j) \, g^m
+ \sum_j w_j \hat u^m_j}{\sqrt{\hat s^m} + \epsilon}
\end{align*}
$$

Hats are bias-corrected. As in `des_loc`, parameters are averaged at every sync, all
$u_j$ at every third, s at every sixth.

After H = 30 steps a momentum of decay 0.9 holds 4 % of what regions had agreed on, one
of 0.999 holds 97 %: it pulls all of them the same way while they train apart. Decays
and weights are the inner optimizer's: `beta1`, `slow_beta`, `fast_weight`,
`slow_weight`.

Source: MT-DAO, Iacob, Jovanovic, Safaryan et al., arXiv 2510.05361; the step and 0.999
from a published digest, bias corrections from the authors' public code.
Derived here: with `slow_weight` 0 and `fast_weight` 1 it is `des_loc`.
Differs from the paper: there each momentum may have its own interval; here the first
moments share one.
Defaults: published slow decay 0.999 (0.99 to 0.995 in short runs, where the memory may
not be longer than the run); weights not found, here 0.7 fast, 0.2 slow, 0.1 gradient,
an example in the authors' code; 3 and 6 are DES-LOC's; H 30.
Measured here: docs/results/methods.md; weights in docs/results/archive/methods.md.
"""

import dataclasses

from cocodc_jax.methods.des_loc import des_loc
from cocodc_jax.sync import Inner, Method


def mt_dao(
    sync_interval: int = 30,
    sync_moments: str = "3,6",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> Method:
    """Build MT-DAO (arXiv 2510.05361): a slow momentum, averaged over regions too.

    Args:
      sync_interval: H, inner steps between syncs of the parameters.
      sync_moments: as of `des_loc`.
      outer_lr: eta, learning rate of the outer step; 1 is the mean.
      outer_momentum: mu, its Nesterov momentum, in [0, 1).
    """
    method = des_loc(sync_interval, sync_moments, outer_lr, outer_momentum)
    return dataclasses.replace(method, name="mt_dao", inner=Inner("mt_adam"))
