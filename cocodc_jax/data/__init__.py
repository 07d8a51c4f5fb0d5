"""Text as token batches: corpora (TFDS), tokenizers, one stream per region (Grain).

>>> from cocodc_jax.data import DataConfig
>>> config = DataConfig(dataset="stdlib", sequence_length=128, batch_per_region=8)

`load(config, num_regions=4)` then returns a `TextData`. Its `next(data.train_stream())`
is int32 `[4, 8, 129]`, and `data.eval_tokens(num_batches=2)` is int32 `[2, 8, 129]`.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.data.config import DataConfig as DataConfig
    from cocodc_jax.data.text_data import load as load

__getattr__, __dir__ = attach(__name__)
