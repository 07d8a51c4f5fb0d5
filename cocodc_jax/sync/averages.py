"""What is averaged over regions: pseudo-gradients, or a function of them.

With every exchange, the result is a weighted mean over regions. A method with another
rule averages a function of the pseudo-gradients:

    arrived = after(sum_m w_m before(Delta_m))                 Delta old minus new

`before` is of one region's fragment, a flat dict from path to array; its result is
sent, or encoded and sent. `after` has the same result in every region.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from cocodc_jax.sync.fragments import Fragment, PyTree
from cocodc_jax.transforms.compressor import Compressor
from cocodc_jax.transforms.layers import EMBEDDING, is_stack
from cocodc_jax.transforms.numerics import check_at_least, check_share


@dataclasses.dataclass(frozen=True)
class Average:
    """The weighted mean of the pseudo-gradients themselves."""

    # Whether it depends on a key of the sync, equal in every region.
    draws: ClassVar[bool] = False
    # Whether scaling a pseudo-gradient scales its contribution.
    is_linear: ClassVar[bool] = True

    def before(self, part: Fragment, key: jax.Array | None) -> PyTree:
        """Return the function of one region's pseudo-gradient that is averaged.

        The key is that of `sync_key`; None unless `draws`.
        """
        return part

    def after(self, mean: PyTree, like: PyTree, key: jax.Array | None) -> Fragment:
        """Return the outer optimizer's pseudo-gradient, of shapes `like`."""
        return mean

    def check_compressor(self, compressor: Compressor) -> None:
        """Accept any compressor of `before`'s results."""


@dataclasses.dataclass(frozen=True)
class RadialDirectional(Average):
    """The mean length times the direction of the mean direction, per tensor.

        before: (||Delta||, Delta / ||Delta||)
        after:  mean length * unit(mean direction)

    If regions disagree, a mean of pseudo-gradients is short; this keeps its length.
    Each layer of a scanned stack is a tensor. Directions that cancel give 0. Lengths
    are sent as another tensor of the message.

    Source: Decoupled DiLoCo, arXiv 2604.21428, from a published summary.
    Embeddings are averaged plainly.

    Attributes:
      embedding: regular expression that finds the paths of embeddings.
      has_layers: whether a leaf's first axis is of layers; by default a guess by its
        name.
    """

    embedding: str = EMBEDDING
    has_layers: Callable[[str], bool] = is_stack

    is_linear = False

    def check_compressor(self, compressor: Compressor) -> None:
        """Refuse a sparse compressor, which would drop lengths of layers."""
        if compressor.is_sparse:
            raise ValueError("lengths of layers that are not sent would be 0")

    def before(self, part: Fragment, key: jax.Array | None) -> PyTree:
        """Return lengths and directions; see `Average.before`."""
        return {path: self._split(path, x) for path, x in part.items()}

    def after(self, mean: PyTree, like: PyTree, key: jax.Array | None) -> Fragment:
        """Return the mean lengths along the mean directions; see `Average.after`."""
        return {path: self._join(path, x) for path, x in mean.items()}

    def _split(self, path: str, x: jax.Array) -> Any:
        if re.search(self.embedding, path):
            return x
        length = self._length(path, x)
        return {"direction": _unit(x, length), "length": length}

    def _join(self, path: str, mean: Any) -> jax.Array:
        if re.search(self.embedding, path):
            return mean
        direction = mean["direction"]
        return mean["length"] * _unit(direction, self._length(path, direction))

    def _length(self, path: str, x: jax.Array) -> jax.Array:
        """Return the length of a tensor, or of each layer of a stack, keeping axes."""
        axes = tuple(range(int(self.has_layers(path)), x.ndim))
        return jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True))


@dataclasses.dataclass(frozen=True)
class SharedMask(Average):
    """A share of the entries of each tensor, drawn anew for every sync.

    The draw is equal in every region, so positions are not sent; entries that are not
    drawn arrive as 0.

    Source: LOSCAR-SGD, arXiv 2605.20866, from a published summary. There entries are
    drawn from the full model, here the same share of each tensor.

    Attributes:
      density: share of a tensor's entries, in (0, 1]; at least one entry.
      seed: of the draws.
    """

    density: float
    seed: int = 0

    draws = True

    def __post_init__(self):
        check_share("mask_density", self.density)
        check_at_least("mask_seed", self.seed, 0)

    def before(self, part: Fragment, key: jax.Array | None) -> PyTree:
        """Return the entries drawn, flat; see `Average.before`."""
        drawn = self.indices(part, key)
        return {path: x.reshape(-1)[drawn[path]] for path, x in part.items()}

    def after(self, mean: PyTree, like: PyTree, key: jax.Array | None) -> Fragment:
        """Scatter the entries into zeros; see `Average.after`."""
        drawn = self.indices(like, key)
        return {
            path: jnp.zeros(math.prod(like[path].shape), x.dtype)
            .at[drawn[path]]
            .set(x, unique_indices=True)
            .reshape(like[path].shape)
            for path, x in mean.items()
        }

    def mask(self, like: PyTree, key: jax.Array | None) -> dict[str, jax.Array]:
        """Return which entries of a fragment are drawn, bool in its shapes."""
        drawn = self.indices(like, key)
        ones = jax.tree.map(lambda at: jnp.ones(at.size, bool), drawn)
        return self.after(ones, like, key)

    def indices(self, like: PyTree, key: jax.Array | None) -> dict[str, jax.Array]:
        """Draw `max(1, round(density * size))` flat positions of each tensor.

        For the n-th path in alphabetical order, they are the positions of the smallest
        values of `bits(fold_in(key, 65537 * seed + n), size)`.
        """
        assert key is not None
        drawn = {}
        for number, path in enumerate(sorted(like)):
            size = math.prod(like[path].shape)
            tensor_key = jax.random.fold_in(key, (65537 * self.seed + number) % 2**32)
            order = jnp.argsort(jax.random.bits(tensor_key, (size,), jnp.uint32))
            drawn[path] = order[: max(1, round(self.density * size))]
        return drawn

    def check_compressor(self, compressor: Compressor) -> None:
        """Refuse a compressor that keeps state or reads shapes; see `before`."""
        if compressor.needs_model or compressor.init({"w": jnp.zeros(1)}) != ():
            raise ValueError(
                "entries are drawn anew for each message, as flat vectors, and it "
                "remembers what was left of others, or reads a tensor's shape"
            )


def sync_key(fragment_id: int, start_step: int | jax.Array) -> jax.Array:
    """Return the PRNG key of a sync, equal in every region and after a restart."""
    words = jnp.stack([jnp.uint32(fragment_id), jnp.asarray(start_step, jnp.uint32)])
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _unit(x: jax.Array, length: jax.Array) -> jax.Array:
    return x / jnp.where(length > 0, length, 1)


def shares_of(finite: jax.Array) -> jax.Array:
    """Return float32 `[..., 2]`: [1, 0] for a region that counts, else [0, 1].

    Their weighted sums over regions are the `shares` of `rescaled`.
    """
    return jnp.stack([finite, ~finite], axis=-1).astype(jnp.float32)


def rescaled(sums: PyTree, shares: jax.Array) -> PyTree:
    """Rescale weighted sums that leave regions out, so that their weights add up to 1.

    If no region was left out, the result is bitwise the same. If all were, it is NaN.

    Args:
      sums: over regions.
      shares: `[2]`, the weight of the regions in the sums, and of those left out.
    """
    factor = jnp.where(shares[1] > 0, 1 / shares[0], 1)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), sums)
