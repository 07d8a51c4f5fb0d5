"""Configuration, session, processes, flags and presets of training programs.

    from cocodc_jax import run

    config = run.PRESETS["tiny"].replace(method="diloco", steps=100)
    summary = run.prepare(config, "runs/mine").train()

A run is a `TrainConfig`. `prepare` checks it against data and devices, and
`Session.train` trains, writes the run's files, and resumes from them. `config.flags`
makes a command line of it; it needs absl, so import it by its full name.

The configuration is in `run.config`. Of the run itself, `preparing` checks, `build`
makes the program, `session` and `attempt` train, and `exits` has errors and exit codes.
"""

from typing import TYPE_CHECKING

from cocodc_jax._lazy import attach

if TYPE_CHECKING:
    from cocodc_jax.run.config.method_config import MethodConfig as MethodConfig
    from cocodc_jax.run.config.optimizer_config import (
        OptimizerConfig as OptimizerConfig,
    )
    from cocodc_jax.run.config.presets import PRESETS as PRESETS
    from cocodc_jax.run.config.run_config import RunConfig as RunConfig
    from cocodc_jax.run.config.train_config import LEAVES as LEAVES
    from cocodc_jax.run.config.train_config import Leaf as Leaf
    from cocodc_jax.run.config.train_config import TrainConfig as TrainConfig
    from cocodc_jax.run.hugging_face import export as export
    from cocodc_jax.run.losses import paced as paced
    from cocodc_jax.run.preparing import prepare as prepare
    from cocodc_jax.run.processes import Processes as Processes
    from cocodc_jax.run.processes import failing_alone as failing_alone
    from cocodc_jax.run.resume import ResumeError as ResumeError
    from cocodc_jax.run.session import RUN_ERRORS as RUN_ERRORS
    from cocodc_jax.run.session import Session as Session

__getattr__, __dir__ = attach(__name__)
