"""The transformer: configurations, presets, pure functions and sharding.

What does not fit a model, its devices or a file is refused by a ValueError that names
it. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.models import attention, backward, experts, hugging_face, lora
    from cocodc_jax.models.config import TransformerConfig
    from cocodc_jax.models.divided import make_divided_loss_fn
    from cocodc_jax.models.layout import Layout
    from cocodc_jax.models.loss import make_accumulated_loss_fn
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
    "attention",
    "backward",
    "check_divisible",
    "check_pipeline",
    "confine",
    "confined",
    "experts",
    "flops_per_token",
    "get",
    "hugging_face",
    "init_params",
    "lora",
    "make_accumulated_loss_fn",
    "make_divided_loss_fn",
    "make_loss_fn",
    "make_outputs",
    "make_pipelined_loss_fn",
    "num_params",
    "partition_specs",
    "stage_bytes",
]

__getattr__, __dir__ = attach(__name__)
