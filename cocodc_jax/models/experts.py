"""A mixture of experts in place of a block's feed-forward.

A router gives each token x to its k best of E experts, each a SwiGLU:

    p = softmax(x R)                    float32, over all experts
    y = sum over the k largest of  p_e / (sum of these p) expert_e(x)

No token is dropped: tokens are sorted by expert, and experts multiply groups of unequal
length (MegaBlocks, Gale et al., arXiv 2211.15841). With f_e the share of all
assignments that expert e got, two losses keep the router in order:

    balance   E sum_e f_e mean(p_e)     1 if all get the same (Switch, arXiv 2101.03961,
              section 2.2; there for k = 1)
    z         mean of logsumexp(x R)^2  (ST-MoE, arXiv 2202.08906, section 2.2)

Both are means over the layers with experts. They change gradients only: a run's loss is
the cross-entropy alone, so that losses of all models can be compared.

`experts/tokens` is no weight. It counts what each expert was given, in batches: the
loss has the gradient -(share of the batch's tokens) there, and `counting` adds that up.
So the count is part of a region's parameters: it is reset where they are replaced by
outer ones, kept with the share of the region's own progress that a merge keeps, stored
in checkpoints, and sent with the pseudo-gradients of its experts
(`sync.expert_mean`). The unit is so small that the count does not show in norms.

Weights of the k best are renormalised as in Mixtral (arXiv 2401.04088, section 2.1) and
Qwen3 (from memory).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax._extras import extra
from cocodc_jax.expert_leaves import TOKEN_UNIT, is_token_count
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.layout import (
    Layout,
    gather,
    scatter,
    shared,
    sum_over,
    summed,
)

with extra("train"):
    from flax import nnx

try:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
except ImportError:  # Of experimental modules none stays for ever.
    tgmm = None

# Rows of a block of one expert's tokens: at most, and at least.
_MOST_ROWS, _LEAST_ROWS = 128, 8
# Sides of a tile of the TPU's kernel; not tuned.
_MOST_TILE = 512


class Routed(NamedTuple):
    """What a router did with a batch; means over the batch's tokens.

    With a `Layout`, what the device's tokens add to the means over the region's.

    Attributes:
      balance: the load-balancing loss.
      z: the z loss.
      entropy: of the router's distribution, in nats.
      load: `[E]`, share of the tokens that each expert got; of sum k.
      counted: zero, with the gradient that `counting` adds up.
    """

    balance: jax.Array
    z: jax.Array
    entropy: jax.Array
    load: jax.Array
    counted: jax.Array


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
      ids: int32 `[T, k]`, best first.
      weights: `[T, k]`, of sum 1.
      probs: `[T, E]`, the router's distribution.
      logits: `[T, E]`.
    """

    ids: jax.Array
    weights: jax.Array
    probs: jax.Array
    logits: jax.Array


def choose(x_TD: jax.Array, router_DE: jax.Array, per_token: int) -> Choice:
    """Choose each token's experts, in float32 or wider."""
    logits_TE = jnp.matmul(
        x_TD.astype(router_DE.dtype), router_DE, precision=jax.lax.Precision.HIGHEST
    )
    probs_TE = jax.nn.softmax(logits_TE, axis=-1)
    best_TK, ids_TK = jax.lax.top_k(probs_TE, per_token)
    weights_TK = best_TK / best_TK.sum(axis=-1, keepdims=True)
    return Choice(ids_TK, weights_TK, probs_TE, logits_TE)


def mix(
    x_TD: jax.Array,
    ids_TK: jax.Array,
    weights_TK: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    dispatch: str,
) -> jax.Array:
    """Return the weighted sum of what each token's experts give, `[T, D]`.

    Args:
      x_TD: tokens.
      ids_TK: int, the experts of each.
      weights_TK: of the experts.
      weights: gate `[E, D, F]`, up `[E, D, F]` and down `[E, F, D]`, in x's dtype.
      dispatch: "ragged" multiplies groups by `jax.lax.ragged_dot`, a kernel on TPUs,
        with Megablox's for the gradient of weights; elsewhere it multiplies all tokens
        by all experts. It has no second derivatives. "blocks" pads groups to blocks of
        equal length, each multiplied by its expert's weights.
    """
    gate_EDF, up_EDF, down_EFD = weights
    (num_tokens, width), per_token = x_TD.shape, ids_TK.shape[1]
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
        multiply = functools.partial(_times_owner, owner_B=owner_B)
    hidden_NF = jax.nn.silu(multiply(rows_ND, gate_EDF)) * multiply(rows_ND, up_EDF)
    out_NKD = multiply(hidden_NF, down_EFD)[place_N].reshape(-1, per_token, width)
    return (out_NKD * weights_TK[..., None].astype(x_TD.dtype)).sum(axis=1)


