"""Eight billion parameters, LLaMA 3 8B's shape (arXiv 2407.21783).

    python -m experiments.train --preset=8b --dataset=tfds:c4/en \
        --tokenizer=hf:/path/llama3 --data_axis=64 --workdir=DIR

Length 8,192 and a learning rate of 3e-4 as published. A region's batch is a million
tokens, so that four regions have the four million a step that it began with; steps,
warmup and the numbers of the exchange are our choice. Not measured here. The default
corpus is the embedded one.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

EIGHT_B = TrainConfig(
    preset="8b",
    run=RunConfig(
        steps=100_000, log_every=50, eval_every=1000, eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("8b"),
    data=DataConfig(sequence_length=8192, batch_per_region=128, tokenizer="bpe:32000"),
    method=MethodConfig(
        where_taken={"sync_interval": 100, "num_fragments": 8, "delay_steps": 5}
    ),
    optimizer=OptimizerConfig(inner_lr=3e-4, warmup_steps=2000),
)  # fmt: skip
