"""Methods written from memory, in part or in full; each docstring says which part."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
