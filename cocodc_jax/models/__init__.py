"""The transformer: configurations, presets, pure functions and sharding."""

from cocodc_jax.models import hugging_face
from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.layout import Layout
from cocodc_jax.models.pipeline import make_pipelined_loss_fn
from cocodc_jax.models.presets import PRESETS, get
from cocodc_jax.models.sharding import (
    check_divisible,
    check_pipeline,
    partition_specs,
)
from cocodc_jax.models.stage_links import StageCodec, stage_bytes
from cocodc_jax.models.subspace import Subspace, confine, confined
from cocodc_jax.models.transformer import (
    LossFn,
    Params,
    apply,
    flops_per_token,
    init_params,
    make_loss_fn,
    make_outputs,
    num_params,
)

__all__ = [
    "PRESETS",
    "Layout",
    "LossFn",
    "Params",
    "StageCodec",
    "Subspace",
    "TransformerConfig",
    "apply",
    "check_divisible",
    "check_pipeline",
    "confine",
    "confined",
    "flops_per_token",
    "get",
    "hugging_face",
    "init_params",
    "make_loss_fn",
    "make_outputs",
    "make_pipelined_loss_fn",
    "num_params",
    "partition_specs",
    "stage_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
