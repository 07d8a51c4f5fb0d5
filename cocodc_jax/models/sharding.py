"""How one region's parameters lie on the devices inside the region.

Two mesh axes divide every matrix. Over "model" goes the side that tensor
parallelism splits without communication between the two matrices of a pair:
attention heads, feed-forward features, vocabulary (Megatron-LM, Shoeybi et al.,
arXiv 1909.08053, section 3). Over "data" goes the residual width, gathered before
use (fully sharded data parallelism; ZeRO stage 3, arXiv 1910.02054). Norm scales
are on every device, and the embedding is divided over "model" only: a lookup whose
table and token ids share the "data" axis, inside a `shard_map` that is manual over
regions, ends the process in XLA's partitioner (JAX 0.10.2, CPU). The compiler
derives the rest, activations included.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from cocodc_jax.models.config import TransformerConfig

# Which side of each matrix each axis divides, by the parameter's own name.
_READS_WIDTH = ("query", "key", "value", "gate", "up", "head")
_WRITES_WIDTH = ("output", "down")


def partition_specs(params: Any, axes: tuple[str, str] = ("data", "model")) -> Any:
    """Returns a `PartitionSpec` per parameter over the axes inside a region.

    Args:
      params: one region's parameters (or their shapes) as `init_params` makes
        them, scanned or not, with no region axis; whoever stacks regions puts the
        region axis before each spec.
      axes: names of the mesh axes that shard the width and that shard heads,
        feed-forward features and vocabulary.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: a leaf is not a parameter of the transformer.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _leaf_spec(path, leaf.ndim, *axes), params
    )


def check_divisible(config: TransformerConfig, data: int, model: int):
    """Checks that a `(data, model)` mesh divides the model's dimensions.

    Args:
      config: the model.
      data: devices along the axis that shards the width.
      model: devices along the axis that shards heads, features and vocabulary.

    Raises:
      ValueError: names what does not divide, and what would.
    """
    needs = {"width": ("data", data)} | dict.fromkeys(
        ("num_heads", "num_kv_heads", "mlp_width", "vocab_size"), ("model", model)
    )
    for name, (axis, devices) in needs.items():
        size = getattr(config, name)
        if size % devices:
            fitting = max(n for n in range(1, devices) if size % n == 0)
            raise ValueError(
                f"{name}={size} is not a multiple of the mesh's {axis}={devices}; "
                f"use {name}={-(-size // devices) * devices} or {axis}={fitting}"
            )


def _leaf_spec(path, ndim: int, data: str, model: str) -> PartitionSpec:
    name = path[-1].key
    if name == "scale":
        return PartitionSpec()
    if name == "embedding":
        sides = (model, None)
    elif name in _READS_WIDTH:
        sides = (data, model)
    elif name in _WRITES_WIDTH:
        sides = (model, data)
    else:
        raise ValueError(
            f"{jax.tree_util.keystr(path)} is not a parameter of the transformer; "
            "its sharding has to be given by hand"
        )
    # Scanned blocks have a layer axis in front, which no device divides.
    return PartitionSpec(*(None,) * (ndim - 2), *sides)
