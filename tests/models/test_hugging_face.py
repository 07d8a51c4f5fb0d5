"""Files of Hugging Face's LLaMA: equal logits by other code, and refused files."""

import dataclasses
import json
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cocodc_jax._extras import MissingExtraError
from cocodc_jax.models import TransformerConfig, apply, hugging_face
from tests.models import oracle
from tests.program.mixture import drawn_params

SCANNED = TransformerConfig(
    vocab_size=32,
    num_layers=3,
    width=16,
    mlp_width=24,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=500.0,
    norm_epsilon=1e-3,
    tie_embeddings=False,
)
APART = dataclasses.replace(SCANNED, scan_layers=False)
TIED = dataclasses.replace(APART, tie_embeddings=True, num_kv_heads=4)
MIXTRAL = dataclasses.replace(
    SCANNED, num_layers=2, num_experts=4, expert_width=12, experts_per_token=2
)
TOKENS = np.random.default_rng(2).integers(0, 32, (2, 11)).astype(np.int32)


OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INSIDE = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "block_sparse_moe.gate",
}
OF_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}


def as_in_files(params):
    """Tensors by the names of Hugging Face; torch.nn.Linear is [out, in]."""
    tensors = {}

    for path, x in jax.tree_util.tree_leaves_with_path(params):
        keys = [key.key for key in path if key.key != "scale"]
        at = f"model.layers.{keys[1]}" if keys[0] == "blocks" else ""
        if keys[-1] == "tokens":
            continue  # Files have no counts of tokens.

        if "experts" in keys:
            at += ".block_sparse_moe.experts"
            for e, matrix in enumerate(x):
                tensors[f"{at}.{e}.{OF_EXPERTS[keys[-1]]}"] = matrix.T
        elif at:
            tensors[f"{at}.{INSIDE[keys[-1]]}"] = x.T
        else:
            tensors[OUTSIDE[keys[0]]] = x if keys[0] == "embedding" else x.T

    return {f"{name}.weight": x for name, x in tensors.items()}


@pytest.fixture(
    params=[SCANNED, APART, TIED, MIXTRAL], ids=["scanned", "apart", "tied", "mixtral"]
)
def config(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    hugging_face.write(tmp_path, APART, drawn_params(APART), max_length=64, eos_id=7)
    return tmp_path


def test_tensors_have_the_names_and_axes_of_hugging_face(config, tmp_path):
    """What these compute is in `oracle`; that `transformers` does, in a slow test."""
    hugging_face.write(tmp_path, config, drawn_params(config))
    tensors = load_file(tmp_path / "model.safetensors")
    config_json = json.loads((tmp_path / "config.json").read_text())
    wanted = as_in_files(oracle.unstacked(config, drawn_params(config)))
    jax.tree.map(np.testing.assert_array_equal, tensors, wanted)
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "rope_theta": 500.0,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": config.tie_embeddings,
    }
    assert {name: config_json[name] for name in sizes} == sizes

    if config.num_experts:
        assert (
            config_json["num_local_experts"],
            config_json["num_experts_per_tok"],
        ) == (4, 2)


def test_reading_restores_the_written_parameters(config, tmp_path):
    hugging_face.write(tmp_path, config, drawn_params(config))
    params = hugging_face.read(tmp_path, config)
    jax.tree.map(np.testing.assert_array_equal, params, drawn_params(config))


def test_several_files_in_bfloat16_are_read(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, inside in parts.items():
        half = {name: tensors[name].astype(ml_dtypes.bfloat16) for name in inside}
        save_file(half, folder / file)

    places = {name: file for file, inside in parts.items() for name in inside}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    params = hugging_face.read(folder, APART)
    rounded = jax.tree.map(
        lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), drawn_params(APART)
    )

    jax.tree.map(np.testing.assert_array_equal, params, rounded)
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")})
    )
    with pytest.raises(ValueError, match=r"one.safetensors has no tensor 'model.*, wh"):
        hugging_face.read(folder, APART)


