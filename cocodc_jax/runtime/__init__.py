"""The same on devices: inner steps, the events of a schedule, merges, the program.

- `RegionProgram`, `run_steps`: a method around a loss, and the loop around that.
- `train`: the same with records, evaluation and `Checkpoints`.
- `Transport`: how messages cross regions; `make_mesh`: where regions are.

Names are imported when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.runtime.devices.mesh import (
        make_mesh,
        use_cpu_devices,
    )
    from cocodc_jax.runtime.exchange.transport import (
        Transport,
    )
    from cocodc_jax.runtime.loop.cadence import (
        Cadence,
    )
    from cocodc_jax.runtime.loop.checkpoint import (
        CheckpointError,
        Checkpoints,
    )
    from cocodc_jax.runtime.loop.evaluate import (
        make_evaluate,
    )
    from cocodc_jax.runtime.loop.finite import (
        NonFiniteLossError,
    )
    from cocodc_jax.runtime.loop.hooks import (
        Hooks,
        Result,
    )
    from cocodc_jax.runtime.loop.trainer import (
        train,
    )
    from cocodc_jax.runtime.program import (
        Output,
        RegionProgram,
    )
    from cocodc_jax.runtime.running import run as run_steps
    from cocodc_jax.runtime.state import (
        AppliedSync,
        TrainState,
    )

__all__ = [
    "AppliedSync",
    "Cadence",
    "CheckpointError",
    "Checkpoints",
    "Hooks",
    "NonFiniteLossError",
    "Output",
    "RegionProgram",
    "Result",
    "TrainState",
    "Transport",
    "make_evaluate",
    "make_mesh",
    "run_steps",
    "train",
    "use_cpu_devices",
]

# Where each is: MODULE, or MODULE:NAME.
_PLACES = {
    "AppliedSync": "state:AppliedSync",
    "Cadence": "loop.cadence:Cadence",
    "CheckpointError": "loop.checkpoint:CheckpointError",
    "Checkpoints": "loop.checkpoint:Checkpoints",
    "Hooks": "loop.hooks:Hooks",
    "NonFiniteLossError": "loop.finite:NonFiniteLossError",
    "Output": "program:Output",
    "RegionProgram": "program:RegionProgram",
    "Result": "loop.hooks:Result",
    "TrainState": "state:TrainState",
    "Transport": "exchange.transport:Transport",
    "make_evaluate": "loop.evaluate:make_evaluate",
    "make_mesh": "devices.mesh:make_mesh",
    "run_steps": "running:run",
    "train": "loop.trainer:train",
    "use_cpu_devices": "devices.mesh:use_cpu_devices",
}

__getattr__, __dir__ = attach(__name__, _PLACES)
