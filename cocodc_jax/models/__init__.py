"""The transformer: configurations, presets, pure functions and sharding.

A ValueError names the value that does not fit a model, its devices or a file. Names are
imported when they are first used.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.models import attention as attention
    from cocodc_jax.models import backward as backward
    from cocodc_jax.models import experts as experts
    from cocodc_jax.models import hugging_face as hugging_face
    from cocodc_jax.models import lora as lora
    from cocodc_jax.models.config import TransformerConfig as TransformerConfig
    from cocodc_jax.models.divided import make_divided_loss_fn as make_divided_loss_fn
    from cocodc_jax.models.layout import Layout as Layout
    from cocodc_jax.models.loss import (
        make_accumulated_loss_fn as make_accumulated_loss_fn,
    )
    from cocodc_jax.models.pipeline import (
        make_pipelined_loss_fn as make_pipelined_loss_fn,
    )
    from cocodc_jax.models.presets import PRESETS as PRESETS
    from cocodc_jax.models.presets import get as get
    from cocodc_jax.models.sharding import check_divisible as check_divisible
    from cocodc_jax.models.sharding import check_pipeline as check_pipeline
    from cocodc_jax.models.sharding import partition_specs as partition_specs
    from cocodc_jax.models.stage_links import StageCodec as StageCodec
    from cocodc_jax.models.stage_links import stage_bytes as stage_bytes
    from cocodc_jax.models.subspace import Subspace as Subspace
    from cocodc_jax.models.subspace import confine as confine
    from cocodc_jax.models.subspace import confined as confined
    from cocodc_jax.models.transformer import LossFn as LossFn
    from cocodc_jax.models.transformer import Params as Params
    from cocodc_jax.models.transformer import apply as apply
    from cocodc_jax.models.transformer import flops_per_token as flops_per_token
    from cocodc_jax.models.transformer import init_params as init_params
    from cocodc_jax.models.transformer import make_loss_fn as make_loss_fn
    from cocodc_jax.models.transformer import make_outputs as make_outputs
    from cocodc_jax.models.transformer import num_params as num_params

__getattr__, __dir__ = attach(__name__)
