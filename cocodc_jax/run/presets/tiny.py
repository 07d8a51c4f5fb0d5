"""The laptop comparison: about one million parameters, minutes on two cores.

    python -m experiments.compare --preset=tiny

A byte-level model on the source of the Python standard library. The interval of 40
steps and the delay of 5 keep the proportions of the papers (H 100, tau 5) where only
a few hundred steps fit; inner_lr was the best of 1e-3, 2e-3 and 4e-3 for data parallel.
Results are in docs/results/bytes.md and docs/results/methods.md, with their commands.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

TINY = TrainConfig(
    preset="tiny",
    run=RunConfig(
        steps=480, log_every=10, eval_every=40, eval_batches=32, checkpoint_every=240
    ),
    model=models.get("tiny"),
    data=DataConfig(sequence_length=128, batch_per_region=4),
    method=MethodConfig(
        where_taken={
            "sync_interval": 40,
            "num_fragments": 4,
            "delay_steps": 5,
            "rank": 16,
        }
    ),
    optimizer=OptimizerConfig(
        inner_lr=2e-3, warmup_steps=40, beta2=0.99, slow_beta=0.99
    ),
)
