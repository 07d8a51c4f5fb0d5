"""Compile the programs of a run for machines that are not present, and measure them.

A chip's compiler needs no chip. From a description of the machine it returns the
scheduled program and its memory, or an error. The program's text shows bytes,
operations, collectives, and which of these overlap the inner steps
(`experiments.compile`).
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
