"""Means over regions: in programs, between processes, between elastic regions."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
