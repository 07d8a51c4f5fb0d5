"""One billion parameters, the size of Streaming DiLoCo's bandwidth tables.

    python -m experiments.train --preset=1b --dataset=tfds:c4/en \
        --tokenizer=sentencepiece:/path/c4.model --model_axis=4 --workdir=DIR

Published evaluation loss on C4 (arXiv 2501.18512; data parallel / DiLoCo H 30 /
streaming H 30 / streaming H 100): 2.49 / 2.49 / 2.48 / 2.50. Not measured here. Batch
size, learning rate and steps are our choice. The default corpus is the embedded one.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

ONE_B = TrainConfig(
    preset="1b",
    run=RunConfig(
        steps=25_000, log_every=50, eval_every=1000, eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("1b"),
    data=DataConfig(sequence_length=2048, batch_per_region=256, tokenizer="bpe:32000"),
    method=MethodConfig(
        where_taken={"sync_interval": 100, "num_fragments": 8, "delay_steps": 5}
    ),
    optimizer=OptimizerConfig(inner_lr=2e-4, warmup_steps=1000),
)  # fmt: skip
