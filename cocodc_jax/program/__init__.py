"""Compile a method around a loss: `RegionProgram` and its output.

Names are imported lazily.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.program.region_program import Output, RegionProgram

__all__ = ["Output", "RegionProgram"]

__getattr__, __dir__ = attach(__name__)
