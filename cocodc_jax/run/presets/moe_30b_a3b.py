"""Thirty billion parameters, three for a token: the shape of Qwen3-30B-A3B, about.

    python -m experiments.compile --preset=moe_30b_a3b --target=v5p:4x4x4 --slices=2 \
        --method=streaming_diloco --data_axis=64

Compiled here and not trained. The shape is from memory (`models.presets`); batch,
steps, rates and the numbers of the exchange are our choice. The default corpus is the
embedded one.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

MOE_30B_A3B = TrainConfig(
    preset="moe_30b_a3b",
    run=RunConfig(
        steps=100_000, log_every=50, eval_every=1000, eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("moe_30b_a3b"),
    data=DataConfig(sequence_length=4096, batch_per_region=256, tokenizer="bpe:32000"),
    method=MethodConfig(
        where_taken={
            "sync_interval": 100,
            "num_fragments": 10,
            "delay_steps": 5,
            "fragment_strategy": "experts",
        }
    ),
    optimizer=OptimizerConfig(inner_lr=3e-4, warmup_steps=2000),
)  # fmt: skip
