r"""`heloco` (arXiv 2606.00271): late pseudo-gradients kept, turned, or partly removed.

Regions arrive alone (`schedules.asynchronous(H)`). Each sends its progress since its
last arrival, from the point $\theta^s$ that it received then, and is answered at once:

$$
\Delta^m = \theta^s - \theta^m
$$

Each tensor of it is corrected by the outer momentum v. With cosine and confidence

$$
c = \frac{\langle \Delta^m, v \rangle}{\lVert \Delta^m \rVert \, \lVert v \rVert},
\qquad
\kappa_m = \frac{\lVert \Delta^m \rVert}
{\lVert \Delta^m \rVert + \kappa \lVert v \rVert},
\qquad
\hat{x} = \frac{x}{\lVert x \rVert}
$$

a pseudo-gradient that agrees with the momentum is kept, an oblique one is turned
towards it at the same length, and one that opposes it loses part of its component along
it:

$$
\tilde\Delta = \begin{cases}
\Delta^m & c \ge c_{\mathrm{ok}} \\
\lVert \Delta^m \rVert \, \hat{y}, \;\; y = (1 - l) \, \hat\Delta^m + l \, \hat v, \;\;
l = \min(k_d (1 - c) \, \kappa_m, 1) & 0 \le c < c_{\mathrm{ok}} \\
\Delta^m - b \, c \, \lVert \Delta^m \rVert \, \hat v, \;\;
b = \min(-k_s \, c \, \kappa_m, b_{\max}) & c < 0
\end{cases}
$$

Then the momentum and the outer parameters step, and the region continues from the
look-ahead point, to which the momentum alone would lead:

$$
\begin{align*}
G &= \rho \tilde\Delta, \qquad v \leftarrow \mu v + (1 - \mu) \, G \\
\theta^g &\leftarrow \theta^g - \eta \, (G + \mu v) \\
\theta^s &= \theta^g - \eta \mu v, \qquad \theta^m \leftarrow \theta^s
\end{align*}
$$

The look-ahead alone is `mla`.

Source: HeLoCo, arXiv 2606.00271; the rule, the momentum's form and the look-ahead read
from a published table.
Differs from the paper: nothing known. While v is zero the pseudo-gradient is kept. rho
is there a weight by worker or delay, 1 without one; here one number.
Defaults: published c_ok 0.2, k_s 0.5, k_d 1, kappa 3, b_max 0.5, eta 0.7, mu 0.9, rho
1; here the same, H 50. Derived here: with four regions and rho 1 a quadratic of which a
round covers half of the way or more diverges, with rho 1/4 it does not.
Measured here: docs/results/methods.md. With the published numbers four arrivals a round
each make a full step, which is too long in so short a run.
"""

import dataclasses

from cocodc_jax.methods.mla import mla
from cocodc_jax.sync import Method, SharedOuter
from cocodc_jax.transforms.outer import heloco as heloco_optimizer
from cocodc_jax.transforms.outer import look_ahead


def heloco(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    keep_cosine: float = 0.2,
    removal_rate: float = 0.5,
    turn_rate: float = 1.0,
    confidence_scale: float = 3.0,
    max_removal: float = 0.5,
    arrival_weight: float = 1.0,
    dynamic_steps: bool = True,
) -> Method:
    """Build HeLoCo (arXiv 2606.00271): look-ahead, and late arrivals corrected.

    Args:
      sync_interval: H, inner steps of the fastest region between two of its arrivals.
      outer_lr: eta, learning rate of the outer step, positive.
      outer_momentum: mu, in [0, 1).
      keep_cosine: c_ok; a late tensor whose cosine to the outer momentum is at least
        this is kept as it is. At -1 all are.
      removal_rate: k_s, how fast the removed part grows as a tensor opposes the
        momentum more.
      turn_rate: k_d, how far a tensor that is oblique to the momentum is turned to it.
      confidence_scale: kappa; the larger, the less a late tensor is changed that is
        short compared with the momentum.
      max_removal: b_max, the largest share of the opposing component that is removed,
        in [0, 1].
      arrival_weight: rho, weight of an arrival in the outer step, positive; 1 over the
        number of regions makes a round of arrivals weigh as one.
      dynamic_steps: whether slower regions do fewer steps between arrivals.
    """
    method = mla(
        sync_interval=sync_interval,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        arrival_weight=arrival_weight,
        dynamic_steps=dynamic_steps,
    )
    optimizer = heloco_optimizer(
        learning_rate=outer_lr,
        momentum=outer_momentum,
        keep_cosine=keep_cosine,
        removal_rate=removal_rate,
        turn_rate=turn_rate,
        confidence_scale=confidence_scale,
        max_removal=max_removal,
        weight=arrival_weight,
    )

    outer = SharedOuter(optimizer, start=look_ahead(outer_lr, outer_momentum))
    return dataclasses.replace(method.with_sync(outer=outer), name="heloco")
