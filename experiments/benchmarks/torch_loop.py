"""A plain DiLoCo loop of PyTorch, on the model and batches of the case `gpt`.

The simplest form: eager mode, regions one after the other with all threads. It starts
from the same parameters as the others, and ends at the same ones up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .cases import OUTER_LR, OUTER_MOMENTUM, Case
from .gpt import Gpt
from .turns import Turn

Tensor = Any
Params = dict[str, Any]


def torch_diloco(case: Case, inner_lr: float = 1e-3) -> Callable[[], Turn]:
    """Return a turn: H steps of every region, then the outer step."""
    gpt = case.gpt
    assert gpt is not None

    def make() -> Turn:
        import torch  # pyright: ignore[reportMissingImports]

        def tensors() -> Params:
            return jax.tree.map(
                lambda x: torch.tensor(np.asarray(x), requires_grad=True), case.params
            )

        outer, regions = tensors(), [tensors() for _ in range(case.regions)]
        outer_optimizer = torch.optim.SGD(
            jax.tree.leaves(outer), OUTER_LR, OUTER_MOMENTUM, nesterov=True
        )
        optimizers = [
            torch.optim.AdamW(jax.tree.leaves(region), inner_lr, weight_decay=1e-4)
            for region in regions
        ]
        batches = torch.from_numpy(case.batches.astype(np.int64))

        def turn() -> Params:
            for m, (region, optimizer) in enumerate(
                zip(regions, optimizers, strict=True)
            ):
                for step in range(case.interval):
                    optimizer.zero_grad()
                    loss(gpt, region, batches[step, m]).backward()
                    optimizer.step()
            with torch.no_grad():
                ends = zip(*map(jax.tree.leaves, regions), strict=True)
                for old, new in zip(jax.tree.leaves(outer), ends, strict=True):
                    old.grad = old - torch.stack(new).mean(0)
                outer_optimizer.step()
                for region in regions:
                    jax.tree.map(lambda x, new: x.copy_(new), region, outer)
            return jax.tree.map(lambda x: x.detach().numpy(), outer)

        return turn

    return make


def loss(gpt: Gpt, params: Params, tokens: Tensor) -> Tensor:
    """Return the mean loss of `Gpt.loss_fn` in nats, of tokens int64 `[B, L + 1]`."""
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    def norm(x_BLD: Tensor, part: Params) -> Tensor:
        return functional.layer_norm(
            x_BLD, x_BLD.shape[-1:], part["scale"], part["bias"]
        )

    x_BLD = params["embedding"][tokens[:, :-1]] + params["positions"]
    for layer in range(gpt.num_layers):
        block = params["blocks"][str(layer)]
        joined = norm(x_BLD, block["attention_norm"]) @ block["attention"]
        heads = joined.view(*x_BLD.shape[:2], 3, gpt.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        mixed_BLD = mixed.transpose(1, 2).reshape(x_BLD.shape)
        x_BLD = x_BLD + mixed_BLD @ block["output"]
        hidden = norm(x_BLD, block["mlp_norm"]) @ block["up"]
        hidden = functional.gelu(hidden, approximate="tanh")
        x_BLD = x_BLD + hidden @ block["down"]
    logits = norm(x_BLD, params["norm"]) @ params["embedding"].T
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
