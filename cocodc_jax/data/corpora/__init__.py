"""Text corpora, stored by TFDS as ArrayRecord files and read without TensorFlow."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
