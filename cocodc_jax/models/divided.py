"""The transformer's loss, computed by all devices of a region.

Each device computes with its share of the batch and a part of every weight
(`sharding.py`), in a `jax.shard_map` that is manual over every axis, as Pallas kernels
need; a `jax.shard_map` over "region" may be around it. The gradient is taken inside, of
the device's share of the loss, so gradients of weights come out summed over the batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cocodc_jax.models.config import LORA, TransformerConfig
from cocodc_jax.models.experts import router_aux, router_loss
from cocodc_jax.models.layout import Layout, sum_over
from cocodc_jax.models.loss import accumulated, divided_cross_entropy, with_gradient
from cocodc_jax.models.sharding import partition_specs
from cocodc_jax.models.transformer import LossFn, Params, bind

# Scales of heads, of which each device of the model axis has its own, and adapters.
_OF_FEATURES = ("query_norm", "key_norm", LORA)


def make_divided_loss_fn(
    config: TransformerConfig, layout: Layout | None = None, accumulate_steps: int = 1
) -> LossFn:
    """Make the language-model loss of one region, divided over its devices.

    It is the same function of the same parameters as `make_loss_fn`, except for the
    order of float32 sums. Call it under a mesh (`jax.set_mesh`, or inside a
    `jax.shard_map` over other axes) with the layout's axes. It is fast if parameters
    are sharded by `partition_specs(..., divides_embedding=True)`.

    It has first derivatives in reverse mode, and forward mode over these.

    Args:
      config: the model; the axes divide its sizes, see `check_divisible`.
      layout: names of the axes; None is "data" and "model".
      accumulate_steps: parts of the batch, one after another; a divisor of each
        device's share of it, which is the batch over the data axis.
    """
    device = _Device(config, layout or Layout(), accumulate_steps)
    return with_gradient(
        functools.partial(_mapped, device, device.loss),
        functools.partial(_mapped, device, device.loss_and_grad),
    )


class _Device:
    """The computation of one device."""

    def __init__(self, config: TransformerConfig, layout: Layout, num_parts: int):
        self.config = config
        self.layout = layout
        self.num_parts = num_parts

    def specs(self, params: Params) -> Any:
        axes = (self.layout.tokens, self.layout.model)
        expert = self.layout.expert
        return partition_specs(params, axes, divides_embedding=True, expert=expert)

    def loss(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Return `(loss, aux)` of the region's batch, equal on all devices."""
        return self._whole(self._share(params, tokens), tokens)

    def loss_and_grad(
        self, params: Params, tokens: jax.Array
    ) -> tuple[tuple[jax.Array, Any], Params]:
        """Return `(loss, aux)` and the gradient, sharded as the parameters."""
        gradient = jax.value_and_grad(self._share, has_aux=True)
        share, grads = accumulated(gradient, self.num_parts)(params, tokens)
        grads = jax.tree_util.tree_map_with_path(
            self._sum_undivided, grads, self.specs(params)
        )
        return self._whole(share, tokens), grads

    def _share(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Return the contribution of a device's tokens to the batch's means."""
        model = bind(self.config, params, self.layout)
        targets_BL = self.layout.own_part(tokens[:, 1:])
        hidden_BLD, routed = model(self.layout.own_part(tokens[:, :-1]))

        sums: tuple[jax.Array, jax.Array] = divided_cross_entropy(
            hidden_BLD,
            model.output_head(),
            targets_BL=targets_BL,
            chunk_tokens=self.config.loss_chunk_tokens,
            layout=self.layout,
        )
        loss_sum, num_correct = sums
        count = targets_BL.size * jax.lax.axis_size(self.layout.tokens)
        loss = loss_sum / count
        aux = {"accuracy": num_correct / count}
        if routed is not None:
            return loss + router_loss(self.config, routed), aux | router_aux(routed)
        return loss, aux

    def _whole(
        self, share: tuple[jax.Array, Any], tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        loss, aux = jax.tree.map(lambda x: sum_over(x, self.layout.tokens), share)
        count = tokens[:, 1:].size * jax.lax.axis_size(self.layout.batch)
        return loss, {"num_tokens": jnp.float32(count), **aux}

    def _sum_undivided(self, path: Any, grad: jax.Array, spec: P) -> jax.Array:
        """Sum gradients over the axes on which their parameters are replicated."""
        named = jax.tree.leaves(tuple(spec))
        if self.layout.data not in named:
            grad = sum_over(grad, self.layout.tokens)

        of_features = any(key.key in _OF_FEATURES for key in path)
        if of_features and self.layout.model not in named:
            grad = sum_over(grad, self.layout.model)
        return grad


def _mapped(
    device: _Device,
    compute: Callable,
    params: Params,
    tokens: jax.Array,
    key: jax.Array,
) -> Any:
    """Call `compute(params, tokens)` on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = device.specs(params)
    mapped = jax.shard_map(
        compute,
        # All that are left.
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        in_specs=(specs, P(device.layout.batch)),
        out_specs=(P(), specs) if compute == device.loss_and_grad else P(),
        check_vma=False,
    )

    return mapped(params, tokens)
