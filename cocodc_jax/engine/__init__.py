"""Carries syncs out: placement, crossing, outer models, merges, and their programs."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
