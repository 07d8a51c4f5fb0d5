"""Muon for a transformer's tree: each layer's matrices on their own, Adam elsewhere.

Under `blocks`, every matrix [in, out], or every layer's of a scanned stack
[layers, in, out], with gradient G:

    B <- beta B + G;   W <- W - lr (sqrt(out / in) UV' + wd W)

UV' the polar factor of B, its singular values made about equal by five Newton-Schulz
iterations. sqrt(out / in) makes the largest change of an output's root mean square
the same for every shape. A square matrix of width d moves by a root mean square of lr /
sqrt(d), far less than with Adam in a wide model, so its learning rate must be larger
(the authors' default is 0.02). All other leaves have AdamW with b2 = 0.99.

Source: Muon, Jordan et al. 2024, by `optax.contrib.scale_by_muon`, which is given the
axes of matrices. The numbers are MuLoCo's (arXiv 2505.23725), read from the authors'
code: momentum 0.9 without Nesterov, no lower bound of 1 on the scale (Jordan has one),
and the choice of tensors. Differs from that code: the iterations have Jordan's
coefficients and are in float32; there they have five sets of coefficients and bfloat16.
"""

import functools
import inspect
import logging

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from cocodc_jax.transforms.layers import BLOCKS, is_block, is_matrix, path_of
from cocodc_jax.transforms.numerics import check_unit_interval, descend

_logger = logging.getLogger(__name__)

# Until Optax 0.2.6 `scale_by_muon` multiplies by sqrt(max(1, out / in)) itself. The
# version that took the factor out gave `muon` the argument `consistent_rms`.
_SCALES_ITSELF = "consistent_rms" not in inspect.signature(contrib.muon).parameters

B2 = 0.99
"""Decay of the second moment of the Adam beside Muon."""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array = 0.1,
    momentum: float | jax.Array = 0.9,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = B2,
    blocks: str = BLOCKS,
) -> optax.GradientTransformation:
    """Build Muon for matrices below `blocks` and AdamW for everything else.

    The state is arrays only, so a step can be mapped over regions.

    Args:
      learning_rate: of both, a number or a schedule.
      weight_decay: of both, in units of the learning rate; every leaf decays.
      momentum: of Muon.
      b1: of Adam.
      b2: of Adam.
      blocks: key of the blocks in the parameter tree; without it AdamW has all leaves.

    Returns:
      A transformation to the step to add; `update` needs `params`.
    """
    for name, decay in (("momentum", momentum), ("b1", b1), ("b2", b2)):
        check_unit_interval(name, decay)

    def whose(params):
        labels = jax.tree_util.tree_map_with_path(
            lambda path, x: "muon" if _axes(path, x, blocks) else "adam", params
        )
        if "muon" not in jax.tree.leaves(labels):
            _say_all_is_adams(blocks)
        return labels

    return optax.partition(
        {
            "muon": optax.chain(
                contrib.scale_by_muon(
                    beta=momentum,
                    nesterov=False,
                    mu_dtype=jnp.float32,
                    weight_dimension_numbers=lambda tree: matrix_axes(tree, blocks),
                ),
                optax.stateless(lambda *trees: jax.tree.map(_scaled, *trees)),
                optax.add_decayed_weights(weight_decay),
                descend(learning_rate),
            ),
            "adam": optax.adamw(learning_rate, b1, b2, weight_decay=weight_decay),
        },
        whose,
    )


@functools.cache
def _say_all_is_adams(blocks):
    """Warn once that Muon has no leaf."""
    _logger.warning(
        "muon finds no matrix below blocks=%r, so that all parameters are AdamW's; "
        "pass blocks=NAME, the part of their paths that has the blocks below it",
        blocks,
    )


def _scaled(step, param):
    """Multiply matrices [..., in, out] by sqrt(out / in), in the parameter's dtype."""
    fan_in, fan_out = step.shape[-2:]
    ratio = fan_out / max(fan_in, 1)
    scale = jnp.sqrt(ratio / max(ratio, 1) if _SCALES_ITSELF else ratio)
    return (step * scale.astype(step.dtype)).astype(param.dtype)


def matrix_axes(params, blocks: str = BLOCKS):
    """Return which leaves are matrices, and their axes.

    `params` has the key `blocks`: the leaves of all layers stacked along a leading
    axis, or a dict or list from layer number to a layer's leaves. The result is a tree
    like it: the last two axes of each matrix, and None for leaves of Adam.

    >>> import jax.numpy as jnp
    >>> stacked = {"query": jnp.ones((3, 4, 5)), "norm": jnp.ones((3, 4))}
    >>> axes = matrix_axes({"blocks": stacked, "head": jnp.ones((4, 9))})
    >>> print(axes["head"], axes["blocks"]["norm"])
    None None
    >>> axes["blocks"]["query"]
    MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    """
    return jax.tree_util.tree_map_with_path(lambda p, x: _axes(p, x, blocks), params)


def _axes(path, x, blocks):
    name = path_of(path)
    if not is_block(name, blocks) or not is_matrix(name, x.ndim, blocks):
        return None
    return contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
