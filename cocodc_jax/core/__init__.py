"""The algorithm, pure and traceable: no jit, no device, no host state.

`sync` is the file to read first: `start` and `finish`, the life of a fragment;
`optimizer` is all of it as one Optax transform.
"""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
