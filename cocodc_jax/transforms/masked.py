"""Entries that a region owns, besides what a core says of all of them.

With M regions, C a compressor of everything (the core, usually of low rank) and Omega_m
the entries that region m owns, n of whose regions own an entry:

    c = C(x);   message (c, r = x - c at Omega_m);   decoded  c + (M / n) r at Omega_m

so that the plain mean of what M messages decode to is the mean of the cores, plus of
what they leave, entry by entry, the mean over the entry's owners.

The entries of all tensors stand in an order drawn once from a seed, the same
everywhere; region m owns density * size of them from place m size / M on, cyclically.
At density 1 / M each is owned once (but for a few where M does not divide their
number); at density 1 by all, and nothing is lost whatever the core. Positions are never
sent: a message says whose it is.

Source: see `methods/contrib/masked_core.py`; all that is said of owners here is ours.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from cocodc_jax.transforms.compressor import Compressor, check_compressor
from cocodc_jax.transforms.numerics import cast_like, check_share, widen

# Up to so many entries their order is a constant of the programs, 64 MiB at most. Drawn
# in them, at every sync for every message, it takes a CPU a second a million.
_MOST_CONSTANT = 1 << 24


class MaskedState(NamedTuple):
    """State of `masked`: whose it is, an int32 scalar m, and the state of the core."""

    region: jax.Array
    core: Any


def masked(
    core: Compressor, density: float, num_regions: int, seed: int | None = 0
) -> Compressor:
    """Send a core, and what it leaves of the entries that the region owns.

    `init` gives the state of region 0; put each region's own number into `region`.

    Args:
      core: of all entries.
      density: share of the entries that a region owns, in (0, 1].
      num_regions: M.
      seed: of the order of the entries; None leaves it as it is.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.sparsify import top_k
    >>> compressor = masked(top_k(0.25), density=0.5, num_regions=2)
    >>> x = jnp.array([4.0, 3.0, 2.0, 1.0])
    >>> total = 0
    >>> for region in range(2):  # What both say together is x.
    ...     state = compressor.init(x)._replace(region=jnp.int32(region))
    ...     total += compressor.decode(compressor.encode(x, state)[0]) / 2
    >>> print(total)
    [4. 3. 2. 1.]
    """
    check_compressor("core", core)
    check_share("density", density)

    def owned(size: int, region: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return which of `size` entries a region owns, and how many own each."""
        place, owners = _places(size, density, num_regions, region)
        return _order(size, seed)[place], owners.sum(1)

    def init(tree):
        return MaskedState(jnp.zeros([], jnp.int32), core.init(tree))

    def encode(tree, state, key=None):
        message, kept = core.encode(tree, state.core, key)
        rest = jax.tree.map(
            lambda x, c: widen(x) - widen(c), tree, core.decode(message)
        )
        flat, _ = ravel_pytree(rest)
        own = flat[owned(flat.size, state.region)[0]]
        message = {"core": message, "owned": own, "region": state.region}
        return message, state._replace(core=kept)

    def decode(message):
        tree = core.decode(message["core"])
        flat, restore = ravel_pytree(jax.tree.map(widen, tree))
        where, owners = owned(flat.size, message["region"])
        share = message["owned"] * (num_regions / owners).astype(flat.dtype)
        return cast_like(restore(flat.at[where].add(share)), tree)

    return Compressor(f"masked({core.name})", init, encode, decode)


def weigh_owned(
    messages: Any, weights: jax.Array, core: Compressor, density: float
) -> Any:
    """Scale what regions send of their own entries for a mean with weights.

    So that the sum of decoded messages times weights is, entry by entry, the mean over
    the owners with these weights: `r_m` becomes `r_m (n / M) / (sum of w over the n
    owners)`, zero where none of them counts. Equal weights change nothing.

    The messages are those of `masked(core, density, M)`, leaves `[M, ...]`; weights
    `[M]` have sum 1.
    """
    first = jax.tree.map(lambda x: x[0], messages["core"])
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(core.decode, first)))
    num_regions = len(weights)

    def scaled(own: jax.Array, region: jax.Array) -> jax.Array:
        _, owners = _places(size, density, num_regions, region)
        total = owners @ weights
        share = owners.sum(1) / num_regions / jnp.where(total > 0, total, 1)
        return own * jnp.where(total > 0, share, 0).astype(own.dtype)

    own = jax.vmap(scaled)(messages["owned"], messages["region"])
    return {**messages, "owned": own}


def _order(size: int, seed: int | None) -> jax.Array:
    """Return the order of `size` entries, int32 `[size]`."""
    if seed is None:
        return jnp.arange(size)
    if size > _MOST_CONSTANT:
        return jax.random.permutation(jax.random.key(seed), size)
    impl = jax.config.jax_default_prng_impl  # pyright: ignore
    return jnp.asarray(_drawn(size, seed, impl))


@functools.lru_cache(maxsize=8)
def _drawn(size: int, seed: int, impl: str) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        order = jax.random.permutation(jax.random.key(seed, impl=impl), size)
        return jax.device_get(order)


def _places(
    size: int, density: float, num_regions: int, region: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the places that a region owns, and which regions own each, `[n, M]`."""
    starts = np.arange(num_regions) * size // num_regions
    count = max(1, round(density * size))
    place = (jnp.asarray(starts)[region] + jnp.arange(count)) % size
    return place, (place[:, None] - starts[None, :]) % size < count
