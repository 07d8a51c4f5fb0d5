"""A residual stream whose trained part stays in a subspace, so that k numbers tell d.

With U [D, k] orthonormal and fixed, P = U U^T, and x_l(t) the residual stream of a
position with token t, kept by construction for every layer l:

    x_l(t) - fixed(t)  in  span(U),      fixed(t) = (I - P) embedding[t]

A pipeline stage therefore hands on c = U^T x_l and the token, and the next one has
x_l = U c + fixed(t) to rounding: D / k times fewer bytes ahead, and back, where dL/dc =
U^T dL/dx. Every matrix that writes to the stream (attention output, MLP down) keeps its
rows in span(U), and the embedding moves in span(U) only:

    before the optimizer:  g <- g P                       (the three of them)
    after it:              W + u <- (W + u) P,  and  u <- u P for the embedding

The loss, and the gradient after the first line, are those of the plain model: what P
takes from a gradient at a stage's border reaches only what P takes from those three.

Source: Protocol Models (Ramasinghe et al., arXiv 2506.01260); the split of the
embedding, which matrices are projected and what is sent as read from the authors'
published code (Node0).
Differs from it:
- The embedding is one array, whose fixed part is what of it is outside of the subspace.
  The authors add a trained table in span(U) to a random one: the same split.
- All layers are confined; theirs leave the last two free, as nothing is sent after
  them. Here the last stage shares its result out among the stages, in U as well.
- With tied embeddings the head moves in span(U) with the table; theirs is untied, so
  `tie_embeddings=False` is nearer. Norm scales and an untied head are free.
- Matrices are projected at the start too (which makes them sqrt(k / D) as long), and
  the optimizer sees projected gradients, so that a run does not depend on where stages
  are cut. What AdamW's elementwise division takes out of the subspace is cut off, as in
  the published code; the paper has one second moment a row instead (from memory).
- U is drawn once and never moves (the paper moves it rarely, from memory).

An average of confined parameters is confined. What is quantized or cut between regions
is not until the next inner step: what is outside does not cross between stages.
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

# Whose changes are kept in the subspace; of writers the rows (last axis, the width).
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
        """Whether it is the whole space, so that nothing is confined."""
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
        """Return what is sent of the residual stream, `U^T x`, [B, L, k] as x."""
        coded = jnp.matmul(
            x_BLD, self.basis.astype(x_BLD.dtype), preferred_element_type=jnp.float32
        )
        return coded.astype(x_BLD.dtype)

    def decode(
        self, coded_BLk: jax.Array, embedding_VD: jax.Array, tokens_BL: jax.Array
    ) -> jax.Array:
        """Return the residual stream again, `U c + fixed(t)`, [B, L, D] in c's dtype.

        The tokens are those that entered the model here. Through the fixed part no
        gradient goes.
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
    """Keep an optimizer's steps in the subspace; the state is the optimizer's own.

    Its updates are those that are added to parameters, and its `update` needs `params`,
    to project what they will be. The whole space returns the optimizer itself.
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