@jax.custom_vjp
def _times_ragged(rows_NK: jax.Array, w_EKF: jax.Array, sizes_E: jax.Array):
    """Multiply groups of rows; JAX's own gradient of weights is dense on TPUs."""
    return jax.lax.ragged_dot(rows_NK, w_EKF, sizes_E)


def _ragged_backward(kept, grad_NF):
    rows_NK, w_EKF, sizes_E = kept
    grad_NK = jax.lax.ragged_dot(grad_NF, w_EKF.swapaxes(1, 2), sizes_E)
    grad_EKF = _sum_by_group(rows_NK, grad_NF, sizes_E)
    return grad_NK.astype(rows_NK.dtype), grad_EKF.astype(w_EKF.dtype), None


_times_ragged.defvjp(lambda *args: (_times_ragged(*args), args), _ragged_backward)


def _sum_by_group(rows_NK: jax.Array, grad_NF: jax.Array, sizes_E: jax.Array):
    """Return the product rows^T grad of each group, `[E, K, F]`, summed in float32."""
    dtype = jnp.promote_types(rows_NK.dtype, jnp.float32)
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())

    def plain(rows_NK, grad_NF, sizes_E):
        return jax.lax.ragged_dot_general(
            rows_NK, grad_NF, sizes_E, numbers, preferred_element_type=dtype
        )

    def kernel(rows_NK, grad_NF, sizes_E):
        assert tgmm is not None
        return tgmm(
            rows_NK.T,
            grad_NF,
            sizes_E,
            preferred_element_type=dtype,
            tiling=(tile, _MOST_TILE, _MOST_TILE),
        )

    tile = math.gcd(len(rows_NK), _MOST_TILE)
    if tgmm is None or tile < _LEAST_ROWS:
        return plain(rows_NK, grad_NF, sizes_E)
    return jax.lax.platform_dependent(
        rows_NK, grad_NF, sizes_E, tpu=kernel, default=plain
    )


