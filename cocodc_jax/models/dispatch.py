"""Products of tokens with the experts that the router chose for them.

Tokens are sorted by expert, and experts multiply groups of unequal length (MegaBlocks,
Gale et al., arXiv 2211.15841). If an axis of X devices divides the experts
(`Layout.expert`), each device has E / X of them. A device has one row for each of the
N = T k assignments of its T tokens; rows cross to their experts' devices and back:

    rows [X, C, D]  all-to-all  ->  own experts  ->  [X, C, D]  all-to-all  ->  sum

Shapes are static, and no token is dropped; GShard (arXiv 2006.16668, section 3) drops
tokens above a capacity. A device sends another at most C = ceil(1.5 N / X) rows in a
round, and rounds follow until every device has sent all of its rows, at worst X / 1.5
rounds, rounded up. Padding is sent but not multiplied. Every round after the first is
computed again in the backward pass, so memory does not grow with their number.

Shape suffixes here: T tokens, K experts of a token, E experts, D width, F expert width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from cocodc_jax.models.layout import Layout

try:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
except ImportError:  # Experimental modules may disappear.
    tgmm = None

# Rows of a block of one expert's tokens: the most, and the least.
_MOST_ROWS = 128
_LEAST_ROWS = 8
# Sides of a tile of the TPU's kernel; not tuned.
_MOST_TILE = 512
# Rows that a device sends another in a round, over those of an even router; not tuned.
_SPARE = 1.5
# Scope of the rounds that an even router never needs, which `aot.costs` looks for.
FURTHER_ROUND = "further_round"


def mix(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    dispatch: str,
    layout: Layout | None = None,
) -> jax.Array:
    """Return the weighted sum of the outputs of each token's experts, `[T, D]`.

    Args:
      x_TD: the tokens.
      ids_TK: int32, the experts of each token.
      weights_TK: the weight of each expert's output.
      weights: gate `[E, D, F]`, up `[E, D, F]` and down `[E, F, D]`, in x's dtype; with
        `layout.expert` those of the device's own experts.
      dispatch: "ragged" multiplies groups by `jax.lax.ragged_dot`, a kernel on TPUs,
        with Megablox's for the gradient of weights; on other platforms it multiplies
        all tokens by all experts. It has no second derivatives. "blocks" pads groups to
        blocks of equal length.
      layout: how devices share the work; None is a single device.
    """
    if layout is not None and layout.expert is not None:
        return _mix_over(x_TD, ids_TK, weights_TK, weights, dispatch, layout)
    return _weigh(_multiplied(x_TD, ids_TK, weights, dispatch), weights_TK)


def _weigh(out_TKD: jax.Array, weights_TK: jax.Array) -> jax.Array:
    return (out_TKD * weights_TK[..., None].astype(out_TKD.dtype)).sum(axis=1)


def _multiplied(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    dispatch: str,
) -> jax.Array:
    """Return the outputs of each token's experts, `[T, k, D]`.

    Tokens with the index E belong to no expert: "ragged" does not multiply them, and
    their results are undefined.
    """
    gate_EDF, up_EDF, down_EFD = weights
    num_tokens, width = x_TD.shape
    per_token = ids_TK.shape[1]

    flat_N = ids_TK.reshape(-1)
    order_N = jnp.argsort(flat_N, stable=True)
    sizes_E = jnp.bincount(flat_N, length=gate_EDF.shape[0])

    if dispatch == "ragged":
        rows_ND = x_TD[order_N // per_token]
        multiply = functools.partial(_times_ragged, sizes_E=sizes_E)
        place_N = jnp.argsort(order_N)
    else:
        size = _rows_of_a_block(flat_N.size, len(sizes_E))
        place_N, owner_B = _blocks(flat_N, order_N, sizes_E, size)

        # Rows of padding have no token, and are zero.
        from_N = (
            jnp.full(owner_B.size * size, num_tokens)
            .at[place_N]
            .set(jnp.arange(flat_N.size) // per_token, unique_indices=True)
        )
        rows_ND = x_TD.at[from_N].get(mode="fill", fill_value=0)

        def multiply(rows_ND: jax.Array, w_EDF: jax.Array) -> jax.Array:
            blocks_BSD = rows_ND.reshape(owner_B.size, -1, rows_ND.shape[1])
            out_BSF = jnp.einsum("bsd,bdf->bsf", blocks_BSD, w_EDF[owner_B])
            return out_BSF.reshape(rows_ND.shape[0], -1)

    hidden_NF = jax.nn.silu(multiply(rows_ND, gate_EDF)) * multiply(rows_ND, up_EDF)
    return multiply(hidden_NF, down_EFD)[place_N].reshape(-1, per_token, width)


def _mix_over(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    dispatch: str,
    layout: Layout,
) -> jax.Array:
    """Mix as `mix` does, with experts divided over an axis."""
    num_devices = jax.lax.axis_size(layout.expert)
    num_local = len(weights[0])
    num_tokens, per_token = ids_TK.shape
    num_rows = ids_TK.size
    room = rows_of_a_round(num_rows, num_devices)
    device_N, expert_N = jnp.divmod(ids_TK.reshape(-1), num_local)

    # For each row, the number of rows for the same device before it.
    order_N = jnp.argsort(device_N, stable=True)
    counts_X = jnp.bincount(device_N, length=num_devices)
    start_X = jnp.cumsum(counts_X) - counts_X
    rank_N = jnp.argsort(order_N) - start_X[device_N]

    cross = functools.partial(
        jax.lax.all_to_all,
        axis_name=layout.expert,
        split_axis=0,
        concat_axis=0,
        tiled=True,
    )
    # Only "ragged" leaves out rows of no expert; elsewhere they are zero.
    no_expert = num_local if dispatch == "ragged" else num_local - 1

    def send(
        number: int | jax.Array,
        x_TD: jax.Array,
        weights_TK: jax.Array,
        weights: tuple[jax.Array, jax.Array, jax.Array],
    ) -> jax.Array:
        """Return the contribution of one round's rows to the mixture."""
        place_N = rank_N - room * number
        is_sent_N = (place_N >= 0) & (place_N < room)
        place_N = jnp.where(is_sent_N, device_N * room + place_N, num_devices * room)
        from_S = (
            jnp.full(num_devices * room, num_rows)
            .at[place_N]
            .set(jnp.arange(num_rows), mode="drop")
        )

        rows_SD = jnp.pad(x_TD, ((0, 1), (0, 0)))[from_S // per_token]
        ids_S = expert_N.at[from_S].get(mode="fill", fill_value=no_expert)
        out_SKD = _multiplied(cross(rows_SD), cross(ids_S)[:, None], weights, dispatch)
        out_ND = cross(out_SKD[:, 0]).at[place_N].get(mode="fill", fill_value=0)
        return _weigh(out_ND.reshape(num_tokens, per_token, -1), weights_TK)

    operands = (x_TD, weights_TK, weights)
    mixed_TD = send(0, *operands)
    most_rounds = -(-num_rows // room)
    if most_rounds == 1:
        return mixed_TD

    # Equal on all devices of the region: those without further rows must answer too.
    needed = jax.lax.pmax(-(-counts_X.max() // room), layout.tokens)

    def nothing(x_TD: jax.Array, *_: Any) -> jax.Array:
        return jnp.zeros_like(x_TD)

    def follow(*operands: Any) -> jax.Array:
        @jax.checkpoint
        def again(number: jax.Array, mixed_TD: jax.Array) -> jax.Array:
            send_one = functools.partial(send, number)
            return mixed_TD + jax.lax.cond(
                number < needed, send_one, nothing, *operands
            )

        return jax.lax.fori_loop(1, most_rounds, again, nothing(*operands))

    # One condition around the loop, which would add zeros, also to gradients.
    @jax.checkpoint
    def further(*operands: Any) -> jax.Array:
        with jax.named_scope(FURTHER_ROUND):
            return jax.lax.cond(needed > 1, follow, nothing, *operands)

    return mixed_TD + further(*operands)


def rows_of_a_round(num_rows: int, num_devices: int) -> int:
    """Return the most rows that a device sends to each of an axis in a round.

    >>> rows_of_a_round(64, 4), rows_of_a_round(64, 1), rows_of_a_round(2**18, 8)
    (24, 64, 49152)
    """
    room = math.ceil(_SPARE * num_rows / num_devices)
    unit = _LEAST_ROWS if room < 8 * _MOST_TILE else _MOST_TILE
    return min(-(-room // unit) * unit, num_rows)


@jax.custom_vjp
def _times_ragged(rows_NK: jax.Array, w_EKF: jax.Array, sizes_E: jax.Array):
    """Multiply groups of rows; JAX's own gradient of weights is dense on TPUs."""
    return jax.lax.ragged_dot(rows_NK, w_EKF, sizes_E)


def _ragged_backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], grad_NF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows_NK, w_EKF, sizes_E = residuals
    grad_NK = jax.lax.ragged_dot(grad_NF, w_EKF.swapaxes(1, 2), sizes_E)
    grad_EKF = _sum_by_group(rows_NK, grad_NF, sizes_E)
    return grad_NK.astype(rows_NK.dtype), grad_EKF.astype(w_EKF.dtype), None


_times_ragged.defvjp(lambda *args: (_times_ragged(*args), args), _ragged_backward)


def _sum_by_group(rows_NK: jax.Array, grad_NF: jax.Array, sizes_E: jax.Array):
    """Return the product rows^T grad of each group, `[E, K, F]`, summed in float32."""
    dtype = jnp.promote_types(rows_NK.dtype, jnp.float32)
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    plain = functools.partial(
        jax.lax.ragged_dot_general,
        ragged_dot_dimension_numbers=numbers,
        preferred_element_type=dtype,
    )

    tile = math.gcd(len(rows_NK), _MOST_TILE)
    if tgmm is None or tile < _LEAST_ROWS:
        return plain(rows_NK, grad_NF, sizes_E)

    tiling = (tile, _MOST_TILE, _MOST_TILE)
    kernel = functools.partial(tgmm, preferred_element_type=dtype, tiling=tiling)
    return jax.lax.platform_dependent(
        rows_NK,
        grad_NF,
        sizes_E,
        tpu=lambda rows_NK, *rest: kernel(rows_NK.T, *rest),
        default=plain,
    )


def _rows_of_a_block(num_rows: int, num_experts: int) -> int:
    """Return the rows of a block, a power of two.

    Padding is at most half of the rows, or eight rows an expert.

    >>> _rows_of_a_block(1024, 8), _rows_of_a_block(16, 8), _rows_of_a_block(10**6, 8)
    (64, 8, 128)
    """
    half = max(num_rows // (2 * num_experts), 1)
    return min(max(1 << (half.bit_length() - 1), _LEAST_ROWS), _MOST_ROWS)


def _blocks(
    flat_N: jax.Array, order_N: jax.Array, sizes_E: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the row of each assignment, and the expert of each block of rows."""
    num_experts = len(sizes_E)
    num_blocks = -(-flat_N.size // size) + num_experts
    blocks_E = -(-sizes_E // size)

    # Where each expert's rows begin, with padding and without.
    first_E = (jnp.cumsum(blocks_E) - blocks_E) * size
    start_E = jnp.cumsum(sizes_E) - sizes_E
    sorted_N = flat_N[order_N]
    rows_N = first_E[sorted_N] + jnp.arange(flat_N.size) - start_E[sorted_N]
    place_N = jnp.zeros_like(rows_N).at[order_N].set(rows_N, unique_indices=True)

    ids_E = jnp.arange(num_experts)
    return place_N, jnp.repeat(ids_E, blocks_E, total_repeat_length=num_blocks)
