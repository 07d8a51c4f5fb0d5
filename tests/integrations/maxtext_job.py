"""A tiny MaxText job: its own configuration, mesh, state and jitted train step.

Runs in the environment that `environments.py` makes, not in pytest's own.
"""

import os
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils

BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
VOCABULARY = 64
LENGTH = 16
REGION_BATCH = 4
NUM_LAYERS = 4

# MaxText's defaults but for sizes, float32, and a constant learning rate. Layers are
# scanned, and stacked along axis 1 (`param_scan_axis: 1`).
OPTIONS = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "log_config": False,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": NUM_LAYERS,
    "vocab_size": VOCABULARY,
    "max_target_length": LENGTH,
    "dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0.0,
    "learning_rate": 0.1,
    "warmup_steps_fraction": 0.0,
    "learning_rate_final_fraction": 1.0,
    "steps": 1000,
}


def batch_of(step: int, region: int) -> dict[str, np.ndarray]:
    """Make one region's batch of one step, in MaxText's form."""
    rng = np.random.default_rng((step, region))
    tokens = rng.integers(0, VOCABULARY, (REGION_BATCH, LENGTH + 1), np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens[:, 1:].shape)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
        batch[f"{name}_position"] = positions
        batch[f"{name}_segmentation"] = np.ones_like(positions)
    return batch


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return one batch of the examples of several regions."""
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def stacked(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return batches with a leading axis of regions."""
    return {name: np.stack([b[name] for b in batches]) for name in batches[0]}


class Job:
    """What MaxText's `train_loop` makes before its loop, and the loop's step.

    Attributes:
      state: MaxText's own train state.
      step_fn: MaxText's own jitted step.
    """

    def __init__(self, folder: str | os.PathLike, devices: Any = None, **options: Any):
        """Set MaxText up on some devices; `options` are those of its command line."""
        options = {**OPTIONS, "base_output_directory": str(folder), **options}
        words = [f"{name}={value}" for name, value in options.items()]
        self.config = config = pyconfig.initialize(["train", str(BASE), *words])
        devices = jax.devices() if devices is None else devices
        made = train_utils.setup_train_loop(config, None, devices)
        _, _, shardings, model, self.mesh, *_, state = made

        if config.enable_diloco:
            graph = model
            self.state = state
            of_params = shardings.params
        else:
            graph, self.state = nnx.split(state)
            of_params, shardings = sharding.maybe_update_params_sharding_with_opt(
                config, shardings
            )

        self.step_fn, _ = train_utils.jit_train_and_eval_step(
            config,
            graph,
            self.mesh,
            self.state,
            shardings,
            train.train_step,
            params_shardings=of_params,
        )
        self._placed = sharding.get_input_data_sharding(config, self.mesh)

    def step(self, batch: dict[str, np.ndarray]) -> float:
        """Do one step of MaxText; return its loss."""
        batch = jax.device_put(batch, self._placed)
        rest = (jax.random.key(0),) if self.config.enable_diloco else ()
        with (
            jax.set_mesh(self.mesh),
            logical_axis_rules(self.config.logical_axis_rules),
        ):
            self.state, metrics = self.step_fn(self.state, batch, *rest)
        return float(metrics["scalar"]["learning/loss"])

    @property
    def params(self) -> nnx.State:
        """The parameters in MaxText's state, with a region axis where it has one."""
        return nnx.filter_state(self._inner, _is_param)

    @params.setter
    def params(self, params: nnx.State) -> None:
        inner = nnx.merge_state(self._inner, params)
        if self.config.enable_diloco:
            self.state = self.state.replace(inner_state=inner)
        else:
            self.state = inner

    @property
    def _inner(self) -> nnx.State:
        return self.state.inner_state if self.config.enable_diloco else self.state


def _is_param(path: Any, variable: Any) -> bool:
    return path[0] == "model" and isinstance(variable, nnx.Param)


def numbers(params: Any) -> dict[str, np.ndarray]:
    """Return parameters on the host, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def with_numbers(params: Any, values: dict[str, np.ndarray]) -> Any:
    """Return parameters with other values and the same shardings."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(values[jax.tree_util.keystr(path)], x.sharding),
        params,
    )
