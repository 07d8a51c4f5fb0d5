r"""MaxText's own trainer as one region of several: `train.py CONFIG OPTIONS`.

    REGION=0 REGIONS=2 VIA=gs://bucket/run KEY=key \
        python train.py src/maxtext/configs/base.yml run_name=...

`src/maxtext/configs/...` is what MaxText calls the files of its own package.

Command line, model, mesh, optimizer, data, metrics and checkpoints are MaxText's. A
region that died is started again with the same command.
"""

import contextlib
import json
import os

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import app
from etils import epath
from flax import nnx
from maxtext.trainers.pre_train import train

import cocodc_jax as cc
from cocodc_jax.elastic.place import read_key

METHOD = cc.methods.get(
    "streaming_diloco", sync_interval=12, num_fragments=2, delay_steps=2
)


def is_param(path, variable):
    """Whether a variable of MaxText's train state is a parameter."""
    return path[0] == "model" and isinstance(variable, nnx.Param)


def at_step(state, step):
    """Set the counters of MaxText's train state to a step."""
    old = int(state.optimizer.step.get_value())

    def moved(x):
        is_counter = jnp.issubdtype(x.dtype, jnp.integer) and not x.ndim
        if not is_counter or int(x) != old:
            return x
        return jax.device_put(jnp.full_like(x, step), x.sharding)

    return nnx.merge_state(
        state, nnx.State({"optimizer": jax.tree.map(moved, state["optimizer"])})
    )


class Region:
    """The region that this process trains."""

    def __init__(self):
        self.stack = contextlib.ExitStack()
        self.sync = None

    def start(self, state, config):
        """Take part; return MaxText's state, at the step of the others."""
        place = cc.Place(
            region=int(os.environ["REGION"]),
            regions=int(os.environ["REGIONS"]),
            addresses=(),
            via=os.environ["VIA"],
            key=read_key(os.environ["KEY"]),
        )
        params = nnx.filter_state(state, is_param)
        transport = cc.Transport("elastic", place=place)
        sync = cc.RegionSync(METHOD, params, place.regions, transport=transport)
        self.sync = self.stack.enter_context(sync)

        self.state = sync.init(params)
        self.saves = config.enable_checkpointing
        self.folder = epath.Path(config.checkpoint_dir).parent / "regions"
        step = int(state.optimizer.step.get_value())  # Of MaxText's own checkpoint.
        if step:
            note = json.loads((self.folder / f"{step}.json").read_text())
            with ocp.StandardCheckpointer() as checkpointer:
                shapes = sync.abstract(note)
                arrays = checkpointer.restore(self.folder / f"{step}", shapes)
            self.state = sync.restore(arrays, note)
        params, self.state = sync.join(params, self.state)
        return at_step(nnx.merge_state(state, params), self.state.step)

    def after(self, step_fn):
        """Return MaxText's step with the line after it."""

        def step_and_sync(state, batch):
            state, metrics = step_fn(state, batch)
            params, before = nnx.filter_state(state, is_param), self.state.step
            params, self.state = self.sync.after_step(params, self.state)
            state = nnx.merge_state(state, params)
            if self.state.step != before + 1:  # The others went on without this one.
                state = at_step(state, self.state.step)
            return state, metrics

        return step_and_sync

    def save(self):
        """Save beside MaxText's own checkpoint of the same step."""
        if not self.saves:
            return
        arrays, note = self.sync.checkpoint(self.state)
        name = f"{self.state.step}"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.folder / name, arrays, force=True)
        if jax.process_index() == 0:
            (self.folder / f"{name}.json").write_text(json.dumps(note))


region = Region()
maxtext_iteration = train.training_loop_iteration


def iteration(device, python, fixed):
    """MaxText's iteration of its loop, which calls the step and saves."""
    config = fixed["config"]
    if region.sync is None:
        device["state"] = region.start(device["state"], config)
        device["p_train_step"] = region.after(device["p_train_step"])
        python["step"] = region.state.step
    metrics = maxtext_iteration(device, python, fixed)
    if python["step"] % config.checkpoint_period == 0:
        region.save()
    python["step"] = region.state.step - 1  # MaxText adds one.
    return metrics


train.training_loop_iteration = iteration


def main(argv):
    """Train as MaxText does, and wait at the end for what others still need."""
    with region.stack:
        train.main(argv)
        region.save()  # MaxText saves its last step, too.


if __name__ == "__main__":
    app.run(main)
