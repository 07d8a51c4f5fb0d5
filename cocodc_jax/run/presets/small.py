"""Streaming DiLoCo's smallest model (arXiv 2501.18512), 35M parameters.

    python -m experiments.train --preset=small --dataset=tfds:c4/en \
        --tokenizer=sentencepiece:/path/c4.model --workdir=DIR

Published evaluation loss on C4 (data parallel / DiLoCo H 30 / streaming H 30 /
streaming H 100): 3.51 / 3.54 / 3.53 / 3.56. Not measured here: C4 is not on the
machines this was built on. Batch size, learning rate and steps are not in the
published table and are our choice. The default corpus is the embedded one, so that
the preset also runs without any download; its loss then compares with nothing.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

SMALL = TrainConfig(
    preset="small",
    run=RunConfig(
        steps=10_000, log_every=50, eval_every=500, eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("small"),
    data=DataConfig(sequence_length=1024, batch_per_region=64, tokenizer="bpe:32000"),
    method=MethodConfig(
        where_taken={"sync_interval": 100, "num_fragments": 4, "delay_steps": 5}
    ),
    optimizer=OptimizerConfig(inner_lr=4e-4, warmup_steps=1000),
)  # fmt: skip
