"""A plain DiLoCo loop of PyTorch, on the model and batches of the case `gpt`.

Regions train one after the other with all threads, in eager mode: what somebody writes
first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from .cases import OUTER_LR, OUTER_MOMENTUM, Case
from .gpt import Gpt
from .turns import Turn


def torch_diloco(case: Case) -> Callable[[], Turn]:
    """Return what makes a turn: H steps of every region, then the outer step."""

    def make() -> Turn:
        assert case.gpt is not None
        torch.manual_seed(0)
        outer = TorchGpt(case.gpt)
        outer_optimizer = torch.optim.SGD(
            outer.parameters(), OUTER_LR, OUTER_MOMENTUM, nesterov=True
        )
        regions = [copy.deepcopy(outer) for _ in range(case.regions)]
        optimizers = [
            torch.optim.AdamW(region.parameters(), 1e-3, weight_decay=1e-4)
            for region in regions
        ]
        batches = torch.from_numpy(case.batches.astype(np.int64))

        def turn() -> list[torch.Tensor]:
            for m, (region, optimizer) in enumerate(
                zip(regions, optimizers, strict=True)
            ):
                for step in range(case.interval):
                    optimizer.zero_grad()
                    region.loss(batches[step, m]).backward()
                    optimizer.step()
            with torch.no_grad():
                of_regions = zip(*(r.parameters() for r in regions), strict=True)
                for old, new in zip(outer.parameters(), of_regions, strict=True):
                    old.grad = old - torch.stack(new).mean(0)
                outer_optimizer.step()
                for region in regions:
                    region.load_state_dict(outer.state_dict())
            return list(outer.parameters())

        return turn

    return make


class TorchGpt(nn.Module):
    """The model of `gpt.py`."""

    def __init__(self, gpt: Gpt):
        """Draw the parameters."""
        super().__init__()
        self.embedding = nn.Embedding(gpt.vocab_size, gpt.width)
        self.positions = nn.Parameter(0.02 * torch.randn(gpt.length, gpt.width))
        self.blocks = nn.ModuleList(_Block(gpt) for _ in range(gpt.num_layers))
        self.norm = nn.LayerNorm(gpt.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss in nats of tokens `[B, L + 1]`."""
        x = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, gpt: Gpt):
        super().__init__()
        width = gpt.width
        self.num_heads = gpt.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention, then the feed-forward, to the residual stream."""
        batch, length, width = x.shape
        heads = self.attention(self.attention_norm(x))
        heads = heads.view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)
