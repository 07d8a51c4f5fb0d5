"""How one region's parameters are sharded over its devices.

"model" divides the side of a matrix that tensor parallelism splits without
communication between the two matrices of a pair: attention heads, feed-forward
features, vocabulary (Megatron-LM, arXiv 1909.08053, section 3). "data" divides the
residual width, gathered before use (ZeRO stage 3, arXiv 1910.02054). Each expert is
divided as a feed-forward is. An "expert" axis divides the set of experts, and with
"data" the width of all other weights. If the compiler derives the collectives, "data"
does not divide the embedding: inside a `shard_map` that is manual over regions, a
lookup whose table and token ids share that axis crashes XLA's partitioner (JAX 0.10.2,
CPU). `divided.py` does its own lookup.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from cocodc_jax.expert_leaves import EXPERTS
from cocodc_jax.models.config import LORA, MATRICES, WRITERS, TransformerConfig


def partition_specs(
    params: Any,
    axes: tuple[str | tuple[str, ...], str] = ("data", "model"),
    stage: str | None = None,
    divides_embedding: bool = False,
    expert: str | None = None,
) -> Any:
    """Return a `PartitionSpec` per parameter over the axes inside a region.

    Args:
      params: one region's parameters (or their shapes) as `init_params` makes them.
      axes: two entries: the mesh axis, or a tuple of several, that shards the width,
        and the mesh axis that shards heads, feed-forward features and vocabulary.
      stage: mesh axis that divides the layers of scanned blocks, for a pipeline.
      divides_embedding: whether the first axis divides the embedding too.
      expert: mesh axis, among those of the width, that divides the experts of a mixture
        in place of their width.
    """
    data, model = axes
    # Which side of each matrix each axis divides, by the parameter's own name.
    known = {
        "scale": (None,),
        "tokens": (None,),
        "router": (None, None),
        "embedding": (model, data if divides_embedding else None),
        **dict.fromkeys((*MATRICES, "head"), (data, model)),
        **dict.fromkeys(WRITERS, (model, data)),
    }

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        is_thin = len(path) > 2 and path[-3].key == LORA
        name = path[-2 if is_thin else -1].key
        if name not in known:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is not a parameter of the transformer; "
                "its sharding has to be given by hand"
            )

        sides = known[name]
        if len(path) > 1 and path[-2].key == EXPERTS and len(sides) > 1:
            if expert is not None:  # It divides experts in place of their width.
                names = (data,) if isinstance(data, str) else data
                rest = tuple(name for name in names if name != expert)
                width = rest if len(rest) > 1 else next(iter(rest), None)
                sides = tuple(width if side == data else side for side in sides)
            sides = (expert, *sides)

        if is_thin:  # The product is divided as the matrix that it is added to.
            sides = (sides[0], None) if path[-1].key == "a" else (None, sides[-1])
        has_layers = leaf.ndim > len(sides)
        if stage is not None and path[0].key == "blocks" and not has_layers:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} has no layer axis for stage={stage!r} "
                "to divide; use scan_layers=True"
            )
        if not any(sides) and not (stage and has_layers):
            return PartitionSpec()

        # Scanned blocks have a layer axis in front, which only stages divide.
        if has_layers:
            sides = (stage, *sides)
        return PartitionSpec(*sides)

    return jax.tree_util.tree_map_with_path(spec, params)


def check_divisible(
    config: TransformerConfig,
    data: int,
    model: int,
    stages: int = 1,
    sequence: int = 1,
    expert: int = 1,
):
    """Check that devices along the axes of a mesh divide the model's dimensions."""
    for axis, devices in {"data": data, "model": model, "stages": stages}.items():
        if devices < 1:
            raise ValueError(f"{axis}={devices} must be at least 1")

    if stages > 1 and not config.scan_layers:
        raise ValueError(
            f"stages={stages} divides the layer axis of scanned blocks, and "
            "scan_layers=False has none; use scan_layers=True or stages=1"
        )
    if expert > 1 and not config.num_experts:
        raise ValueError(
            f"expert_axis={expert} has no meaning for a model without experts; leave "
            "it out, or use num_experts=8"
        )

    with_data = {"expert_axis": expert, "sequence_axis": sequence}
    shared = [name for name, size in with_data.items() if size > 1]
    width_over = " * ".join(["data_axis", *shared]) if shared else "data"
    of_model = ("num_heads", "num_kv_heads", "mlp_width", "vocab_size")
    needs = {
        "num_layers": ("stages", stages),
        "width": (width_over, data * expert * sequence),
        **dict.fromkeys(of_model, ("model", model)),
        # Zero, which all divide, without experts.
        "expert_width": ("model", model),
        "num_experts": ("expert_axis", expert),
    }

    for name, (axis, devices) in needs.items():
        size = getattr(config, name)
        if size % devices:
            below = range(min(devices, size), 0, -1)
            fitting = next(n for n in below if size % n == 0)
            raise ValueError(
                f"{name}={size} is not a multiple of the mesh's {axis}={devices}; "
                f"use {name}={-(-size // devices) * devices} or {axis}={fitting}"
            )


def check_pipeline(
    config: TransformerConfig,
    stages: int,
    microbatches: int,
    batch: int | None = None,
    data: int = 1,
):
    """Check that a pipeline divides the model and a region's batch of sequences.

    The devices of data share each microbatch; no batch leaves it unchecked.
    """
    check_divisible(config, data=1, model=1, stages=stages)
    if not config.scan_layers:
        raise ValueError(
            "scan_layers=False has no layer axis for a pipeline to divide; use "
            "scan_layers=True"
        )
    if config.num_experts:
        raise ValueError(
            f"num_experts={config.num_experts} is not possible in a pipeline, whose "
            "stages report no routing; use stages=1"
        )
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1")

    parts = microbatches * data
    if batch is not None and batch % parts:
        raise ValueError(
            f"batch_per_region={batch} is not a multiple of microbatches * data_axis "
            f"= {microbatches} * {data}; use batch_per_region="
            f"{-(-batch // parts) * parts} or other microbatches"
        )
