"""LLaMA-shaped parameters in the files that Hugging Face's `LlamaForCausalLM` loads.

A folder holds the shape, `config.json`, and the tensors: `model.safetensors`, or the
files that `model.safetensors.index.json` names for each tensor. A model with experts in
every block is a `MixtralForCausalLM` (arXiv 2401.04088). `_NAMES` and `_NAMES_IN_BLOCK`
have the names of arrays there. Counts of tokens are not written, and are zero when a
model is read.

A matrix is [in, out] here and [out, in] there; the embedding is [V, D] in both. Heads
and rotary pairs are in the same order, so nothing is permuted. Adapters (`lora.py`)
are in separate files, which `peft` loads: `adapter_config.json`, and in
`adapter_model.safetensors` for the n-th layer's query

    base_model.model.model.layers.n.self_attn.q_proj.lora_{A,B}.weight

transformers' own code gives the same logits (`tests/models/test_hugging_face.py`).
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16, which most files are in.)
import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.expert_leaves import EXPERTS, TOKENS
from cocodc_jax.models.config import LORA, TransformerConfig
from cocodc_jax.models.llama_config import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    adapter_json,
    check_llama,
    check_shape,
    read_config,
    read_json,
    to_json,
)
from cocodc_jax.models.lora import merged, only_adapters
from cocodc_jax.models.transformer import Params, init_params

TENSORS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_INDEX_FILE = f"{TENSORS_FILE}.index.json"
_HEAD = "lm_head.weight"

_NAMES = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head",): _HEAD,
}
_NAMES_IN_BLOCK = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("attention", "query"): "self_attn.q_proj.weight",
    ("attention", "key"): "self_attn.k_proj.weight",
    ("attention", "value"): "self_attn.v_proj.weight",
    ("attention", "output"): "self_attn.o_proj.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "gate"): "mlp.gate_proj.weight",
    ("mlp", "up"): "mlp.up_proj.weight",
    ("mlp", "down"): "mlp.down_proj.weight",
    ("moe", "router"): "block_sparse_moe.gate.weight",
    ("moe", "experts", "gate"): "block_sparse_moe.experts.{}.w1.weight",
    ("moe", "experts", "up"): "block_sparse_moe.experts.{}.w3.weight",
    ("moe", "experts", "down"): "block_sparse_moe.experts.{}.w2.weight",
}


def write(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    *,
    max_length: int = 2048,
    eos_id: int | None = None,
) -> None:
    """Write a model as `config.json` and `model.safetensors`, in float32.

    Args:
      folder: to write to; made if missing.
      config: the model.
      params: its parameters, scanned or not, of one region; adapters are merged in.
      max_length: tokens that the model was trained to read, for `config.json`.
      eos_id: id of the token that ends a text.
    """
    check_llama(config)
    _write(
        folder=pathlib.Path(folder),
        json_file=CONFIG_FILE,
        description=to_json(config, max_length, eos_id),
        tensors_file=TENSORS_FILE,
        params=merged(config, params),
        config=config,
    )


def write_adapter(
    folder: str | os.PathLike[str], config: TransformerConfig, params: Params, base: str
) -> None:
    """Write a model's adapters as `write` does; `base` is the base model's name."""
    check_llama(config)
    hf_names = {ours[1]: name.split(".")[1] for ours, name in _NAMES_IN_BLOCK.items()}
    targets = [hf_names[name] for name in config.lora_names]
    _write(
        folder=pathlib.Path(folder),
        json_file=ADAPTER_CONFIG_FILE,
        description=adapter_json(config, base, targets),
        tensors_file=ADAPTER_FILE,
        params=only_adapters(params),
        config=config,
    )


def _write(
    folder: pathlib.Path,
    json_file: str,
    description: dict[str, Any],
    tensors_file: str,
    params: Params,
    config: TransformerConfig,
) -> None:
    """Write tensors, and the JSON file that describes them."""
    with extra("hf"):
        from safetensors.numpy import save_file

    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = _names_of(path, config)
        if not names:
            continue

        array = np.asarray(leaf, np.float32)
        parts = array.reshape(-1, *array.shape[_num_stacked(path, config) :])
        for name, part in zip(names, parts, strict=True):
            # The library writes the buffer, whatever its strides.
            tensors[name] = np.ascontiguousarray(part.T if _is_turned(name) else part)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / json_file).write_text(json.dumps(description, indent=2) + "\n")
    save_file(tensors, folder / tensors_file, metadata={"format": "pt"})

    # The library writes a file that only its owner can read.
    (folder / tensors_file).chmod((folder / json_file).stat().st_mode)


def read(folder: str | os.PathLike[str], config: TransformerConfig) -> Params:
    """Read the parameters of a model, in the form of `init_params`, as NumPy arrays.

    Rows of the vocabulary that the files lack, because it was rounded up here, are the
    mean of the others. The folder is checked by `check`.
    """
    files = check(folder, config)

    def read_leaf(path: Any, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
        parts = [read_one(name) for name in _names_of(path, config)]
        if not parts:
            return np.zeros(wanted.shape, np.float32)

        lead = wanted.shape[: _num_stacked(path, config)]
        whole = np.stack(parts).reshape(*lead, *parts[0].shape)
        missing = [(0, n - m) for n, m in zip(wanted.shape, whole.shape, strict=True)]
        return np.ascontiguousarray(np.pad(whole, missing, mode="mean"))

    def read_one(name: str) -> np.ndarray:
        tensor = opened[files[name]].get_tensor(name).astype(np.float32)
        return tensor.T if _is_turned(name) else tensor

    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(_opened(file)) for file in {*files.values()}
        }
        return jax.tree_util.tree_map_with_path(read_leaf, _shapes(config))


def check(
    folder: str | os.PathLike[str], config: TransformerConfig
) -> dict[str, pathlib.Path]:
    """Check that a folder holds a model of this shape, without reading a tensor.

    The model may have more rows of vocabulary than the folder. Returns the file of each
    tensor.
    """
    check_llama(config)
    folder = pathlib.Path(folder)
    check_shape(folder, config)
    files = _files_of(folder)
    wanted = {
        name: leaf.shape[_num_stacked(path, config) :]
        for path, leaf in jax.tree_util.tree_leaves_with_path(_shapes(config))
        for name in _names_of(path, config)
    }

    if missing := sorted(wanted.keys() - files.keys()):
        raise ValueError(f"{folder} has no tensor {_first(missing)}")

    # A tied head may be stored once more; old files hold the rotary frequencies.
    stored_names = {n for n in files if not n.endswith("rotary_emb.inv_freq")}
    unknown = stored_names - wanted.keys()
    if config.tie_embeddings:
        unknown -= {_HEAD}
    if unknown:
        raise ValueError(
            f"{folder} has a tensor that this model has no place for: "
            f"{_first(sorted(unknown))}"
        )

    rows = read_config(folder, config)["vocab_size"]
    for file in sorted({*files.values()}):
        names_in_file = {name for name, place in files.items() if place == file}
        with _opened(file) as tensors:
            if lost := sorted(names_in_file - {*tensors.keys()}):
                raise ValueError(
                    f"{file} has no tensor {_first(lost)}, which "
                    f"{folder / _INDEX_FILE} says is there"
                )

            for name in wanted.keys() & names_in_file:
                stored = tuple(tensors.get_slice(name).get_shape())
                expected = wanted[name][::-1] if _is_turned(name) else wanted[name]
                if name in (_NAMES["embedding",], _HEAD):
                    expected = (rows, expected[1])

                if stored != expected:
                    raise ValueError(
                        f"{name} in {file} is {list(stored)}, and {list(expected)} is "
                        f"what {CONFIG_FILE} there says"
                    )

    return files


def _shapes(config: TransformerConfig) -> Params:
    """Return the shapes of a model's parameters; the files have no adapters."""
    config = dataclasses.replace(config, lora_rank=0)
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def _names_of(path: Any, config: TransformerConfig) -> list[str]:
    """Return the names of the tensors of one array: one, or one a layer and expert."""
    keys = tuple(key.key for key in path)
    if keys[0] != "blocks":
        return [_NAMES[keys]]

    layers = range(config.num_layers) if config.scan_layers else (keys[1],)
    inside = keys[1:] if config.scan_layers else keys[2:]
    if inside == ("moe", EXPERTS, TOKENS):
        return []
    if LORA in inside:
        module, _, matrix, part = inside
        weight = f"lora_{part.upper()}.weight"
        name = _NAMES_IN_BLOCK[module, matrix].replace("weight", weight)
        return [f"base_model.model.model.layers.{layer}.{name}" for layer in layers]

    at = [f"model.layers.{layer}.{_NAMES_IN_BLOCK[inside]}" for layer in layers]
    experts = range(config.num_experts) if EXPERTS in inside else (0,)
    return [name.format(e) for name in at for e in experts]


def _num_stacked(path: Any, config: TransformerConfig) -> int:
    """Return how many leading axes count tensors: of layers, of experts, of both."""
    keys = [key.key for key in path]
    return (config.scan_layers and keys[0] == "blocks") + (EXPERTS in keys)


def _is_turned(name: str) -> bool:
    return "_proj." in name or "block_sparse_moe." in name or name == _HEAD


def _files_of(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the file of each tensor in a folder."""
    index = folder / _INDEX_FILE
    whole = folder / TENSORS_FILE
    if whole.is_file():
        with _opened(whole) as tensors:
            return dict.fromkeys(tensors.keys(), whole)

    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {TENSORS_FILE} nor {_INDEX_FILE}; files of another "
            "format can be converted with transformers' save_pretrained"
        )

    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} has no weight_map")
    return {name: folder / str(file) for name, file in places.items()}


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    with extra("hf"):
        import safetensors

    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    with opened as tensors:
        yield tensors


def _first(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
