"""Named transformers, each a lab note: where it comes from and what it costs.

A run replaces `vocab_size` by the tokenizer's, rounded up. The value here is the one
for which the parameter counts are given.
"""

import dataclasses
import functools

from cocodc_jax.models.config import TransformerConfig

# Of bytes: 256 and one special id, rounded up to a multiple of 16 so that a model axis
# divides it. Blocks are not scanned: on a CPU a step is then a fifth faster and
# compiles as fast.
_of_bytes = functools.partial(TransformerConfig, vocab_size=272, scan_layers=False)
# For accelerators.
_large = functools.partial(
    TransformerConfig, tie_embeddings=False, remat="attention", compute_dtype="bfloat16"
)
# README's first command, and the size other systems were timed with on two cores (a GPT
# of the same width and depth). Bytes, length 128. 838,784 parameters.
_TINY = _of_bytes(num_layers=4, width=128, mlp_width=352, num_heads=4, num_kv_heads=4)
# The smallest of Streaming DiLoCo (arXiv 2501.18512, appendix). Its feed-forward of
# 2,048 has two matrices; 1,376 with SwiGLU's three holds as many parameters. 35,364,096
# parameters.
_SMALL = TransformerConfig(
    vocab_size=32_000,
    num_layers=6,
    width=512,
    mlp_width=1376,
    num_heads=8,
    num_kv_heads=8,
    qk_norm=True,
    compute_dtype="bfloat16",
)

# fmt: off
PRESETS = {
    # For tests: every mechanism at the least cost, and four blocks, so that four
    # fragments can be cut. 49,952 parameters.
    "smoke": _of_bytes(
        num_layers=4, width=32, mlp_width=64, num_heads=2, num_kv_heads=2
    ),
    "tiny": _TINY,
    # Two experts of eight, each of half tiny's feed-forward, so that a token takes as
    # much work but for the routers. 2,464,928 parameters, 842,912 for a token.
    "moe_tiny": dataclasses.replace(_TINY, num_experts=8, expert_width=176),
    # To test whether results at 0.8M hold at 8 times that: twice the width and depth of
    # tiny. 6,496,512 parameters.
    "mini": _of_bytes(
        num_layers=8, width=256, mlp_width=704, num_heads=8, num_kv_heads=8
    ),
    "small": _SMALL,
    # The model of CoCoDC's experiment (arXiv 2504.17672), sizes read from the authors'
    # code. The head count is not published; 16 heads of 64 as in OpenDiLoCo's 150M
    # (arXiv 2407.07852). "150M" are the blocks alone. 214,983,680 parameters.
    "paper_150m": _large(
        vocab_size=32_000, num_layers=12, width=1024, mlp_width=2688, num_heads=16,
        num_kv_heads=16,
    ),
    # The 1B of Streaming DiLoCo's bandwidth tables, its feed-forward of 8,192 again as
    # SwiGLU. 1,279,890,432 parameters, 5.1 GB a float32 copy.
    "1b": dataclasses.replace(
        _SMALL, num_layers=24, width=2048, mlp_width=5504, num_heads=32,
        num_kv_heads=32, remat="attention",
    ),
    # LLaMA 3 8B (arXiv 2407.21783, table 3); 256 of the vocabulary are special ids. Its
    # `config.json` has the epsilon. 8,030,261,248 parameters, 32.1 GB a float32 copy.
    "8b": _large(
        vocab_size=128_256, num_layers=32, width=4096, mlp_width=14_336, num_heads=32,
        num_kv_heads=8, rope_theta=500_000.0, norm_epsilon=1e-5,
    ),
    # Like Qwen3-30B-A3B, from memory. There 32 query heads of 128 make 4,096 features;
    # here heads share out the width, so there are 16. 30,129,475,584 parameters,
    # 2,950,385,664 for a token.
    "moe_30b_a3b": _large(
        vocab_size=151_936, num_layers=48, width=2048, mlp_width=6144, num_heads=16,
        num_kv_heads=4, rope_theta=1_000_000.0, qk_norm=True,
        num_experts=128, experts_per_token=8, expert_width=768, balance_loss=0.001,
    ),
}
# fmt: on


def get(name: str) -> TransformerConfig:
    """Return the preset called `name`."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; use one of {list(PRESETS)}")
    return PRESETS[name]
