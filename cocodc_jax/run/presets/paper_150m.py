"""CoCoDC's own experiment (arXiv 2504.17672).

    python -m experiments.train --preset=paper_150m --dataset=tfds:c4/en \
        --tokenizer=sentencepiece:/path/llama.model --workdir=DIR

C4, length 1024, four regions, 256 sequences per region and step, 44,000 steps of
cosine. Published steps to validation perplexity 20.0: CoCoDC 10,292, DiLoCo 10,821,
Streaming DiLoCo 13,021 (one seed). Not measured here: it takes several accelerators
and C4. The default corpus is the embedded one; its loss then compares with nothing.
"""

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config import TrainConfig
from cocodc_jax.run.method_config import MethodConfig
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.run.run_config import RunConfig

PAPER_150M = TrainConfig(
    preset="paper_150m",
    run=RunConfig(
        steps=44_000, log_every=50, eval_every=500, eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("paper_150m"),
    data=DataConfig(sequence_length=1024, batch_per_region=256, tokenizer="bpe:32000"),
    method=MethodConfig(
        "cocodc_paper",
        # So that --method=diloco and others keep what they have in common with it.
        where_taken={
            "sync_interval": 100,
            "num_fragments": 4,
            "delay_steps": 5,
            "syncs_per_interval": 8,
            "outer_lr": 0.4,
            "outer_momentum": 0.9,
            "compensation_strength": 0.5,
        },
    ),
    optimizer=OptimizerConfig(inner_lr=4e-4, warmup_steps=1000, final_lr_fraction=0.0),
)  # fmt: skip
