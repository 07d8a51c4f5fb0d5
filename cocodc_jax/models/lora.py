"""Adapters of a frozen model (LoRA; Hu et al., arXiv 2106.09685).

For a matrix W [in, out], `blocks/../NAME`, a block has A [in, r], normal at first, and
B [r, out], zero at first, in `blocks/../lora/NAME/{a, b}`. It multiplies by
W + (lora_alpha / r) A B.
"""

import jax

from cocodc_jax.models.config import LORA, TransformerConfig
from cocodc_jax.models.transformer import Params, init_params


def is_adapter(path: str) -> bool:
    """Return whether a path, its parts joined by "/", is of an adapter."""
    return LORA in path.split("/")


def adapted(base: Params, config: TransformerConfig, key: jax.Array) -> Params:
    """Add the initial adapters of `config` to the parameters of a model without any."""
    if not config.lora_rank:
        return base
    # The rest is not drawn: nothing asks for it.
    drawn = jax.jit(lambda key: only_adapters(init_params(config, key)))(key)
    return _over(base, drawn)


def merged(config: TransformerConfig, params: Params) -> Params:
    """Return the parameters of the equivalent model without adapters."""
    if not config.lora_rank:
        return params
    full = {
        name: merged(config, part) if isinstance(part, dict) else part
        for name, part in params.items()
        if name != LORA
    }
    for name, thin in params.get(LORA, {}).items():
        full[name] = full[name] + config.lora_scale * (thin["a"] @ thin["b"])
    return full


def only_adapters(params: Params) -> Params:
    """Return only the adapters of a model's parameters."""
    return {
        name: part if name == LORA else only_adapters(part)
        for name, part in params.items()
        if isinstance(part, dict)
    }


def _over(base: Params, drawn: Params) -> Params:
    covered = {
        name: _over(part, drawn[name]) if name in drawn else part
        for name, part in base.items()
    }
    if LORA in drawn:
        covered[LORA] = drawn[LORA]
    return covered
