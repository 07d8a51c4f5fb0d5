"""Regions for any trainer: one line after its step.

`after_step.RegionSync` sends and merges fragments between two steps of a trainer that
owns its step, mesh, optimizer, data and checkpoints. `trees` takes the trained arrays
out of the trainer's tree and puts them back, `layout` moves them to the engine's mesh
and back, and `membership` lets a region leave a run and return to it.
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
