"""Keep a compressor's errors, and send them later.

    e <- decay * e + x;   message = C(e);   e <- e - decoded message

With decay 1 nothing is ever lost: the sum of the decoded messages plus the residual
equals the sum of the inputs x, so if the residual stays bounded the means agree. A
decay below 1 forgets old errors (SparseLoCo uses 0.95). A call with numbers that are
not finite leaves the residual as it was (`compressor.keep_finite`).

Source: Karimireddy et al., arXiv 1901.09847. Decay 1 is also DiLoCoX's (arXiv
2506.21263, from memory, unchecked); a decay below 1 is SparseLoCo's (arXiv 2508.15706)
and MuLoCo's (arXiv 2505.23725, 0.9), as read from the authors' code.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cocodc_jax.transforms.compressor import (
    Compressor,
    check_compressor,
    check_state,
    keep_finite,
)
from cocodc_jax.transforms.numerics import cast_like, check_between, wide_zeros, widen

_NAME = "error_feedback"


class ErrorFeedbackState(NamedTuple):
    """Memory of `error_feedback`."""

    # tree like the one compressed, float32 or wider, what is not yet sent.
    residual: Any
    inner: Any  # Memory of the inner compressor.


def error_feedback(inner: Compressor, decay: float | jax.Array = 1.0) -> Compressor:
    """Wrap a compressor so that its errors are sent with later messages.

    Args:
      inner: any compressor.
      decay: b, share of the residual that is kept from one call to the next, in [0, 1].

    Raises:
      ValueError: if `inner` has an error feedback.

    >>> import jax.numpy as jnp
    >>> from cocodc_jax.transforms.sparsify import top_k
    >>> compressor = error_feedback(top_k(density=0.5))
    >>> meant = jnp.array([3.0, 2.0])
    >>> memory = compressor.init(meant)
    >>> for _ in range(2):
    ...     message, memory = compressor.encode(meant, memory)
    ...     print(compressor.decode(message), memory.residual)
    [3. 0.] [0. 2.]
    [0. 4.] [3. 0.]
    """
    check_between("decay", decay, 0, 1)
    check_compressor("inner", inner)
    check_no_feedback(inner)

    def init(tree: Any) -> ErrorFeedbackState:
        residual = jax.tree.map(wide_zeros, tree)
        return ErrorFeedbackState(residual, inner.init(tree))

    def residuals_of(memory: ErrorFeedbackState) -> list[Any]:
        return jax.tree.leaves(memory.residual)

    def encode(
        tree: Any, memory: Any, key: jax.Array | None = None
    ) -> tuple[Any, ErrorFeedbackState]:
        shapes = [jnp.shape(x) for x in jax.tree.leaves(tree)]
        check_state(name, memory, ErrorFeedbackState, residuals_of, tree, shapes)

        # Encoded in the tree's dtype, which decode restores; the residual also keeps
        # what this cast loses.
        meant = jax.tree.map(lambda e, x: decay * e + widen(x), memory.residual, tree)
        message, inner_memory = inner.encode(cast_like(meant, tree), memory.inner, key)
        sent = inner.decode(message)
        residual = jax.tree.map(lambda e, x: e - widen(x), meant, sent)
        return message, ErrorFeedbackState(residual, inner_memory)

    # Of the kind of the inner one: its messages can be read as before.
    name = f"{_NAME}({inner.name})"
    return keep_finite(dataclasses.replace(inner, name=name, init=init, encode=encode))


def check_no_feedback(compressor: Compressor) -> None:
    """Refuse error feedback inside of error feedback, also in a part."""
    if f"{_NAME}(" in compressor.name:
        raise ValueError(
            f"compress={compressor.name!r} adds error feedback where there is one "
            "already, which would send what is lost twice; leave out 'ef+'"
        )
