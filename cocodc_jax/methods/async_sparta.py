r"""`async_sparta` (arXiv 2601.22442): a few parameters averaged late, and corrected.

Every H steps, at sync t, the next subset S_t of the coordinates is averaged over the
regions, parameters and not pseudo-gradients. Subsets take turns: those of one cycle
have every coordinate once, and each cycle draws new ones, equal in all regions. The
mean crosses during the next H steps. Each region m keeps a moving average $d^m$ of its
progress while a mean crosses, and adds it to the mean that arrives:

$$
\begin{align*}
d^m_j &\leftarrow \lambda d^m_j
+ (1 - \lambda) \, (\theta^m_{t,j} - \theta^m_{t-1,j}) & j \in S_{t-1} \\
\theta^m_{t,j} &\leftarrow \frac{1}{M} \sum_n \theta^n_{t-1,j} + d^m_j & j \in S_{t-1}
\end{align*}
$$

The first subset's average starts at its own progress, all others' at zero. Other
coordinates stay as they are, so regions are never equal. With p the share
`mask_density`, a subset has one in ceil(1 / p) coordinates of every tensor. With
`is_delayed=False` the mean arrives at once, and nothing is corrected: sparse parameter
averaging, SPARTA.

Each region has its own outer parameters (`RegionalOuter`), from which it continues.
Positions are known to all and are not sent. As messages are parameters, `compress` has
no meaning, and the recorded norm of a sync is that of the averaged entries.

Source: AsyncMesh, Ajanthan et al., arXiv 2601.22442; read from the authors' code (its
data-parallel half, `sparta_method=ema`, and the partition of the coordinates). The
paper's own text was not available.
Derived here: lambda = 0 is the replay of `loscar`, one round late. With p = 1 and
`is_delayed=False` it is `diloco` with eta 1 and mu 0.
Differs from the paper: the delay is one sync; theirs is any number of them. Their
pipeline stages are asynchronous too. Nesterov's form of the average, a lambda that
grows, and a weight of the correction other than 1, all options there, are not here.
Defaults: published p 0.05 with a delay of 10 syncs (an example in the authors' code);
p 0.05 every 20 steps in their live run. Here H 20, p 0.05, and lambda 0.9, ours: the
code's default is 0, and the value of their runs was not found.
Measured here: docs/results/claims.md.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.sync import Method, RegionalOuter, Sync, merge, schedules
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.outer import PyTree
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.numerics import (
    check_at_least,
    check_share,
    check_unit_interval,
    is_finite,
)


def async_sparta(
    sync_interval: int = 20,
    mask_density: float = 0.05,
    mask_seed: int = 0,
    progress_decay: float = 0.9,
    is_delayed: bool = True,
) -> Method:
    """Build asynchronous sparse averaging with the EMA correction (arXiv 2601.22442).

    Args:
      sync_interval: H, inner steps between two syncs.
      mask_density: share of each tensor's coordinates that a sync averages, in (0, 1].
      mask_seed: seed of the draw of coordinates, the same on every region.
      progress_decay: lambda, decay of the average of a region's progress while a mean
        crosses, in [0, 1).
      is_delayed: whether a mean crosses during the next H steps; false is SPARTA, which
        waits for it.
    """
    schedule = schedules.staggered(sync_interval)
    if is_delayed:
        schedule = schedules.one_step_stale(sync_interval)
    outer = sparse_averages(mask_density, mask_seed, progress_decay, is_delayed)
    sync = Sync(schedule=schedule, outer=outer, merge=merge.replace())
    return Method(name="async_sparta", sync=sync)


class SparseAveragesState(NamedTuple):
    """State of `sparse_averages`, of one region's fragment."""

    num_syncs: jax.Array  # int32 scalar, messages sent.
    sent: Fragment  # The region's fragment when it sent the last of them.
    progress: Fragment  # d, new minus old.
    is_landing: jax.Array  # bool scalar, whether no message follows the last one.


