"""A mixture of experts in place of a block's feed-forward.

A router sends each token x to the k best of E experts, each a SwiGLU:

    p = softmax(x R)                    float32, over all experts
    y = sum over the k largest of  p_e / (sum of these p) expert_e(x)

Weights of the k best are renormalised as in Mixtral (arXiv 2401.04088, section 2.1) and
Qwen3 (from memory). No token is dropped (`dispatch.py`). With f_e the share of all
assignments that expert e got, two losses keep the router in order:

    balance   E sum_e f_e mean(p_e)     1 if all get the same (Switch, arXiv 2101.03961,
              section 2.2; there for k = 1)
    z         mean of logsumexp(x R)^2  (ST-MoE, arXiv 2202.08906, section 2.2)

Both are means over the layers with experts. They change only gradients: a run's loss is
the cross-entropy alone, so that losses of all models can be compared.

`experts/tokens` is not a weight. It counts the tokens that each expert got, in batches:
its gradient of the loss is -(share of the batch's tokens), and `counting` adds that up.
Because it is a parameter, the count is reset when outer parameters replace it, and is
merged, stored and sent (`sync.expert_mean`). Its unit is so small that it does not
affect norms.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax._extras import extra
from cocodc_jax.expert_leaves import TOKEN_UNIT, is_token_count
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.dispatch import mix
from cocodc_jax.models.drawn import matrix
from cocodc_jax.models.layout import Layout, gather, scatter, shared, sum_over, summed

with extra("train"):
    from flax import nnx


class Routed(NamedTuple):
    """A router's losses and loads for a batch, as means over its tokens.

    With a `Layout`, the contribution of the device's tokens to the region's means.
    """

    balance: jax.Array  # The load-balancing loss.
    z: jax.Array  # The z loss.
    entropy: jax.Array  # Of the router's distribution, in nats.
    load: jax.Array  # [E], share of the tokens that each expert got; of sum k.
    counted: jax.Array  # Zero, with the gradient that `counting` adds up.


class Choice(NamedTuple):
    """The experts of each token."""

    ids: jax.Array  # int32 [T, k], best first.
    weights: jax.Array  # [T, k], of sum 1.
    probs: jax.Array  # [T, E], the router's distribution.
    logits: jax.Array  # [T, E].


def choose(x_TD: jax.Array, router_DE: jax.Array, per_token: int) -> Choice:
    """Choose each token's experts, in float32 or wider."""
    logits_TE = jnp.matmul(
        x_TD.astype(router_DE.dtype), router_DE, precision=jax.lax.Precision.HIGHEST
    )
    probs_TE = jax.nn.softmax(logits_TE, axis=-1)
    best_TK, ids_TK = jax.lax.top_k(probs_TE, per_token)
    weights_TK = best_TK / best_TK.sum(axis=-1, keepdims=True)
    return Choice(ids_TK, weights_TK, probs_TE, logits_TE)


class Experts(nnx.Module):
    """The weights of E experts, and how often each was used."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        number = config.num_experts
        width = config.width
        inside = config.expert_width
        self.gate = matrix(rngs, number, width, inside)
        self.up = matrix(rngs, number, width, inside)
        self.down = matrix(rngs, number, inside, width, gain=config.residual_gain)
        self.tokens = nnx.Param(jnp.zeros(number, jnp.float32))

    def weights(
        self, dtype: Any, layout: Layout | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return gate, up and down of the device's experts in `dtype`, gathered."""

        def whole(w: nnx.Param, side: int) -> jax.Array:
            if layout is None:
                return w[...].astype(dtype)
            return _gathered(w[...], dtype, side, layout.of_experts)

        return whole(self.gate, 1), whole(self.up, 1), whole(self.down, 2)


class MixtureOfExperts(nnx.Module):
    """A router and its experts."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout | None
    ):
        self.router = matrix(rngs, config.width, config.num_experts)
        self.experts = Experts(config, rngs)
        self.config = config
        self.layout = layout

    def __call__(self, x_BLD: jax.Array) -> tuple[jax.Array, Routed]:
        """Map each position by its experts; the first result is `[B, L, D]`."""
        config = self.config
        layout = self.layout
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        choice = choose(x_TD, self.router[...], config.experts_per_token)

        # The router's own path is complete on every device of the model axis, that of
        # the experts a sum over these.
        out_TD = mix(
            x_TD=shared(x_TD, layout),
            ids_TK=choice.ids,
            weights_TK=shared(choice.weights, layout),
            weights=self.experts.weights(x_TD.dtype, layout),
            dispatch=config.expert_dispatch,
            layout=layout,
        )

        return summed(out_TD, layout).reshape(x_BLD.shape), self._routed(choice)

    def _routed(self, choice: Choice) -> Routed:
        layout = self.layout
        number = self.config.num_experts
        devices = 1 if layout is None else jax.lax.axis_size(layout.tokens)
        share = 1 / (choice.ids.shape[0] * devices)

        counts_E = jnp.bincount(choice.ids.reshape(-1), length=number)
        load_E = jax.lax.stop_gradient(share * counts_E.astype(choice.probs.dtype))
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
    """Return a term of value zero, whose gradient goes to the router and the counts.

    Leaves of `routed` are those of all layers with experts, `[layers, ...]`.
    """
    losses = (
        config.balance_loss * routed.balance.mean()
        + config.router_z_loss * routed.z.mean()
        + routed.counted.sum()
    )
    return losses - jax.lax.stop_gradient(losses)


def router_aux(routed: Routed) -> dict[str, jax.Array]:
    """Return the routing that a region reports for a batch.

    Values are means over the layers with experts, except the load, `[layers, E]`. The
    entropy is in nats.
    """
    return {
        "router_balance": routed.balance.mean(),
        "router_z": routed.z.mean(),
        "router_entropy": routed.entropy.mean(),
        "expert_load": routed.load,
    }


def counting(
    optimizer: optax.GradientTransformation,
    token_counts: Callable[[str], bool] = is_token_count,
) -> optax.GradientTransformationExtraArgs:
    """Extend an optimizer to add up the token counts of a model with experts.

    The optimizer itself sees zero gradients for the counts. The state is the
    optimizer's. The program's `UserInputs` must have the same `token_counts`. Its
    default finds the counts of this package's models.
    """
    inner = optax.with_extra_args_support(optimizer)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")

    def at_counts(change: Callable, tree: Any, *others: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, *x: change(*x) if token_counts(name(path)) else x[0],
            tree,
            *others,
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        without_counts = at_counts(jnp.zeros_like, updates)
        steps, state = inner.update(without_counts, state, params, **extra)
        return at_counts(lambda _, g: -TOKEN_UNIT * g, steps, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(w: jax.Array, dtype: Any, side: int, layout: Layout) -> jax.Array:
    return gather(w, dtype, side, layout)


def _gathered_forward(
    w: jax.Array, dtype: Any, side: int, layout: Layout
) -> tuple[jax.Array, None]:
    return gather(w, dtype, side, layout), None


def _gathered_backward(
    dtype: Any, side: int, layout: Layout, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (scatter(grad.astype(jnp.float32), side, layout),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
