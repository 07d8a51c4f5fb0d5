"""A case: one model with its data, optimizer and interval, for every contender."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from cocodc_jax import models
from cocodc_jax.run.presets import PRESETS

from .gpt import Gpt

PyTree = Any

GPT = "gpt"
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


@dataclasses.dataclass(frozen=True)
class Case:
    """The training that every contender does."""

    name: str
    loss_fn: Callable  # `(params, batch, key) -> (loss, aux)` of one region.
    optimizer: optax.GradientTransformation
    params: PyTree  # One region's initial parameters.
    # Batches of one turn, int32 `[T, R, B, L + 1]`; a turn is one interval, H = T.
    batches: np.ndarray
    # The GPT's shape, for contenders with an implementation of their own; None for
    # presets.
    gpt: Gpt | None = None

    @property
    def interval(self) -> int:
        """H, steps of a turn."""
        return self.batches.shape[0]

    @property
    def regions(self) -> int:
        """R, regions that train."""
        return self.batches.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens that all regions train on in a turn."""
        interval, regions, batch, length = self.batches.shape
        return interval * regions * batch * (length - 1)


def make_case(
    name: str, regions: int, interval: int, num_layers: int | None = None
) -> Case:
    """Build the case of a name."""
    if name == GPT:
        gpt = Gpt() if num_layers is None else Gpt(num_layers=num_layers)
        sizes = (interval, regions, 8, gpt.length + 1)
        params = gpt.init(jax.random.key(0))
        batches = _tokens(gpt.vocab_size, sizes)
        return Case(name, gpt.loss_fn(), optax.adamw(1e-3), params, batches, gpt)
    if name not in PRESETS:
        raise ValueError(f"cases={name!r} is unknown; use {[GPT, *PRESETS]}")
    config = PRESETS[name]
    model, data = config.model, config.data
    # As in a run of the preset with one device per region.
    platform = jax.default_backend()
    backward = models.backward.choose(model.backward, platform, False, False)
    model = dataclasses.replace(model, backward=backward)
    if num_layers is not None:
        model = dataclasses.replace(model, num_layers=num_layers, scan_layers=True)
    sizes = (interval, regions, data.batch_per_region, data.sequence_length + 1)
    return Case(
        name,
        models.make_loss_fn(model),
        config.optimizer.build(10**6),
        models.init_params(model, jax.random.key(0)),
        _tokens(model.vocab_size, sizes),
    )


def _tokens(vocab_size: int, sizes: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, sizes, np.int32)
