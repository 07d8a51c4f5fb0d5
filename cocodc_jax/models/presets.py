"""Named transformers, each a lab note: where it comes from and what it costs.

The vocabulary is the tokenizer's business: a run replaces `vocab_size` by the
tokenizer's own, rounded up. The value here is the one the counts are given for.
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
    TransformerConfig,
    tie_embeddings=False,
    remat="attention",
    compute_dtype="bfloat16",
)

# For tests and first tries: every mechanism at the least cost. Four blocks, so
# that four fragments can be cut. 49,952 parameters.
SMOKE = _of_bytes(num_layers=4, width=32, mlp_width=64, num_heads=2, num_kv_heads=2)

# The comparison of README's first command, and the size other systems were timed
# with on two cores (a GPT of the same width and depth). Bytes, length 128. 838,784
# parameters.
TINY = _of_bytes(num_layers=4, width=128, mlp_width=352, num_heads=4, num_kv_heads=4)

# Tiny with experts: two of eight, each of half its feed-forward, so that a token takes
# as much work but for the routers. 2,464,928 parameters, 842,912 for a token.
MOE_TINY = dataclasses.replace(
    TINY, num_experts=8, experts_per_token=2, expert_width=176
)

# Between tiny and small: whether what was found at 0.8M holds at 8 times that. Bytes,
# twice the width and depth of tiny. 6,496,512 parameters.
MINI = _of_bytes(num_layers=8, width=256, mlp_width=704, num_heads=8, num_kv_heads=8)

# The smallest of Streaming DiLoCo (arXiv 2501.18512, appendix): 6 layers, width
# 512, 8 heads, vocabulary 32,000. Its feed-forward of 2,048 has two matrices; 1,376
# with SwiGLU's three holds as many parameters. 35,364,096 parameters.
SMALL = TransformerConfig(
    vocab_size=32_000,
    num_layers=6,
    width=512,
    mlp_width=1376,
    num_heads=8,
    num_kv_heads=8,
    qk_norm=True,
    compute_dtype="bfloat16",
)

# The model of CoCoDC's experiment (arXiv 2504.17672), sizes read from the authors'
# code, bf16. The head count is not published; 16 heads of 64 as in OpenDiLoCo's 150M
# (arXiv 2407.07852). "150M" are the blocks alone. 214,983,680 parameters.
PAPER_150M = _large(
    vocab_size=32_000,
    num_layers=12,
    width=1024,
    mlp_width=2688,
    num_heads=16,
    num_kv_heads=16,
)

# The 1B of Streaming DiLoCo's bandwidth tables: 24 layers, width 2,048, 32 heads,
# its feed-forward of 8,192 again as SwiGLU. 1,279,890,432 parameters, 5.1 GB a float32
# copy.
ONE_B = dataclasses.replace(
    SMALL,
    num_layers=24,
    width=2048,
    mlp_width=5504,
    num_heads=32,
    num_kv_heads=32,
    remat="attention",
)

# LLaMA 3 8B (arXiv 2407.21783, table 3): 32 layers, width 4,096, feed-forward 14,336,
# 32 heads of 128 and 8 for keys and values, vocabulary 128,000 and 256 special ids,
# rotary base 500,000. Its `config.json` has the epsilon. 8,030,261,248 parameters,
# 32.1 GB a float32 copy.
EIGHT_B = _large(
    vocab_size=128_256,
    num_layers=32,
    width=4096,
    mlp_width=14_336,
    num_heads=32,
    num_kv_heads=8,
    rope_theta=500_000.0,
    norm_epsilon=1e-5,
)

# Like Qwen3-30B-A3B, from memory: 48 layers of width 2,048, 128 experts of width 768, 8
# for a token, 4 heads of 128 for keys and values, normalised queries and keys,
# vocabulary 151,936, rotary base 1,000,000. There 32 query heads make 4,096 features;
# here heads share out the width, so there are 16. 30,129,475,584 parameters,
# 2,950,385,664 for a token.
MOE_30B_A3B = _large(
    vocab_size=151_936,
    num_layers=48,
    width=2048,
    mlp_width=6144,
    num_heads=16,
    num_kv_heads=4,
    rope_theta=1_000_000.0,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_width=768,
    balance_loss=0.001,
)

PRESETS = {
    "smoke": SMOKE,
    "tiny": TINY,
    "moe_tiny": MOE_TINY,
    "mini": MINI,
    "small": SMALL,
    "paper_150m": PAPER_150M,
    "1b": ONE_B,
    "8b": EIGHT_B,
    "moe_30b_a3b": MOE_30B_A3B,
}


def get(name: str) -> TransformerConfig:
    """Return the preset called `name`."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} is unknown; use one of {list(PRESETS)}")
    return PRESETS[name]
