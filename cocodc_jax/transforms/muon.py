"""Muon for a transformer's tree: each layer's matrices on their own, Adam elsewhere.

Under `blocks`, every matrix [in, out], or every layer's of a scanned stack
[layers, in, out], moves by its momentum with all singular values made about equal
(Newton-Schulz), times 0.2 sqrt(max(in, out)): the size of an Adam step, so that one
learning rate serves both. Embedding, head, norms and other vectors take NAdam.

Muon: Jordan et al. 2024 in `optax.contrib.muon`, here told which axes are matrices; the
size: Liu et al., arXiv 2502.16982. Inside DiLoCo: MuLoCo, arXiv 2505.23725. Differs
from the paper: MuLoCo's Muon (as read from the authors' code) has momentum 0.9 without
Nesterov, a learning rate times sqrt(out / in) and AdamW with b2 = 0.99 for the rest.
"""

import jax
import optax
from optax import contrib


def muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array = 0.1,
    momentum: float | jax.Array = 0.95,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    blocks: str = "blocks",
) -> optax.GradientTransformation:
    """Build Muon for matrices below `blocks` and Adam for everything else.

    The state is arrays only, so a step can be mapped over regions.

    Args:
      learning_rate: of both, a number or a schedule.
      weight_decay: of both, in units of the learning rate; every leaf decays.
      momentum: of Muon.
      b1: of Adam.
      b2: of Adam.
      blocks: key of the blocks in the parameter tree.

    Returns:
      A transformation to the step to add; `update` needs `params`.
    """
    return contrib.muon(
        learning_rate,
        beta=momentum,
        weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        adam_weight_decay=weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: matrix_axes(params, blocks),
    )


def matrix_axes(params, blocks: str = "blocks"):
    """Tell which leaves are matrices, and in which axes.

    Args:
      params: tree with `blocks` as a key: the stacked leaves of all layers with a
        leading layer axis, or a dict or list from layer number to a layer's leaves.
      blocks: that key.

    Returns:
      A tree like `params`: the last two axes of each matrix, further axes before them
      being a stack of matrices, and None where Adam is meant.

    >>> import jax.numpy as jnp
    >>> stacked = {"query": jnp.ones((3, 4, 5)), "norm": jnp.ones((3, 4))}
    >>> axes = matrix_axes({"blocks": stacked, "head": jnp.ones((4, 9))})
    >>> print(axes["head"], axes["blocks"]["norm"])
    None None
    >>> axes["blocks"]["query"]
    MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    """

    def axes(path, x):
        names = [str(_key(entry)) for entry in path]
        if blocks not in names:
            return None
        after = names[names.index(blocks) + 1 :]
        is_stacked = not (after and after[0].isdecimal())
        if x.ndim - is_stacked < 2:
            return None
        return contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    return jax.tree_util.tree_map_with_path(axes, params)


def _key(entry):
    """Name a step along a path: of a dict, a list or an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
