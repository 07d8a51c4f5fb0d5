"""Who takes part in a run of independent jobs, and which messages a mean is of."""

from cocodc_jax._lazy import attach, modules_of

__getattr__, __dir__ = attach(__name__, modules_of(__path__))
