"""`config.json` of a Hugging Face LLaMA or Mixtral: written, read, compared."""

import json
import os
import pathlib
from typing import Any

from cocodc_jax.models.config import TransformerConfig

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"

# The name there of each field of `TransformerConfig`, and its value if it is not said.
_SHAPE = {
    "num_layers": ("num_hidden_layers", None),
    "width": ("hidden_size", None),
    "mlp_width": ("intermediate_size", None),
    "num_heads": ("num_attention_heads", None),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
}
# The same of a Mixtral, none of whose blocks has an ordinary feed-forward.
_SHAPE_OF_EXPERTS = {n: x for n, x in _SHAPE.items() if n != "mlp_width"} | {
    "norm_epsilon": ("rms_norm_eps", 1e-5),
    "num_experts": ("num_local_experts", 8),
    "experts_per_token": ("num_experts_per_tok", 2),
    "expert_width": ("intermediate_size", 14_336),
}
# What this package's transformer always is.
_ALWAYS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _shape(config: TransformerConfig) -> dict[str, tuple[str, Any]]:
    return _SHAPE_OF_EXPERTS if config.num_experts else _SHAPE


def read_config(
    folder: str | os.PathLike[str], config: TransformerConfig | None = None
) -> dict[str, Any]:
    """Read `config.json` of a LLaMA or a Mixtral; refuse other models."""
    path = pathlib.Path(folder) / CONFIG_FILE
    values = read_json(path)
    kind = values.get("model_type")
    have = {"llama": "no experts", "mixtral": "experts (--num_experts)"}

    kinds = tuple(have)
    if config is not None and kind in have:
        kinds = ("mixtral",) if config.num_experts else ("llama",)
    if kind not in kinds:
        why = f"; one with {have[kind]}" if kind in have else ""
        raise ValueError(
            f"{path}: model_type is {kind!r} there{why}, and only "
            f"{' and '.join(map(repr, kinds))} can be read here"
        )
    if not isinstance(values.get("vocab_size"), int):
        raise ValueError(f"{path} has no vocab_size")

    return values


def check_llama(config: TransformerConfig) -> None:
    """Raise ValueError for a transformer that `LlamaForCausalLM` cannot compute."""
    if config.qk_norm:
        raise ValueError(
            "qk_norm=True normalises queries and keys, which LlamaForCausalLM does "
            "not; a model is LLaMA-shaped with --qk_norm=false"
        )

    for name, value in (("shared_experts", 0), ("moe_every", 1)):
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={getattr(config, name)} is not what MixtralForCausalLM "
                f"computes, which has experts alone in every block; use --{name}="
                f"{value}"
            )


def check_shape(folder: pathlib.Path, config: TransformerConfig) -> None:
    """Refuse a `config.json` of another shape, naming the flags that would fit it."""
    path = folder / CONFIG_FILE
    values = read_config(folder, config)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{path}: rotary positions are scaled by {kind!r} there, and not here; a "
            "model without rope_scaling can be read"
        )

    for name, value in (_ALWAYS | {"sliding_window": None}).items():
        if values.get(name, value) != value:
            raise ValueError(
                f"{path}: {name} is {values[name]!r} there, and {value!r} here always"
            )

    stored = {
        ours: values.get(theirs, default)
        for ours, (theirs, default) in _shape(config).items()
    }
    # What transformers takes for what a file leaves out, of Mixtral and of LLaMA.
    default_theta = 1e6 if config.num_experts else 1e4
    default_heads = 8 if config.num_experts else None
    heads = values.get("num_key_value_heads", default_heads)
    stored["num_kv_heads"] = heads or stored["num_heads"]
    theta = values.get("rope_theta", default_theta)
    stored["rope_theta"] = rope.get("rope_theta", theta)

    wrong = {n: v for n, v in stored.items() if v != getattr(config, n)}
    if wrong:
        differences = [
            f"{n} is {v} there and {getattr(config, n)} here" for n, v in wrong.items()
        ]
        flags = [f"--{n}={str(v).lower()}" for n, v in wrong.items()]
        raise ValueError(
            f"{path} is of another model: {'; '.join(differences)}; give "
            f"{' '.join(flags)}"
        )
    if (values.get("head_dim") or config.head_width) != config.head_width:
        raise ValueError(
            f"{path}: head_dim is {values['head_dim']} there, and width / num_heads = "
            f"{config.head_width} here always"
        )
    if values["vocab_size"] > config.vocab_size:
        raise ValueError(
            f"{path}: vocab_size is {values['vocab_size']} there and "
            f"{config.vocab_size} here; use at least as many"
        )


def to_json(
    config: TransformerConfig, max_length: int, eos_id: int | None
) -> dict[str, Any]:
    """Return the content of a model's `config.json`, for transformers 4 and 5."""
    kind = "llama"
    of_experts = {}
    if config.num_experts:
        kind = "mixtral"
        of_experts = {
            "router_aux_loss_coef": config.balance_loss,
            "output_router_logits": False,
            "sliding_window": None,
        }

    return {
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        **{
            theirs: getattr(config, ours)
            for ours, (theirs, _) in _shape(config).items()
        },
        **of_experts,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        **_ALWAYS,
        "max_position_embeddings": max_length,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def adapter_json(
    config: TransformerConfig, base: str, targets: list[str]
) -> dict[str, Any]:
    """Return the content of the adapters' `adapter_config.json`, for `peft`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a file; refuse other content and unreadable files."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value
