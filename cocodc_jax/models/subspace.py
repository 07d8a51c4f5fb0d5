"""A residual stream whose trained part stays in a subspace: k numbers represent D.

With U [D, k] orthonormal and fixed, P = U U^T, and x_l(t) the residual stream of a
position with token t, kept by construction for every layer l:

    x_l(t) - fixed(t)  in  span(U),      fixed(t) = (I - P) embedding[t]

A pipeline stage therefore sends c = U^T x_l and the token, and the next stage computes
x_l = U c + fixed(t), up to rounding. That is D / k times fewer bytes forward, and
backward, where dL/dc = U^T dL/dx. Every matrix that writes to the stream (attention
output, MLP down) keeps its rows in span(U), and the embedding moves only in span(U):

    before the optimizer:  g <- g P                       (of these three)
    after it:              W + u <- (W + u) P,  and  u <- u P for the embedding

The loss, and the gradients after the first line, are those of the plain model: the part
of a gradient that P removes at a stage's border affects only the parts of these three
gradients that P removes too.

Source: Protocol Models (Ramasinghe et al., arXiv 2506.01260); the split of the
embedding, which matrices are projected and what is sent as read from the authors'
published code (Node0).
Differs from it:
- The embedding is one array, whose part outside of the subspace is fixed. The authors
  add a trained table in span(U) to a random one, which is the same split.
- All layers are confined; theirs leave the last two free, as nothing is sent after
  them. Here the stages divide the result of the last stage, which is sent in U as well.
- With tied embeddings the head moves in span(U) with the table; theirs is untied, so
  `tie_embeddings=False` is nearer. Norm scales and an untied head are free.
- Matrices are projected at the start too (which makes them sqrt(k / D) as long), and
  the optimizer sees projected gradients, so that a run does not depend on where stages
  are cut. AdamW's elementwise division leaves the subspace; that part is cut off, as in
  the published code. The paper has one second moment a row instead (from memory).
- U is drawn once and never changes (the paper changes it rarely, from memory).

An average of confined parameters is confined. Parameters that regions quantize or cut
are not, until the next inner step: stages do not send the part outside.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cocodc_jax.models.config import WRITERS

# Parameters whose changes stay in the subspace; the width is their last axis.
_SPLIT = ("embedding",)


@dataclasses.dataclass(frozen=True)
class Subspace:
    """A fixed subspace of the residual stream.

    Attributes:
      width: D, features of the residual stream.
      rank: k, dimensions of the subspace. The paper has D / 40 to D / 100.
      seed: of the basis.
    """

    width: int
    rank: int
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.rank <= self.width:
            raise ValueError(
                f"stage_subspace={self.rank} must be at least 1 and at most the "
                f"model's width={self.width}; or 0 for none"
            )

    @property
    def is_whole(self) -> bool:
        """Whether it is the full space, so that nothing is confined."""
        return self.rank == self.width

    @functools.cached_property
    def basis(self) -> np.ndarray:
        """U, float32 [D, k] with orthonormal columns; the identity if k = D."""
        if self.is_whole:
            return np.eye(self.width, dtype=np.float32)
        drawn = np.random.default_rng(self.seed).normal(size=(self.width, self.rank))
        return np.linalg.qr(drawn)[0].astype(np.float32)

    def project(self, x: jax.Array) -> jax.Array:
        """Return `x P` for rows on the last axis, [..., D]."""
        # As a TPU multiplies by default, parameters would be rounded to bfloat16.
        times = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        return times(times(x, self.basis), self.basis.T)

    def encode(self, x_BLD: jax.Array) -> jax.Array:
        """Return `U^T x`, which stages send, [B, L, k] in the dtype of x."""
        coded = jnp.matmul(
            x_BLD, self.basis.astype(x_BLD.dtype), preferred_element_type=jnp.float32
        )
        return coded.astype(x_BLD.dtype)

    def decode(
        self, coded_BLk: jax.Array, embedding_VD: jax.Array, tokens_BL: jax.Array
    ) -> jax.Array:
        """Return the residual stream, `U c + fixed(t)`, [B, L, D] in the dtype of c.

        The tokens are the model's inputs at these positions. The fixed part has no
        gradient.
        """
        rows_BLD = jax.lax.stop_gradient(embedding_VD)[tokens_BL]
        fixed_BLD = rows_BLD - self.project(rows_BLD)
        written_BLD = jnp.matmul(
            coded_BLk,
            self.basis.T.astype(coded_BLk.dtype),
            preferred_element_type=jnp.float32,
        )
        return (written_BLD + fixed_BLD).astype(coded_BLk.dtype)


def confine(params: Any, subspace: Subspace) -> Any:
    """Return parameters whose writing matrices are in the subspace."""
    return _at(WRITERS, subspace.project, params)


def confined(
    optimizer: optax.GradientTransformation, subspace: Subspace
) -> optax.GradientTransformation:
    """Keep an optimizer's steps in the subspace; the state is the optimizer's.

    Its `update` needs `params`, to project the parameters after the step; the updates
    are those that are added to parameters. For the full space, return the optimizer
    itself.
    """
    if subspace.is_whole:
        return optimizer

    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("params=None: a confined optimizer projects what they add")

        confined_gradients = _at(WRITERS + _SPLIT, subspace.project, updates)
        steps, state = inner.update(confined_gradients, state, params, **extra)

        def confined_step(step: jax.Array, param: jax.Array) -> jax.Array:
            return subspace.project(param + step) - param

        steps = _at(_SPLIT, subspace.project, steps)
        steps = _at(WRITERS, confined_step, steps, params)
        return steps, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _at(names: tuple[str, ...], change: Callable, tree: Any, *others: Any) -> Any:
    """Change the leaves of some names, with their counterparts in other trees."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x, *rest: change(x, *rest) if path[-1].key in names else x,
        tree,
        *others,
    )
