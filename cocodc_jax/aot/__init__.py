"""Programs of a run compiled for machines that are not there, and measured.

A chip's compiler needs no chip: it takes a description of the machine and gives the
scheduled program, its memory, or its refusal. From that text follow bytes, operations,
collectives and which of them cross while the inner steps run (`experiments.compile`).

- `targets`: the machines, what a chip of each can do, and what must be installed;
- `hlo`: scheduled HLO as values; `collectives`, `groups`, `costs`: what it tells;
- `roofline`: what a step takes at least; `programs`: what a run compiles;
- `child`: the process that compiles, with an environment of its own; `job` starts it.
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