def test_a_vocabulary_that_was_rounded_up_gets_mean_rows(folder):
    wider = dataclasses.replace(APART, vocab_size=48)
    params = hugging_face.read(folder, wider)

    embedding = drawn_params(APART)["embedding"]
    np.testing.assert_array_equal(params["embedding"][:32], embedding)
    np.testing.assert_array_equal(
        params["embedding"][32:], np.tile(embedding.mean(0), (16, 1))
    )

    assert params["head"].shape == (16, 48)
    np.testing.assert_array_equal(params["head"][:, :32], drawn_params(APART)["head"])


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_rope_fields_of_transformers_5_are_checked(folder):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    change_config(folder, rope_parameters=rope, rope_theta=None)
    hugging_face.check(folder, APART)
    rope["rope_theta"] = 1e4
    change_config(folder, rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_theta is 10000.0 there and 500.0 here"):
        hugging_face.check(folder, APART)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "width is 32 there and 16 here; give --width=32"),
        (
            {"rope_theta": 1e4},
            "rope_theta is 10000.0 there and 500.0 here; give --rope",
        ),
        ({"rms_norm_eps": 1e-5}, "norm_epsilon is 1e-05 there and 0.001 here"),
        ({"num_key_value_heads": None}, "num_kv_heads is 4 there and 2 here"),
        ({"tie_word_embeddings": True}, "give --tie_embeddings=true"),
        ({"head_dim": 8}, "head_dim is 8 there, and width / num_heads = 4 here"),
        ({"attention_bias": True}, "attention_bias is True there, and False here"),
        ({"sliding_window": 64}, "sliding_window is 64 there, and None here always"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' there, and 'silu' here"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "positions are scaled by 'llama3'"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3' there, and only 'llama'"),
        ({"model_type": "mixtral"}, r"there; one with experts \(--num_experts\), and"),
        ({"vocab_size": 48}, "vocab_size is 48 there and 32 here; use at least"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_name(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hugging_face.read(folder, APART)


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_and_unknown_tensors_are_refused_by_name(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    odd = "model.layers.1.mlp.bias"
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda t: t.update({old: np.ones(2, np.float32)}))
    hugging_face.check(folder, APART)
    change_tensors(folder, lambda t: t.update({odd: np.ones(2, np.float32)}))

    with pytest.raises(ValueError, match=f"no place for: '{odd}'$"):
        hugging_face.check(folder, APART)

    change_tensors(folder, lambda t: (t.pop(odd), t.update({name: t[name].T.copy()})))
    with pytest.raises(ValueError, match=rf"{name} in .* \[16, 24\], and \[24, 16\]"):
        hugging_face.check(folder, APART)

    change_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=f"has no tensor '{name}'$"):
        hugging_face.check(folder, APART)


def test_a_tied_head_may_be_stored_again(tmp_path):
    hugging_face.write(tmp_path, TIED, drawn_params(TIED))
    again = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})  # noqa: E731
    change_tensors(tmp_path, again)
    hugging_face.check(tmp_path, TIED)


def test_a_damaged_file_of_tensors_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read: "):
        hugging_face.check(folder, APART)


def test_a_missing_file_of_tensors_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model"):
        hugging_face.check(folder, APART)


def test_a_damaged_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read: "):
        hugging_face.check(folder, APART)


def test_writing_a_model_with_qk_norm_is_refused(tmp_path):
    config = dataclasses.replace(APART, qk_norm=True)
    with pytest.raises(ValueError, match="LLaMA-shaped with --qk_norm=false"):
        hugging_face.write(tmp_path, config, drawn_params(config))


@pytest.fixture
def mixtral(tmp_path):
    """A folder with a mixture of experts."""
    hugging_face.write(tmp_path, MIXTRAL, drawn_params(MIXTRAL))
    return tmp_path


def test_a_mixture_of_another_configuration_is_refused(mixtral):
    more = dataclasses.replace(MIXTRAL, num_experts=8)
    with pytest.raises(ValueError, match="num_experts is 4 there and 8 here; give"):
        hugging_face.read(mixtral, more)
    with pytest.raises(ValueError, match="'mixtral' there; one with experts"):
        hugging_face.read(mixtral, SCANNED)


def test_writing_a_mixture_with_shared_experts_is_refused(tmp_path):
    shared = dataclasses.replace(MIXTRAL, shared_experts=1)
    with pytest.raises(ValueError, match="shared_experts=1 is not what Mixtral"):
        hugging_face.write(tmp_path, shared, drawn_params(shared))


def test_a_mixture_without_entries_has_the_defaults_of_transformers(mixtral):
    path = mixtral / "config.json"
    config_json = json.loads(path.read_text())
    del config_json["rope_theta"], config_json["num_key_value_heads"]
    path.write_text(json.dumps(config_json))

    with pytest.raises(ValueError, match="num_kv_heads is 8 there.*rope_theta is 1000"):
        hugging_face.read(mixtral, MIXTRAL)


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'cocodc_jax\[hf\]'"):
        hugging_face.read(folder, APART)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Theirs.
def test_transformers_computes_the_same_logits(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    hugging_face.write(tmp_path, config, drawn_params(config), max_length=64, eos_id=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    kind = "Mixtral" if config.num_experts else "Llama"

    assert type(model).__name__ == f"{kind}ForCausalLM"
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    ours = np.asarray(apply(config, drawn_params(config), TOKENS))
    print(f"largest difference {np.abs(ours - theirs).max():.1e}", end=" ")
    print(f"of logits up to {np.abs(theirs).max():.2f}")

    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=2e-5)
    model.save_pretrained(tmp_path / "back")
    params = hugging_face.read(tmp_path / "back", config)
    jax.tree.map(np.testing.assert_array_equal, params, drawn_params(config))
