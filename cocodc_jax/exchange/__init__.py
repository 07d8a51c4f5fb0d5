"""Means over regions: inside compiled programs, between processes, between jobs."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