def sparse_averages(
    density: float, seed: int, decay: float, is_delayed: bool
) -> RegionalOuter:
    """Average subsets in turn, and add the region's average progress to a late mean."""
    check_share("mask_density", density)
    check_at_least("mask_seed", seed, 0)
    check_unit_interval("progress_decay", decay)

    def subset(turn: jax.Array, part: Fragment) -> Fragment:
        return subsets(density, seed, turn, part)

    def init(params: PyTree, compressor: Compressor) -> SparseAveragesState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SparseAveragesState(
            num_syncs=jnp.zeros([], jnp.int32),
            sent=params,
            progress=zeros,
            is_landing=jnp.zeros([], bool),
        )

    def send(
        params: PyTree,
        state: SparseAveragesState,
        local: PyTree,
        compressor: Compressor,
        key: jax.Array,
    ) -> tuple[PyTree, SparseAveragesState]:
        now = jax.tree.map(lambda x, o: x.astype(o.dtype), local, params)
        entries = taken(now, subset(state.num_syncs, now))
        message, _ = compressor.encode(entries, compressor.init(entries), key)

        progress = state.progress
        if is_delayed:
            progress = advanced(state, now, subset(state.num_syncs - 1, now))

        # A region that is not finite changes nothing of the state but the count.
        finite = is_finite(now)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        return message, SparseAveragesState(
            num_syncs=state.num_syncs + 1,
            sent=jax.tree.map(keep, now, state.sent),
            progress=jax.tree.map(keep, progress, state.progress),
            is_landing=jnp.zeros([], bool),
        )

    def advanced(
        state: SparseAveragesState, now: Fragment, positions: Fragment
    ) -> Fragment:
        """Return d after the progress since the last message, in its subset."""
        is_first = state.num_syncs == 1
        kept = jnp.where(is_first, 0.0, decay)

        def one(d: jax.Array, x: jax.Array, old: jax.Array, at: jax.Array):
            averaged = kept.astype(d.dtype) * d + (1 - kept).astype(d.dtype) * (x - old)
            return jnp.where(is_drawn(at, x), averaged, d)

        after = jax.tree.map(one, state.progress, now, state.sent, positions)
        was_sent = state.num_syncs > 0
        return jax.tree.map(
            lambda new, old: jnp.where(was_sent, new, old), after, state.progress
        )

    def receive(
        params: PyTree, state: SparseAveragesState, arrived: PyTree, num_regions: int
    ) -> tuple[PyTree, SparseAveragesState]:
        turn = state.num_syncs - 1 - is_delayed + state.is_landing
        begun = jax.tree.map(
            lambda x, o: jnp.where(state.is_landing, o, x), state.sent, params
        )

        def put(x: jax.Array, mean: jax.Array, d: jax.Array, at: jax.Array):
            flat = x.reshape(-1)
            corrected = mean + d.reshape(-1).at[at].get(mode="fill", fill_value=0)
            # A message from before the first step has no mean.
            corrected = jnp.where(
                turn >= 0, corrected, flat.at[at].get(mode="fill", fill_value=0)
            )
            return flat.at[at].set(corrected, mode="drop").reshape(x.shape)

        positions = subset(turn, begun)
        merged = jax.tree.map(put, begun, arrived, state.progress, positions)
        return merged, state._replace(is_landing=jnp.zeros([], bool))

    def land(state: SparseAveragesState) -> SparseAveragesState:
        return state._replace(is_landing=jnp.ones([], bool))

    return RegionalOuter(
        name="sparse_averages",
        init=init,
        send=send,
        receive=receive,
        land=land if is_delayed else None,
        why_uncompressed="its messages are parameters, and no differences",
    )


def subsets(density: float, seed: int, turn: jax.Array, part: Fragment) -> Fragment:
    """Return the flat positions of each tensor that a turn averages.

    With n = min(ceil(1 / density), size) subsets of a tensor, the n-th path in
    alphabetical order draws an order of its positions anew every n turns, by
    `bits(fold_in(fold_in(key(seed), number), turn // n), size)`. Subset j has every
    n-th of them from the j-th on. If the last subsets are shorter, they are filled with
    the position after the end.
    """
    positions = {}
    for number, path in enumerate(sorted(part)):
        size = math.prod(part[path].shape)
        num_subsets = max(min(math.ceil(1 / density), size), 1)
        cycle = turn // num_subsets
        key = jax.random.fold_in(jax.random.key(seed), number)
        bits = jax.random.bits(jax.random.fold_in(key, cycle), (size,), jnp.uint32)
        order = jnp.argsort(bits)

        length = math.ceil(size / num_subsets)
        places = turn % num_subsets + num_subsets * jnp.arange(length)
        positions[path] = order.at[places].get(mode="fill", fill_value=size)
    return positions


def taken(part: Fragment, positions: Fragment) -> Fragment:
    """Return the entries at flat positions; 0 after the end."""
    return {
        path: x.reshape(-1).at[positions[path]].get(mode="fill", fill_value=0)
        for path, x in part.items()
    }


def is_drawn(positions: jax.Array, like: jax.Array) -> jax.Array:
    """Return which entries are at flat positions, bool in the shape of `like`."""
    flat = jnp.zeros(like.size, bool)
    return flat.at[positions].set(True, mode="drop").reshape(like.shape)
