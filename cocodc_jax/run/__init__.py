"""Configuration, session, processes, flags and presets of training programs.

    from cocodc_jax import run

    config = run.PRESETS["tiny"].replace(method="diloco", steps=100)
    summary = run.prepare(config, "runs/mine").train()

A run is a `TrainConfig`. `prepare` checks it against data and devices, and
`Session.train` trains, writes the run's files, and resumes from them. `flags` makes a
command line of the same; only it needs absl, and it is imported by its own name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.run.config import LEAVES, Leaf, TrainConfig
    from cocodc_jax.run.hugging_face import export
    from cocodc_jax.run.losses import paced
    from cocodc_jax.run.method_config import MethodConfig
    from cocodc_jax.run.optimizer_config import OptimizerConfig
    from cocodc_jax.run.preparing import prepare
    from cocodc_jax.run.presets import PRESETS
    from cocodc_jax.run.processes import Processes, failing_alone
    from cocodc_jax.run.resume import ResumeError
    from cocodc_jax.run.run_config import RunConfig
    from cocodc_jax.run.session import RUN_ERRORS, Session

__all__ = [
    "LEAVES",
    "Leaf",
    "MethodConfig",
    "OptimizerConfig",
    "PRESETS",
    "Processes",
    "RUN_ERRORS",
    "ResumeError",
    "RunConfig",
    "Session",
    "TrainConfig",
    "export",
    "failing_alone",
    "paced",
    "prepare",
]

__getattr__, __dir__ = attach(__name__)
