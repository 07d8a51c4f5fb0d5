"""Presets: named values of `TrainConfig`, each file a lab note."""

from cocodc_jax.run.presets.eight_b import EIGHT_B
from cocodc_jax.run.presets.mini import MINI
from cocodc_jax.run.presets.one_b import ONE_B
from cocodc_jax.run.presets.paper_150m import PAPER_150M
from cocodc_jax.run.presets.small import SMALL
from cocodc_jax.run.presets.smoke import SMOKE
from cocodc_jax.run.presets.tiny import TINY

PRESETS = {
    config.preset: config
    for config in (SMOKE, TINY, MINI, SMALL, PAPER_150M, ONE_B, EIGHT_B)
}

__all__ = ["PRESETS"]


def __dir__() -> list[str]:
    return sorted(__all__)
