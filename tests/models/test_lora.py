"""Adapters: zero at first, then the sum with their product; and their files."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from cocodc_jax import models
from cocodc_jax.models import hugging_face, lora
from tests.slow import mostly_slow

CONFIG = models.TransformerConfig(
    vocab_size=32,
    num_layers=2,
    width=16,
    mlp_width=24,
    num_heads=4,
    num_kv_heads=2,
    lora_rank=3,
    lora_alpha=6.0,
    lora_targets="query,output,down",
)
PLAIN = dataclasses.replace(CONFIG, lora_rank=0)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 11)).astype(np.int32)


@pytest.fixture(params=mostly_slow(["scanned", "apart"], quick=["scanned"]))
def config(request):
    return dataclasses.replace(CONFIG, scan_layers=request.param == "scanned")


def trained(config):
    """The model without adapters, and with some that do something."""
    plain = dataclasses.replace(config, lora_rank=0)
    base = models.init_params(plain, jax.random.key(0))
    params = lora.adapted(base, config, jax.random.key(1))
    rng = np.random.default_rng(1)

    def train(path, x):
        is_zero = path[-1].key == "b"
        return rng.normal(size=x.shape).astype(np.float32) if is_zero else x

    return plain, base, params, jax.tree_util.tree_map_with_path(train, params)


def test_new_adapters_change_nothing_and_trained_ones_can_be_merged(config):
    plain, base, first, params = trained(config)
    assert jax.tree.structure(first) == jax.tree.structure(
        models.init_params(config, jax.random.key(0))
    )

    expected = models.apply(plain, base, TOKENS)
    np.testing.assert_array_equal(models.apply(config, first, TOKENS), expected)

    adapted = models.apply(config, params, TOKENS)
    assert np.abs(adapted - expected).max() > 0.1

    merged = lora.merged(config, params)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    # A sum of two products, and the product with a sum.
    np.testing.assert_allclose(
        models.apply(plain, merged, TOKENS), adapted, rtol=1e-4, atol=1e-4
    )


def test_files_of_adapters_add_up_to_the_merged_model(config, tmp_path):
    """The merged tensors are the base's plus scale * B A, in their names and turns."""
    plain, base, _, params = trained(config)
    hugging_face.write(tmp_path / "base", plain, base)
    hugging_face.write(tmp_path / "merged", config, params)
    hugging_face.write_adapter(tmp_path / "adapter", config, params, "somebody/model")

    tensors, merged = (
        load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged")
    )
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")

    at = "base_model.model."
    for layer in range(2):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{name}"
            a, b = (adapter.pop(f"{at}{name}.lora_{x}.weight") for x in "AB")
            assert a.shape[0] == b.shape[1] == 3
            tensors[f"{name}.weight"] += 6.0 / 3 * b @ a

    assert not adapter
    for name, tensor in tensors.items():
        np.testing.assert_allclose(merged[name], tensor, rtol=1e-5, atol=1e-5)

    adapter_config = json.loads(
        (tmp_path / "adapter" / "adapter_config.json").read_text()
    )
    assert adapter_config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (3, 6.0)
    assert adapter_config["base_model_name_or_path"] == "somebody/model"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Theirs.
def test_peft_computes_the_same_logits(config, tmp_path):
    peft, torch = map(pytest.importorskip, ("peft", "torch"))
    transformers = pytest.importorskip("transformers")
    plain, base, _, params = trained(config)

    hugging_face.write(tmp_path / "base", plain, base)
    hugging_face.write_adapter(tmp_path / "adapter", config, params, "")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")

    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()

    ours = models.apply(config, params, TOKENS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_rank=-1), "lora_rank=-1 must be at least 1, or 0 for no adapters"),
        (dict(lora_rank=17), "lora_rank=17 must be .* at most 16, the smaller side"),
        (dict(lora_alpha=0.0), "lora_alpha=0.0 must be above 0"),
        (dict(lora_targets="query,q"), "lora_targets='query,q' must be some of query,"),
        (dict(lora_targets="up,up"), "lora_targets='up,up' must be some of"),
    ],
)
def test_invalid_fields_of_adapters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_frozen_parameters_cost_no_gradient():
    """By hand: of 6 operations a parameter and token, 2 are for the gradient."""
    frozen = models.num_params(PLAIN)
    num_adapters = models.num_params(CONFIG) - frozen
    assert num_adapters == 2 * 3 * (2 * (16 + 16) + 24 + 16)
    difference = models.flops_per_token(CONFIG, 8) - models.flops_per_token(PLAIN, 8)
    assert difference == 6 * num_adapters - 2 * frozen