def _rows_of_a_block(num_rows: int, num_experts: int) -> int:
    """Return a power of two: padding is at most half of the rows, or eight an expert.

    >>> _rows_of_a_block(1024, 8), _rows_of_a_block(16, 8), _rows_of_a_block(10**6, 8)
    (64, 8, 128)
    """
    half = max(num_rows // (2 * num_experts), 1)
    return min(max(1 << (half.bit_length() - 1), _LEAST_ROWS), _MOST_ROWS)


def _blocks(flat_N, order_N, sizes_E, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the row of each assignment, and the expert of each block of rows."""
    num_experts = len(sizes_E)
    num_blocks = -(-flat_N.size // size) + num_experts
    blocks_E = -(-sizes_E // size)
    first_E = (jnp.cumsum(blocks_E) - blocks_E) * size
    start_E = jnp.cumsum(sizes_E) - sizes_E
    sorted_N = flat_N[order_N]
    rows_N = first_E[sorted_N] + jnp.arange(flat_N.size) - start_E[sorted_N]
    place_N = jnp.zeros_like(rows_N).at[order_N].set(rows_N, unique_indices=True)
    owner_B = jnp.repeat(
        jnp.arange(num_experts), blocks_E, total_repeat_length=num_blocks
    )
    return place_N, owner_B


def _times_owner(rows_ND: jax.Array, w_EDF: jax.Array, owner_B: jax.Array):
    blocks_BSD = rows_ND.reshape(owner_B.size, -1, rows_ND.shape[1])
    out_BSF = jnp.einsum("bsd,bdf->bsf", blocks_BSD, w_EDF[owner_B])
    return out_BSF.reshape(rows_ND.shape[0], -1)


class Experts(nnx.Module):
    """The weights of E experts, and how often each was used."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, residual: float):
        number, width = config.num_experts, config.width
        self.gate = _drawn(rngs, (number, width, config.expert_width))
        self.up = _drawn(rngs, (number, width, config.expert_width))
        self.down = _drawn(rngs, (number, config.expert_width, width), residual)
        self.tokens = nnx.Param(jnp.zeros(number, jnp.float32))

    def weights(
        self, dtype: Any, layout: Layout | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gate, up and down in `dtype`, gathered over the tokens' axes."""

        def whole(w: nnx.Param, side: int) -> jax.Array:
            if layout is None:
                return w[...].astype(dtype)
            return _gathered(w[...], dtype, side, layout)

        return whole(self.gate, 1), whole(self.up, 1), whole(self.down, 2)


class MixtureOfExperts(nnx.Module):
    """A router, its experts, and experts that every token passes."""

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        residual: float,
        layout: Layout | None = None,
    ):
        self.router = _drawn(rngs, (config.width, config.num_experts))
        self.experts = Experts(config, rngs, residual)
        self.config, self.layout = config, layout

    def __call__(self, x_BLD: jax.Array) -> tuple[jax.Array, Routed]:
        """Map each position by its experts; the first result is `[B, L, D]`."""
        config, layout = self.config, self.layout
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        choice = choose(x_TD, self.router[...], config.experts_per_token)
        # The router's own path is complete on every device of the model axis, that of
        # the experts a sum over these.
        out_TD = mix(
            shared(x_TD, layout),
            choice.ids,
            shared(choice.weights, layout),
            self.experts.weights(x_TD.dtype, layout),
            config.expert_dispatch,
        )
        return summed(out_TD, layout).reshape(x_BLD.shape), self._routed(choice)

    def _routed(self, choice: Choice) -> Routed:
        layout, number = self.layout, self.config.num_experts
        devices = 1 if layout is None else jax.lax.axis_size(layout.tokens)
        share = 1 / (choice.ids.shape[0] * devices)
        load_E = share * jnp.bincount(choice.ids.reshape(-1), length=number).astype(
            choice.probs.dtype
        )
        load_E = jax.lax.stop_gradient(load_E)
        whole_E = load_E if layout is None else sum_over(load_E, layout.tokens)
        mean_E = share * choice.probs.sum(axis=0)
        log_total_T = jax.nn.logsumexp(choice.logits, axis=-1)
        log_probs_TE = choice.logits - log_total_T[:, None]
        return Routed(
            balance=number / self.config.experts_per_token * (whole_E * mean_E).sum(),
            z=share * jnp.square(log_total_T).sum(),
            entropy=-share * jax.lax.stop_gradient(choice.probs * log_probs_TE).sum(),
            load=load_E,
            counted=-(self.experts.tokens[...] * load_E).sum(),
        )


def router_loss(config: TransformerConfig, routed: Routed) -> jax.Array:
    """Return a term that is zero and whose gradient the router and the counts get.

    Args:
      config: the model.
      routed: of all layers with experts, leaves `[layers, ...]`.
    """
    losses = (
        config.balance_loss * routed.balance.mean()
        + config.router_z_loss * routed.z.mean()
        + routed.counted.sum()
    )
    return losses - jax.lax.stop_gradient(losses)


def router_aux(routed: Routed) -> dict[str, jax.Array]:
    """Return what is reported of a batch: means over layers, and every layer's load.

    Args:
      routed: of all layers with experts, leaves `[layers, ...]`; of the region.

    Returns:
      `router_balance`, `router_z` and `router_entropy` (nats), float32 scalars, and
      `expert_load` `[layers, E]`.
    """
    return {
        "router_balance": routed.balance.mean(),
        "router_z": routed.z.mean(),
        "router_entropy": routed.entropy.mean(),
        "expert_load": routed.load,
    }


def counting(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Let an optimizer train a model with experts, and add up their token counts.

    Args:
      optimizer: any, its updates those that are added to the parameters. It sees
        gradients of zero in place of counts.

    Returns:
      A transformation with the optimizer's own state.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(updates, state, params=None, **extra):
        steps, state = inner.update(
            _at_counts(jnp.zeros_like, updates), state, params, **extra
        )
        return _at_counts(lambda _, g: -TOKEN_UNIT * g, steps, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _at_counts(change, tree: Any, *others: Any) -> Any:
    def one(path, x, *rest):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return change(x, *rest) if is_token_count(name) else x

    return jax.tree_util.tree_map_with_path(one, tree, *others)


def _drawn(rngs: nnx.Rngs, shape: tuple[int, ...], gain: float = 1.0) -> nnx.Param:
    """Draw matrices of deviation `gain` / sqrt(fan_in), a stack on the first axes."""
    stddev = gain / shape[-2] ** 0.5
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w: jax.Array, dtype: Any, side: int, layout: Layout) -> jax.Array:
    return gather(w, dtype, side, layout)


_gathered.defvjp(
    lambda w, dtype, side, layout: (gather(w, dtype, side, layout), None),
    lambda dtype, side, layout, _, grad: (
        scatter(grad.astype(jnp.float32), side, layout),
    ),
)
