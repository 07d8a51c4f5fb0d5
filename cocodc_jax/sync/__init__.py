"""What regions exchange and when, as values independent of devices.

- `Method`: `Sync` (a schedule, a message, an outer optimizer, a merge) or `PerStep`.
- `schedules`: when fragments start and are applied; `events_at` iterates over events.
- `merge`: how a region applies what arrives; `NEEDS`: what parts can ask for.
- `cut`, `Fragments`: the partition of parameters into fragments.

A ValueError names values without meaning, and parts that do not fit together. Names are
imported lazily.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.sync import merge as merge
    from cocodc_jax.sync import schedules as schedules
    from cocodc_jax.sync.averages import Average as Average
    from cocodc_jax.sync.averages import RadialDirectional as RadialDirectional
    from cocodc_jax.sync.averages import SharedMask as SharedMask
    from cocodc_jax.sync.cutting import cut as cut
    from cocodc_jax.sync.cutting import cut_by_patterns as cut_by_patterns
    from cocodc_jax.sync.fragments import Fragments as Fragments
    from cocodc_jax.sync.fragments import LeafSlice as LeafSlice
    from cocodc_jax.sync.merge import Merge as Merge
    from cocodc_jax.sync.messages import AsIs as AsIs
    from cocodc_jax.sync.messages import Compressed as Compressed
    from cocodc_jax.sync.messages import Message as Message
    from cocodc_jax.sync.messages import Ranked as Ranked
    from cocodc_jax.sync.method import Inner as Inner
    from cocodc_jax.sync.method import Method as Method
    from cocodc_jax.sync.method import Sync as Sync
    from cocodc_jax.sync.moments import Moments as Moments
    from cocodc_jax.sync.needs import NEEDS as NEEDS
    from cocodc_jax.sync.needs import MergeContext as MergeContext
    from cocodc_jax.sync.needs import Need as Need
    from cocodc_jax.sync.needs import UserInputs as UserInputs
    from cocodc_jax.sync.outer import RegionalOuter as RegionalOuter
    from cocodc_jax.sync.outer import SharedOuter as SharedOuter
    from cocodc_jax.sync.outer import nesterov as nesterov
    from cocodc_jax.sync.per_step import PerStep as PerStep
    from cocodc_jax.sync.regions import Regions as Regions
    from cocodc_jax.sync.regions import matchings as matchings
    from cocodc_jax.sync.schedules.base import events_at as events_at
    from cocodc_jax.sync.summed import ByRings as ByRings
    from cocodc_jax.sync.summed import SummedFactors as SummedFactors

__getattr__, __dir__ = attach(__name__)
