"""What regions exchange and when, as values independent of devices.

- `Method`: `Sync` (a schedule, a message, an outer optimizer, a merge) or `PerStep`.
- `schedules`: when fragments start and are applied; `events_at` iterates over events.
- `merge`: how a region applies what arrives; `NEEDS`: information that parts can ask
  for.
- `cut`, `Fragments`: the partition of parameters into fragments.

Values that make no sense, and parts that do not fit together, are refused by a
ValueError that names them. Names are imported lazily.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.sync import merge, schedules
    from cocodc_jax.sync.averages import Average, RadialDirectional, SharedMask
    from cocodc_jax.sync.cutting import cut, cut_by_patterns
    from cocodc_jax.sync.fragments import Fragments, LeafSlice
    from cocodc_jax.sync.merge import Merge
    from cocodc_jax.sync.messages import AsIs, Compressed, Message, Ranked
    from cocodc_jax.sync.method import Inner, Method, Sync
    from cocodc_jax.sync.moments import Moments
    from cocodc_jax.sync.needs import NEEDS, MergeContext, Need, UserInputs
    from cocodc_jax.sync.outer import RegionalOuter, SharedOuter, nesterov
    from cocodc_jax.sync.per_step import PerStep
    from cocodc_jax.sync.regions import Regions, matchings
    from cocodc_jax.sync.schedules.base import events_at
    from cocodc_jax.sync.summed import ByRings, SummedFactors

__all__ = [
    "AsIs",
    "Average",
    "ByRings",
    "Compressed",
    "Fragments",
    "Inner",
    "LeafSlice",
    "Merge",
    "Message",
    "Method",
    "Moments",
    "NEEDS",
    "Need",
    "PerStep",
    "RadialDirectional",
    "Ranked",
    "RegionalOuter",
    "Regions",
    "MergeContext",
    "SharedMask",
    "SharedOuter",
    "SummedFactors",
    "UserInputs",
    "Sync",
    "cut",
    "cut_by_patterns",
    "events_at",
    "matchings",
    "merge",
    "nesterov",
    "schedules",
]

__getattr__, __dir__ = attach(__name__)
