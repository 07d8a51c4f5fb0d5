r"""`noloco` (arXiv 2506.10911): random pairs in place of everyone, no all-reduce.

Every H steps a matching, equal everywhere (by `pair_seed` and the sync), gives every
region m a partner n. Each region has outer parameters $\theta^{g,m}$ of its own
(`RegionalOuter`), which are never made equal. The two exchange them, and their
pseudo-gradients:

$$
\begin{align*}
\theta^m &\leftarrow \mathrm{inner}(\theta^m, g^m) \qquad \text{H times} \\
\Delta^m &= \theta^{g,m} - \theta^m \\
v^m &\leftarrow \mu v^m + \eta \, \frac{\Delta^m + \Delta^n}{2}
+ c \left(\theta^{g,m} - \frac{\theta^{g,m} + \theta^{g,n}}{2}\right) \\
\theta^{g,m} &\leftarrow \theta^{g,m} - v^m, \qquad \theta^m \leftarrow \theta^{g,m}
\end{align*}
$$

The paper's beta is eta here, its gamma c. Evaluation uses the mean of all regions.

**Stable** for $0 < c < 2 (1 - \mu^2)$: only there the spread of regions whose partners
are drawn independently contracts without gradients, and other values are refused.
Derived here: let A, B, C be the second moments of $\theta^g$ with itself, of $\theta^g$
with v, and of v with itself, in one region (partners are independent of it). A sync
makes $v' = \mu v + c \, (\theta^{g,m} - \theta^{g,n}) / 2$, so

$$
\begin{align*}
C' &= \mu^2 C + \mu c B + c^2 A / 2 \\
B' &= \mu B + c A / 2 - C' \\
A' &= A - 2 (\mu B + c A / 2) + C'
\end{align*}
$$

which has an eigenvalue of 1 at $c = 2 (1 - \mu^2)$. With as few as two regions, which
always meet, the range is wider.

Source: NoLoCo, arXiv 2506.10911; update, order and defaults as in the authors' code.
Differs from the paper: matchings come from a round-robin tournament, where every pair
is equally likely, but of more than four regions not every matching.
Defaults: published H 50, eta 0.7, mu 0.5, c = eta; here the same (c follows eta unless
it is given).
Measured here: docs/results/methods.md; outer parameters are sent too.
"""

from typing import NamedTuple

import jax
import optax

from cocodc_jax.sync import Method, RegionalOuter, Sync, merge, schedules
from cocodc_jax.sync.outer import PyTree, pseudo_gradient
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import (
    check_at_least,
    check_number,
    check_outer,
    is_number,
)
from cocodc_jax.transforms.outer import group_heavy_ball


def noloco(
    sync_interval: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    pair_pull: float | None = None,
    pair_seed: int = 0,
) -> Method:
    """Build NoLoCo (arXiv 2506.10911): random pairs, no all-reduce.

    Args:
      sync_interval: H, inner steps between syncs.
      outer_lr: eta, weight of the pair's mean pseudo-gradient.
      outer_momentum: mu, in [0, 1).
      pair_pull: c, how strongly the two of a pair are drawn together, above 0 and
        below 2 (1 - mu^2), where regions stay together; None is `outer_lr`.
      pair_seed: seed of the draw of pairs, the same on every region.
    """
    check_outer(outer_lr, outer_momentum)
    check_at_least("pair_seed", pair_seed, 0)
    if pair_pull is None:
        pull = outer_lr
        name = f"outer_lr={outer_lr}, which is pair_pull if that is left out,"
    else:
        check_number("pair_pull", pair_pull)
        pull = pair_pull
        name = f"pair_pull={pair_pull}"

    limit = 2 * (1 - outer_momentum**2)
    if is_number(pull * limit) and not 0 < pull < limit:  # Arrays are not checked.
        raise ValueError(
            f"{name} must be above 0 and below 2 (1 - outer_momentum^2) = {limit:.4g} "
            f"with outer_momentum={outer_momentum}, or regions drift apart"
        )

    sync = Sync(
        schedule=schedules.staggered(sync_interval),
        outer=noisy_pairs(outer_lr, outer_momentum, pull, pair_seed),
        merge=merge.replace(),
    )
    return Method(name="noloco", sync=sync)


class PairMessage(NamedTuple):
    """A region's message to its partner."""

    params: PyTree  # Its outer parameters.
    pseudo_gradient: PyTree


class PairState(NamedTuple):
    """State of `noisy_pairs`: of `group_heavy_ball`, and of the compressor."""

    optimizer: PyTree
    compressor: PyTree


def noisy_pairs(
    learning_rate: float, momentum: float, pull: float, seed: int
) -> RegionalOuter:
    """Step by a pair's mean, not by that of all regions, see the module."""
    optimizer = group_heavy_ball(learning_rate, momentum, pull)

    def payload(params: PyTree, local: PyTree) -> PairMessage:
        return PairMessage(params, pseudo_gradient(params, local))

    def init(params: PyTree, compressor: Compressor) -> PairState:
        sent = payload(params, params)
        return PairState(optimizer.init(params), compressor.init(sent))

    def send(
        params: PyTree,
        state: PairState,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
    ) -> tuple[PyTree, PairState]:
        message, memory = compressor.encode(
            payload(params, local), state.compressor, key
        )
        return message, state._replace(compressor=memory)

    def receive(
        params: PyTree, state: PairState, arrived: PyTree, num_regions: int
    ) -> tuple[PyTree, PairState]:
        mean = arrived.pseudo_gradient
        step, optimizer_state = optimizer.update(
            mean, state.optimizer, params, group_mean_params=arrived.params
        )
        new_params = optax.apply_updates(params, step)
        return new_params, state._replace(optimizer=optimizer_state)

    return RegionalOuter(
        name="noisy_pairs",
        init=init,
        send=send,
        receive=receive,
        group="pairs",
        seed=seed,
        why_uncompressed="its regions send their parameters, which are no change that "
        "could be sent in part",
    )
