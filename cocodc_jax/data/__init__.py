"""Text as token batches: corpora (TFDS), tokenizers, one stream per region (Grain).

>>> from cocodc_jax.data import DataConfig
>>> config = DataConfig(dataset="stdlib", sequence_length=128, batch_per_region=8)

`load(config, num_regions=4)` then returns a `TextData`. Its `next(data.train_stream())`
is int32 `[4, 8, 129]`, and `data.eval_tokens(num_batches=2)` is int32 `[2, 8, 129]`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cocodc_jax.data.config import DataConfig

if TYPE_CHECKING:
    from cocodc_jax.data.text_data import TextData

__all__ = ["DataConfig", "load"]


def load(
    config: DataConfig, num_regions: int, regions: Sequence[int] | None = None
) -> "TextData":
    """Open a corpus for a run; see `cocodc_jax.data.text_data.load`."""
    # Here, so that importing the package does not import TFDS and Grain.
    from cocodc_jax.data import text_data

    return text_data.load(config, num_regions, regions)


def __dir__() -> list[str]:
    return sorted(__all__)
