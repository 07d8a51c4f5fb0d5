"""The table of methods: each a composition of a schedule, an outer optimizer, a merge.

=================  ==============  ======================  =====================
method             schedule        outer optimizer         merge
=================  ==============  ======================  =====================
data_parallel      never           none                    none (mean gradients)
diloco             whole, H        Nesterov 0.7, 0.9       replace
streaming_diloco   staggered K, H  Nesterov 0.4, 0.9       mix(0.5)
cocodc             adaptive N      Nesterov 0.4, 0.9       compensate(isotropic)
cocodc_paper       adaptive N      Nesterov 0.4, 0.9       compensate(g * g * D / H)
=================  ==============  ======================  =====================

The limits tie them together: `streaming_diloco` with one fragment, no delay and
alpha 0 is `diloco`; `diloco` with H = 1, outer learning rate 1, no momentum and an
inner SGD is `data_parallel`; `cocodc` with `syncs_per_interval` = K and alpha mixing
in place of compensation is `streaming_diloco` up to the order of the fragments.

The functions are in `sync/family`. A new method is a function that returns a `Method`,
and a line in `METHODS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from cocodc_jax.sync.family import (
    cocodc,
    each_step,
    never_equal,
    round_late,
    synchronous,
    uneven,
)
from cocodc_jax.sync.method import Method
from cocodc_jax.transforms import compression

__all__ = ["COMMON", "METHODS", "Method", "defaults", "get"]

# What every method takes besides its own arguments.
COMMON: dict[str, Any] = {
    "compress": None,
    "outer_placement": "host",
    "region_weights": None,
}

METHODS: dict[str, Callable[..., Method]] = {
    "data_parallel": each_step.data_parallel,
    "diloco": synchronous.diloco,
    "streaming_diloco": synchronous.streaming_diloco,
    "cocodc": cocodc.cocodc,
    "cocodc_paper": cocodc.cocodc_paper,
    "loscar": synchronous.loscar,
    "sparseloco": synchronous.sparseloco,
    "muloco": synchronous.muloco,
    "multi_ring": synchronous.multi_ring,
    "local_training_ef": synchronous.local_training_ef,
    "snoo": synchronous.snoo,
    "co2": round_late.co2,
    "eager": round_late.eager,
    "dilocox": round_late.dilocox,
    "noloco": never_equal.noloco,
    "diloco_demo": never_equal.diloco_demo,
    "delayed_nesterov": uneven.delayed_nesterov,
    "heloco": uneven.heloco,
    "decoupled_diloco": uneven.decoupled_diloco,
    "demo": each_step.demo,
    "distributed_lion": each_step.distributed_lion,
    "dct_threshold": each_step.dct_threshold,
    "apart": synchronous.apart,
}


def get(name: str, **overrides: Any) -> Method:
    """Builds a method by name.

    Args:
      name: a key of `METHODS`.
      **overrides: arguments of that method's function, and of `COMMON`: `compress`,
        a compressor for what is sent (see `transforms.compression.parse`),
        `outer_placement` and `region_weights` (see `Method`).

    Raises:
      ValueError: for an unknown name, or an argument that this method does not take.

    >>> get("streaming_diloco", sync_interval=20, delay_steps=2).num_fragments
    4
    >>> get("diloco", compress="int8").compressor.name
    'int8'
    """
    accepted = defaults(name)
    for key in overrides:
        if key not in accepted:
            raise ValueError(
                f"method={name!r} has no argument {key!r}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )
    own = inspect.signature(METHODS[name]).parameters
    method = METHODS[name](**{k: v for k, v in overrides.items() if k in own})
    compress = overrides.get("compress")
    if compress is not None and "compress" not in own:
        method = method.compressed(compression.parse(compress))
    if "outer_placement" in overrides and "outer_placement" not in own:
        placement = overrides["outer_placement"]
        method = dataclasses.replace(method, outer_placement=placement)
    return method.weighted(overrides.get("region_weights"))


def defaults(name: str) -> dict[str, Any]:
    """The arguments that method `name` takes, with their defaults.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} is unknown; use one of {sorted(METHODS)}")
    parameters = inspect.signature(METHODS[name]).parameters
    own = {key: parameter.default for key, parameter in parameters.items()}
    return own | {k: v for k, v in COMMON.items() if k not in own}
