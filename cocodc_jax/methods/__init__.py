"""The table of methods: each is a composition of the same few parts.

Regions exchange something from time to time (`Sync`), at every step (`PerStep`), or
never. A `Sync` has four parts: the schedule, *when* fragments start and are merged
(`sync.schedules`); the message, *what* is sent of them (`sync.messages`, and
`sync.averages`); the outer optimizer, which steps on the mean (`sync.outer`); and the
merge, what a region does with the result (`sync.merge`). Every method is an instance:

=================  ================  ==================  ===================  ==========
method             schedule          message             outer optimizer      merge
=================  ================  ==================  ===================  ==========
diloco             every H           as is               Nesterov 0.7, 0.9    replace
snoo               every H           none: one region    Nesterov 0.7, 0.9    replace
gpa                every step        none: one region    primal average       replace
muloco             every H           ef+matrices+stat2   Nesterov 0.9, 0.8    replace
sparseloco         every H           ef+chunked+stat2    plain 1.0            replace
qsparse            every H           ef+topk+int4        plain 1.0            replace
multi_ring         every H           as is, by rings     plain 1.0            replace
des_loc            every H           as is; moments too  plain 1.0            replace
mt_dao             every H           as is; moments too  plain 1.0            replace
noloco             every H           also parameters     heavy ball 0.7, 0.5  replace *
diloco_demo        every H           top of momentum     decoupled 0.7, 0.9   replace *
lt_admm            every H           int8 of the change  ADMM's dual          keep *
streaming_diloco   staggered K, tau  as is               Nesterov 0.4, 0.9    mix 0.5
decoupled_diloco   staggered K, tau  radial-directional  Nesterov 0.4, 0.9    mix 0.5
loscar             every H, tau      a random share      plain 1.0            replay
async_sparta       one round late    a share in turn     none: means          progress *
cocodc             adaptive N, tau   as is               Nesterov 0.4, 0.9    isotropic
cocodc_paper       adaptive N, tau   as is               Nesterov 0.4, 0.9    g g D / H
co2                one round late    as is               clipped 1.0, 0.2     replace
eager              one round late    as is               Nesterov 0.4, 0.5    replace *
dilocox            one round late    ef+lowrank+int4     Nesterov 0.4, 0.5    replace
delayed_nesterov   regions alone     as is               delayed 0.7, 0.9     replace
mla                regions alone     as is               averaged 0.7, 0.9    look-ahead
heloco             regions alone     as is               corrected 0.7, 0.9   look-ahead
=================  ================  ==================  ===================  ==========

(* each region has outer parameters of its own; ef is error feedback.)

=================  ===============================  ====================================
method             at every step, of a region       made of all regions' messages
=================  ===============================  ====================================
data_parallel      its gradient                     the mean; AdamW
dct_threshold      large gradients, fed back        the mean; AdamW
demo               top of its momentum              sign of the mean; SGD
distributed_lion   signs of its momentum            majority or mean of signs; SGD
apart              nothing                          -
=================  ===============================  ====================================

Each file says at which limit its method is another. `cocodc` with N = K and alpha
mixing in place of compensation is `streaming_diloco` up to the order of the fragments.

Each method is a file whose docstring has the full algorithm, its source and how sure we
are. Those of `contrib` are from memory, in part or in full. Measurements are of one
seed of the preset tiny, unless they say otherwise: 840k parameters, 480 steps, H 40,
four regions; docs/results/methods.md has the command and compares all of them. Symbols
are the same everywhere: M regions, K fragments, H inner steps in a sync interval, tau
inner steps from a start to its merge, theta^m a region's parameters, theta^g the outer
ones, and Delta = theta^g - theta^m a pseudo-gradient, old minus new, so descent is
minus Delta. Only `des_loc` and `mt_dao` exchange the state of the inner optimizer.

A new method is a file with a function that returns a `Method`, and a line in `METHODS`;
its arguments become flags. A ValueError names an argument whose value is invalid.
"""

import inspect
from collections.abc import Callable
from typing import Any

from cocodc_jax.methods.apart import apart
from cocodc_jax.methods.async_sparta import async_sparta
from cocodc_jax.methods.cocodc import cocodc, cocodc_paper
from cocodc_jax.methods.contrib.co2 import co2
from cocodc_jax.methods.contrib.dct_threshold import dct_threshold
from cocodc_jax.methods.contrib.dilocox import dilocox
from cocodc_jax.methods.contrib.eager import eager
from cocodc_jax.methods.contrib.multi_ring import multi_ring
from cocodc_jax.methods.contrib.qsparse import qsparse
from cocodc_jax.methods.data_parallel import data_parallel
from cocodc_jax.methods.decoupled_diloco import decoupled_diloco
from cocodc_jax.methods.delayed_nesterov import delayed_nesterov
from cocodc_jax.methods.demo import demo
from cocodc_jax.methods.des_loc import des_loc
from cocodc_jax.methods.diloco import diloco
from cocodc_jax.methods.diloco_demo import diloco_demo
from cocodc_jax.methods.distributed_lion import distributed_lion
from cocodc_jax.methods.gpa import gpa
from cocodc_jax.methods.heloco import heloco
from cocodc_jax.methods.loscar import loscar
from cocodc_jax.methods.lt_admm import lt_admm
from cocodc_jax.methods.mla import mla
from cocodc_jax.methods.mt_dao import mt_dao
from cocodc_jax.methods.muloco import muloco
from cocodc_jax.methods.noloco import noloco
from cocodc_jax.methods.snoo import snoo
from cocodc_jax.methods.sparseloco import sparseloco
from cocodc_jax.methods.streaming_diloco import streaming_diloco
from cocodc_jax.sync.method import Inner, Method, Sync, Weights
from cocodc_jax.sync.outer import Placement
from cocodc_jax.transforms import compression
from cocodc_jax.transforms.numerics import check_choice

