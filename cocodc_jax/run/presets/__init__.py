"""Presets: named values of `TrainConfig`, each file a lab note."""

import sys
from collections.abc import Mapping
from typing import Any

from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.presets.eight_b import EIGHT_B
from cocodc_jax.run.presets.mini import MINI
from cocodc_jax.run.presets.moe_30b_a3b import MOE_30B_A3B
from cocodc_jax.run.presets.moe_tiny import MOE_TINY
from cocodc_jax.run.presets.one_b import ONE_B
from cocodc_jax.run.presets.paper_150m import PAPER_150M
from cocodc_jax.run.presets.small import SMALL
from cocodc_jax.run.presets.smoke import SMOKE
from cocodc_jax.run.presets.tiny import TINY

PRESETS = {
    config.preset: config
    for config in (
        SMOKE,
        TINY,
        MOE_TINY,
        MINI,
        SMALL,
        PAPER_150M,
        ONE_B,
        EIGHT_B,
        MOE_30B_A3B,
    )  # fmt: skip
}

__all__ = ["PRESETS", "with_warmup"]


def with_warmup(preset: TrainConfig, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves for a preset, with its warm-up scaled to a run that is too short.

    The warm-up is then the same share of the run, and a note says so. A warm-up among
    the leaves stays as it is.
    """
    steps, warmup = leaves.get("steps", 0), preset.optimizer.warmup_steps
    if "warmup_steps" in leaves or not 0 < steps <= warmup:
        return dict(leaves)
    share = round(warmup * steps / preset.run.steps)
    print(
        f"note: steps={steps} are too few for the warmup_steps={warmup} of preset "
        f"{preset.preset}, whose steps are {preset.run.steps}: the warm-up is {share}",
        file=sys.stderr,
    )
    return {**leaves, "warmup_steps": share}


def __dir__() -> list[str]:
    return sorted(__all__)
