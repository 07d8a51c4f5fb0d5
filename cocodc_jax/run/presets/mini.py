"""The second size of a comparison: six million parameters and 1000 steps.

    python -m experiments.compare --preset=mini --seeds=5

A byte-level model on the source of the Python standard library. It shows whether the
results of `tiny` hold at eight times its size and twice its steps. Batches are twice
tiny's, so that the loss due to a delay stands out from the noise of a step. A run takes
an hour on two cores, or an accelerator. The interval is tiny's, 1/25 of the run here.
inner_lr is tiny's over sqrt(2) for twice the width, not tuned.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

MINI = TrainConfig(
    preset="mini",
    run=RunConfig(
        steps=1000, log_every=10, eval_every=50, eval_batches=32, checkpoint_every=250
    ),
    model=models.get("mini"),
    data=DataConfig(sequence_length=128, batch_per_region=8),
    method=MethodConfig(
        where_taken={
            "sync_interval": 40,
            "num_fragments": 4,
            "delay_steps": 5,
            "rank": 16,
        }
    ),
    optimizer=OptimizerConfig(
        inner_lr=1.4e-3, warmup_steps=80, beta2=0.99, slow_beta=0.99
    ),
)
