"""The shape and numerics of a transformer, as one validated, hashable value."""

import dataclasses
import math

from cocodc_jax.fields import Kind, check_choices, check_least, free, one_of

# More cannot be compiled or indexed: one program has all layers, and an index of a
# dimension has 31 bits.
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1

REMAT_POLICIES = ("none", "dots", "attention", "full", "offload")
ATTENTIONS = ("auto", "plain", "blocks", "cudnn", "splash")
BACKWARDS = ("auto", "plain", "cpu")
DISPATCHES = ("auto", "ragged", "blocks")
COMPUTE_DTYPES = ("float32", "bfloat16")
# Matrices of a block that may have adapters, and their module in its parameters.
LORA = "lora"
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
WRITERS = ("output", "down")  # Those that give the residual width; the others take it.

_SIZES = (
    "vocab_size",
    "num_layers",
    "width",
    "mlp_width",
    "num_heads",
    "num_kv_heads",
    "loss_chunk_tokens",
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model's parameters and the numerics of its computation.

    Attributes:
      vocab_size: V, rows of the embedding; at least the tokenizer's size.
      num_layers: transformer blocks.
      width: D, features of the residual stream.
      mlp_width: features inside the SwiGLU feed-forward.
      num_heads: H, query heads, each of `width // num_heads` features.
      num_kv_heads: key and value heads; each serves
        `num_heads // num_kv_heads` query heads (grouped-query attention).
      rope_theta: base of the rotary wavelengths, in positions.
      norm_epsilon: added to the mean square that RMSNorm divides by the root of.
      qk_norm: RMS-normalise each query and key head before the rotation.
      tie_embeddings: the head is the embedding transposed.
      scan_layers: blocks are stacked on a leading layer axis and scanned, which
        compiles one block whatever their number; otherwise each block has its
        own arrays and its own code, which is the faster on a CPU.
      remat: what backward computes again: "none" keeps every activation,
        "dots" the products with weights and what a flash kernel gives, "attention"
        the inputs of blocks and what a flash kernel gives, "full" the inputs of
        blocks only. "offload" keeps what "attention" does, but in the memory of the
        accelerator's host, which takes it in as backward comes to it; a flash
        kernel's forward pass is then computed again.
      attention: "plain" holds the scores of all pairs of positions; "blocks" is the
        same for a few blocks of queries, which leaves out most of the pairs that
        are masked; "cudnn" (GPUs, bfloat16) and "splash" (TPUs) are flash kernels;
        "auto" is the platform's own, blocks on CPUs.
      backward: gradients of products with weights, and of norms: "plain" as JAX derives
        them, "cpu" in the order in which CPUs are quick, which forward mode cannot
        differentiate; "auto" is the platform's own in a run, and plain elsewhere.
      compute_dtype: "float32" or "bfloat16" for activations and for the weights
        as used; parameters, gradients and the loss are always float32.
      loss_chunk_tokens: tokens whose logits exist at one time on each device.
      lora_rank: r of LoRA's adapters, a product [in, r] [r, out] for each matrix of
        lora_targets, which alone are trained: what init_from holds stays as it is. 0
        has none and trains everything.
      lora_alpha: adapters count lora_alpha / lora_rank times.
      lora_targets: matrices of every block that have adapters, separated by commas.
      num_experts: E, experts in place of the feed-forward of a block; 0 has none.
      experts_per_token: k, experts that a router gives each token to.
      expert_width: features inside each expert.
      shared_experts: experts that every token passes besides; they are one
        feed-forward of that many times expert_width.
      moe_every: every so many-th block has experts, the others an ordinary
        feed-forward.
      balance_loss: weight of the router's load-balancing loss.
      router_z_loss: weight of the router's z loss.
      expert_dispatch: "ragged" multiplies each expert's tokens by XLA's own grouped
        product, "blocks" pads them to blocks of equal length; "auto" is ragged on TPUs
        and blocks elsewhere.
    """

    vocab_size: int
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = True
    scan_layers: bool = True
    remat: str = one_of(REMAT_POLICIES, "none", Kind.FREE)
    attention: str = one_of(ATTENTIONS, "auto", Kind.FREE)
    backward: str = one_of(BACKWARDS, "auto", Kind.FREE)
    compute_dtype: str = one_of(COMPUTE_DTYPES, "float32")
    loss_chunk_tokens: int = free(2048)
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: str = ",".join(MATRICES)
    num_experts: int = 0
    experts_per_token: int = 2
    expert_width: int = 0
    shared_experts: int = 0
    moe_every: int = 1
    balance_loss: float = 0.01
    router_z_loss: float = 0.001
    expert_dispatch: str = one_of(DISPATCHES, "auto", Kind.FREE)

    def __post_init__(self):
        for name in _SIZES:
            most = MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not a size; use 1 to {most}"
                )

        if not 1 < self.rope_theta < math.inf:
            raise ValueError(
                f"rope_theta={self.rope_theta} must be above 1 and finite, as in 10000"
            )
        if not 0 < self.norm_epsilon < 1:
            raise ValueError(
                f"norm_epsilon={self.norm_epsilon} must be above 0 and below 1, as in "
                "1e-6"
            )

        check_choices(self)
        self._check_heads()
        self._check_lora()
        self._check_experts()

    def _check_experts(self):
        if self.num_experts < 0 or self.num_experts == 1:
            raise ValueError(
                f"num_experts={self.num_experts} must be at least 2, or 0 for none"
            )
        if not self.num_experts:
            of_experts = ("expert_width", "shared_experts")
            meaningless = [name for name in of_experts if getattr(self, name)]
            if self.moe_every != 1:
                meaningless.append("moe_every")
            if meaningless:
                name = meaningless[0]
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning with num_experts=0; "
                    "leave it out, or use num_experts=8"
                )

            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be at least 1 and at "
                f"most num_experts={self.num_experts}"
            )
        if not 1 <= self.expert_width <= MAX_SIZE:
            raise ValueError(
                f"expert_width={self.expert_width} is not a size; with num_experts="
                f"{self.num_experts} use 1 or more, such as mlp_width / "
                f"experts_per_token = {self.mlp_width // self.experts_per_token}"
            )

        check_least(self, 0, "shared_experts")
        if self.moe_every < 1 or self.num_layers % self.moe_every:
            raise ValueError(
                f"moe_every={self.moe_every} does not divide num_layers="
                f"{self.num_layers}; use one of {_divisors(self.num_layers)}"
            )

        for name in ("balance_loss", "router_z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0 and finite"
                )

        of_feed_forward = sorted({*self.lora_names} & {"gate", "up", "down"})
        if of_feed_forward:
            raise ValueError(
                f"lora_targets={self.lora_targets!r} has {of_feed_forward[0]}, and "
                "experts have no adapters; use lora_targets=query,key,value,output"
            )

    def _check_lora(self):
        most = min(self.width, self.mlp_width)
        if not 0 <= self.lora_rank <= most:
            raise ValueError(
                f"lora_rank={self.lora_rank} must be at least 1, or 0 for no adapters, "
                f"and at most {most}, the smaller side of a matrix"
            )
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"lora_alpha={self.lora_alpha} must be above 0 and finite")

        named = self.lora_targets.split(",")
        if not set(named) <= set(MATRICES) or len({*named}) < len(named):
            raise ValueError(
                f"lora_targets={self.lora_targets!r} must be some of "
                f"{','.join(MATRICES)}"
            )

    def _check_heads(self):
        pairs = 2 * self.num_heads
        if self.width % pairs:
            nearest = max(1, round(self.width / pairs)) * pairs
            raise ValueError(
                f"width={self.width} is not a multiple of 2 * num_heads={pairs}, and "
                f"RoPE turns pairs of a head's features; use width={nearest}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}; use one of {_divisors(self.num_heads)}"
            )

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Matrices of a block that have adapters."""
        return tuple(self.lora_targets.split(",")) if self.lora_rank else ()

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter is multiplied by."""
        return self.lora_alpha / self.lora_rank

    @property
    def residual_gain(self) -> float:
        """What matrices that write to the residual stream are scaled by (GPT-2)."""
        return 1 / math.sqrt(2 * self.num_layers)

    @property
    def num_moe_layers(self) -> int:
        """Blocks that have experts."""
        return self.num_layers // self.moe_every if self.num_experts else 0

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts; the last of every `moe_every` does."""
        return bool(self.num_experts) and (layer + 1) % self.moe_every == 0

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.num_heads


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]
