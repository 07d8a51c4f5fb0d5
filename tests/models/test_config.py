import dataclasses

import pytest

from cocodc_jax.models import PRESETS, get, num_params

_PARAMETERS = {
    "smoke": 49_952,
    "tiny": 838_784,
    "mini": 6_496_512,
    "small": 35_364_096,
    "paper_150m": 214_983_680,
    "1b": 1_279_890_432,
    "moe_tiny": 2_464_928,
    "moe_30b_a3b": 30_129_475_584,
    "8b": 8_030_261_248,
}


def _counted_by_hand(config):
    kv_width = config.num_kv_heads * config.width // config.num_heads
    attention = 2 * config.width * (config.width + kv_width)
    mlp = 3 * config.width * config.mlp_width
    if config.num_experts:  # All blocks; a router, and a count of each expert's tokens.
        of_expert = 3 * config.width * config.expert_width + config.width + 1
        mlp = config.num_experts * of_expert

    norms = 2 * config.width
    if config.qk_norm:
        norms += 2 * config.width // config.num_heads
    tables = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return config.num_layers * (attention + mlp + norms) + tables + config.width


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_their_notes_state(name):
    assert num_params(get(name)) == _PARAMETERS[name] == _counted_by_hand(get(name))


def test_presets_are_large_enough_for_four_fragments():
    assert all(config.num_layers >= 4 for config in PRESETS.values())


def test_paper_blocks_hold_150m_parameters():
    config = get("paper_150m")
    blocks = num_params(config) - 2 * config.vocab_size * config.width - config.width
    assert 149e6 < blocks < 151e6


def test_unknown_preset_is_named():
    with pytest.raises(ValueError, match="preset='huge' is unknown; use one of .*tiny"):
        get("huge")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 is not a size; use 1 to 2147483647"),
        ({"num_layers": -1}, "num_layers=-1 is not a size"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 is not a size"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens=0 is not a size"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 must be above 0 and below 1"),
        ({"width": 130}, r"width=130 is not a multiple of 2 \* num_heads=8, .*=128"),
        ({"width": 124}, r"width=124 is not a multiple of 2 .* use width=128"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3; use one of \[1, 2, 4\]"),
    ],
)
def test_bad_fields_are_refused_with_a_repair(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(get("tiny"), **changes)
