"""Compile the programs of a run for machines that are not present, and measure them.

A chip's compiler needs no chip. It takes a description of the machine and returns the
scheduled program and its memory, or refuses it. From the program's text follow bytes,
operations, collectives, and which of these overlap the inner steps
(`experiments.compile`).
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
