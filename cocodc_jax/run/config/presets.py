"""Presets: named values of `TrainConfig`, each with a lab note.

    python -m experiments.train --preset=tiny --workdir=DIR

Presets hold published numbers of methods, or numbers in their proportions, so that
methods can be compared. What this project recommends is not a preset:
`experiments.train --plan=auto` chooses it for a network, and the run `recipe` of
`experiments.compare` is it.

The default corpus is Python's own source, so that every preset runs without a download;
the loss then compares with no published one. For C4, and a region of four devices:

    python -m experiments.train --preset=1b --dataset=tfds:c4/en \
        --tokenizer=sentencepiece:/path/c4.model --model_axis=4 --workdir=DIR
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from cocodc_jax import models
from cocodc_jax.data import DataConfig
from cocodc_jax.run.config.method_config import MethodConfig
from cocodc_jax.run.config.optimizer_config import OptimizerConfig
from cocodc_jax.run.config.run_config import RunConfig
from cocodc_jax.run.config.train_config import TrainConfig

# Seconds on two cores: every mechanism, no result. For tests and for finding out
# whether an installation works; 50,000 parameters.
SMOKE = TrainConfig(
    preset="smoke",
    run=RunConfig(
        steps=48, log_every=4, eval_every=16, eval_batches=4, checkpoint_every=16
    ),
    model=models.get("smoke"),
    data=DataConfig(sequence_length=32, batch_per_region=4),
    method=MethodConfig(
        where_taken={
            "sync_interval": 16,
            "num_fragments": 4,
            "delay_steps": 2,
            "rank": 8,
        }
    ),
    optimizer=OptimizerConfig(
        inner_lr=3e-3, warmup_steps=5, beta2=0.99, slow_beta=0.99
    ),
)

# The laptop comparison: about one million parameters, minutes on two cores.
#
#     python -m experiments.compare --preset=tiny
#
# A byte-level model on the source of the Python standard library. The interval of 40
# steps and the delay of 5 keep the proportions of the papers (H 100, tau 5) where only
# a few hundred steps fit; inner_lr was the best of 1e-3, 2e-3 and 4e-3 for data
# parallel. Results are in docs/results/bytes.md and docs/results/methods.md, with their
# commands.
TINY = dataclasses.replace(
    SMOKE.replace(
        steps=480,
        log_every=10,
        eval_every=40,
        eval_batches=32,
        checkpoint_every=240,
        sequence_length=128,
        inner_lr=2e-3,
        warmup_steps=40,
    ).where(sync_interval=40, delay_steps=5, rank=16),
    preset="tiny",
    model=models.get("tiny"),
)

# Tiny with a mixture of experts: minutes on two cores. Text, steps and rates are those
# of `tiny`, whose work a token it has. Fragments are one of everything that all tokens
# pass, and four of experts.
MOE_TINY = dataclasses.replace(
    TINY.where(num_fragments=5, fragment_strategy="experts"),
    preset="moe_tiny",
    model=models.get("moe_tiny"),
)

# The second size of a comparison: six million parameters and 1000 steps.
#
#     python -m experiments.compare --preset=mini --seeds=5
#
# It shows whether the results of `tiny` hold at eight times its size and twice its
# steps, on the same text. Batches are twice tiny's, so that the loss due to a delay
# stands out from the noise of a step. A run takes an hour on two cores, or an
# accelerator. The interval is tiny's, 1/25 of the run here. inner_lr is tiny's over
# sqrt(2) for twice the width, not tuned.
MINI = dataclasses.replace(
    TINY.replace(
        steps=1000,
        eval_every=50,
        checkpoint_every=250,
        batch_per_region=8,
        inner_lr=1.4e-3,
        warmup_steps=80,
    ),
    preset="mini",
    model=models.get("mini"),
)

# Streaming DiLoCo's smallest model (arXiv 2501.18512), 35M parameters.
#
# Published evaluation loss on C4 (data parallel / DiLoCo H 30 / streaming H 30 /
# streaming H 100): 3.51 / 3.54 / 3.53 / 3.56. Not measured here: C4 is not on the
# machines this was built on. Batch size, learning rate and steps are not in the
# published table and are our choice.
SMALL = TrainConfig(
    preset="small",
    run=RunConfig(
        steps=10_000,
        log_every=50,
        eval_every=500,
        eval_batches=16,
        checkpoint_every=1000,
    ),
    model=models.get("small"),
    data=DataConfig(sequence_length=1024, batch_per_region=64, tokenizer="bpe:32000"),
    method=MethodConfig(
        where_taken={"sync_interval": 100, "num_fragments": 4, "delay_steps": 5}
    ),
    optimizer=OptimizerConfig(inner_lr=4e-4, warmup_steps=1000),
)

# CoCoDC's own experiment (arXiv 2504.17672), with the tokenizer of LLaMA.
#
# C4, length 1024, four regions, 256 sequences per region and step, 44,000 steps of
# cosine. Published steps to validation perplexity 20.0: CoCoDC 10,292, DiLoCo 10,821,
# Streaming DiLoCo 13,021 (one seed). Not measured here: it takes several accelerators
# and C4.
PAPER_150M = dataclasses.replace(
    SMALL.replace(steps=44_000, batch_per_region=256, final_lr_fraction=0.0),
    preset="paper_150m",
    model=models.get("paper_150m"),
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
)

# One billion parameters, the size of Streaming DiLoCo's bandwidth tables.
#
# Published evaluation loss on C4 (arXiv 2501.18512; data parallel / DiLoCo H 30 /
# streaming H 30 / streaming H 100): 2.49 / 2.49 / 2.48 / 2.50. Not measured here. Batch
# size, learning rate and steps are our choice.
ONE_B = dataclasses.replace(
    SMALL.replace(
        steps=25_000,
        eval_every=1000,
        sequence_length=2048,
        batch_per_region=256,
        inner_lr=2e-4,
    ).where(num_fragments=8),
    preset="1b",
    model=models.get("1b"),
)

# Eight billion parameters, LLaMA 3 8B's shape (arXiv 2407.21783), for
# --tokenizer=hf:/path/llama3 and --data_axis=64.
#
# Length 8,192 and a learning rate of 3e-4 as published. A region's batch is a million
# tokens, so that four regions have the four million a step that it began with; steps,
# warmup and the numbers of the exchange are our choice. Not measured here.
EIGHT_B = dataclasses.replace(
    ONE_B.replace(
        steps=100_000,
        sequence_length=8192,
        batch_per_region=128,
        inner_lr=3e-4,
        warmup_steps=2000,
    ),
    preset="8b",
    model=models.get("8b"),
)

# Thirty billion parameters, three for a token: the shape of Qwen3-30B-A3B, about.
#
#     python -m experiments.compile --preset=moe_30b_a3b --target=v5p:4x4x4 --slices=2 \
#         --method=streaming_diloco --regions=2
#
# Compiled here and not trained. The shape is from memory (`models.presets`); batch,
# steps, rates and the numbers of the exchange are our choice.
MOE_30B_A3B = dataclasses.replace(
    EIGHT_B.replace(sequence_length=4096, batch_per_region=256).where(
        num_fragments=10, fragment_strategy="experts"
    ),
    preset="moe_30b_a3b",
    model=models.get("moe_30b_a3b"),
)

PRESETS = {
    config.preset: config
    for config in (
        SMOKE,
        TINY,
        MOE_TINY,
        MINI,
        SMALL,
        PAPER_150M,
        ONE_B,
        EIGHT_B,
        MOE_30B_A3B,
    )
}


def with_warmup(preset: TrainConfig, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves for a preset; its warm-up is scaled to a run that is too short."""
    steps = leaves.get("steps", 0)
    warmup = preset.optimizer.warmup_steps
    if "warmup_steps" in leaves or not 0 < steps <= warmup:
        return dict(leaves)

    share = round(warmup * steps / preset.run.steps)
    print(
        f"note: steps={steps} are too few for the warmup_steps={warmup} of preset "
        f"{preset.preset}, whose steps are {preset.run.steps}: the warm-up is {share}",
        file=sys.stderr,
    )
    return {**leaves, "warmup_steps": share}
