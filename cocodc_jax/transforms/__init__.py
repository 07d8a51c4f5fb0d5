"""Transformations for stale, rare or compressed updates; they need jax and optax only.

- `delay_compensation`: correct a gradient for its delay; `curvature` has what can be
  put into it, `secant` chooses its weight, `dc_asgd` the recipes for asynchronous SGD.
- `mix`: a merge with a weight per parameter.
- `outer`: outer optimizers that optax lacks.
- `compression`: encode and decode pairs with real bytes, error feedback, `parse`.
- `decoupled`, `lion`: how messages of all regions become one update (DeMo, Lion).
- `muon`: an inner optimizer for a transformer's tree.

Sign, everywhere: updates are gradient-like, old minus new, and descent is minus.
"""

from cocodc_jax.transforms.compensation import (
    DelayCompensationState,
    delay_compensation,
)
from cocodc_jax.transforms.curvature import Curvature

__all__ = ["Curvature", "DelayCompensationState", "delay_compensation"]