__all__ = [
    "COMMON",
    "METHODS",
    "Inner",
    "Method",
    "Sync",
    "adapted",
    "defaults",
    "get",
]

METHODS: dict[str, Callable[..., Method]] = {
    "data_parallel": data_parallel,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "cocodc": cocodc,
    "cocodc_paper": cocodc_paper,
    "loscar": loscar,
    "async_sparta": async_sparta,
    "sparseloco": sparseloco,
    "muloco": muloco,
    "multi_ring": multi_ring,
    "qsparse": qsparse,
    "des_loc": des_loc,
    "mt_dao": mt_dao,
    "snoo": snoo,
    "gpa": gpa,
    "co2": co2,
    "eager": eager,
    "dilocox": dilocox,
    "noloco": noloco,
    "diloco_demo": diloco_demo,
    "lt_admm": lt_admm,
    "delayed_nesterov": delayed_nesterov,
    "mla": mla,
    "heloco": heloco,
    "decoupled_diloco": decoupled_diloco,
    "demo": demo,
    "distributed_lion": distributed_lion,
    "dct_threshold": dct_threshold,
    "apart": apart,
}


def adapted(
    method: Method,
    *,
    compress: str | None = None,
    outer_placement: Placement = "host",
    region_weights: Weights | None = None,
    expert_weights: Weights | None = None,
    exclude_above: float | None = None,
    robust_mean: str | None = None,
) -> Method:
    """Return a method with the arguments that every method takes, all of them flags.

    Args:
      method: any method.
      compress: compressor of a region's messages, such as fp4, int8, topk:0.01,
        lowrank:32+int4, or ef+topk:0.01 with error feedback; default: the method's own,
        else float32 (streaming_diloco as published sends fp4).
      outer_placement: host keeps the outer state on a host device, divided divides it
        over the devices of each region.
      region_weights: weights of regions in a mean: equal, or tokens, the tokens that
        each trained on.
      expert_weights: equal, or tokens to weigh regions in the mean of an expert by the
        tokens that it saw there; an expert that no region trained gets no
        update.
      exclude_above: leaves a region out of a mean, and restores it from the outer
        parameters, if its parameters or message are not finite, or if its message is
        longer than this multiple of the median over regions; inf checks for finite
        values only.
      robust_mean: clip cuts messages to the median length over regions (sparse ones
        tensor by tensor); trim:0.25 drops the largest and the smallest quarter of the
        values, entry by entry.

    Raises:
      ValueError: for a value that is unknown, or that the method does not support.
    """
    if compress is not None:
        method = method.compressed(compression.parse(compress))
    if outer_placement != "host":
        method = method.placed(outer_placement)
    method = method.weighted(region_weights).expert_weighted(expert_weights)
    return method.guarded(exclude_above, robust_mean)


# What every method takes besides its own arguments.
COMMON: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(adapted).parameters.items()
    if name != "method"
}


def get(name: str, **overrides: Any) -> Method:
    """Build a method by name.

    Args:
      name: a key of `METHODS`.
      **overrides: arguments of that method's function, and of `adapted`.

    >>> get("streaming_diloco", sync_interval=20, delay_steps=2).num_fragments
    4
    >>> get("diloco", compress="int8").sync.message.by.name
    'int8'
    """
    accepted = defaults(name)
    for key in overrides:
        if key not in accepted:
            raise ValueError(
                f"method={name!r} has no argument {key!r}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )

    parameters = inspect.signature(METHODS[name]).parameters
    arguments = {key: value for key, value in overrides.items() if key in parameters}
    common = {key: value for key, value in overrides.items() if key not in parameters}
    return adapted(METHODS[name](**arguments), **common)


def defaults(name: str) -> dict[str, Any]:
    """Return the arguments that method `name` takes, with their defaults."""
    check_choice("method", name, sorted(METHODS))
    parameters = inspect.signature(METHODS[name]).parameters
    of_method = {key: parameter.default for key, parameter in parameters.items()}
    return of_method | {k: v for k, v in COMMON.items() if k not in of_method}


def __dir__() -> list[str]:
    return sorted(__all__)
