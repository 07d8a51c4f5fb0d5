"""Regions for anybody's trainer: one line after its step.

`after_step.RegionSync` sends and merges fragments between two steps of a trainer that
owns its step, mesh, optimizer, data and checkpoints. `trees` takes the trained arrays
out of the trainer's tree and puts them back, `layout` gives them the engine's mesh and
takes it away, `membership` is the part of a region that others train without.
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
