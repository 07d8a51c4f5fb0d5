"""Tiny with a mixture of experts: minutes on two cores.

    python -m experiments.train --preset=moe_tiny --workdir=DIR

Text, steps and rates are those of `tiny`, whose work a token it has. Fragments are one
of everything that all tokens pass, and four of experts.
"""

import dataclasses

from cocodc_jax import models
from cocodc_jax.run.presets.tiny import TINY

MOE_TINY = dataclasses.replace(
    TINY,
    preset="moe_tiny",
    model=models.get("moe_tiny"),
    method=TINY.method.where(num_fragments=5, fragment_strategy="experts"),
)
