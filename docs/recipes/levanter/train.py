"""Levanter's own trainer as one region of several: `train.py --config_path FILE`.

    REGION=0 REGIONS=2 VIA=gs://bucket/run KEY=key python train.py --config_path FILE

Command line, model, mesh, optimizer, data, metrics and checkpoints are Levanter's. A
region that died is started again with the same command.
"""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import levanter.config
import orbax.checkpoint as ocp
from etils import epath
from levanter.main import train_lm
from levanter.trainer import Trainer

import cocodc_jax as cc
from cocodc_jax.elastic.place import read_key


class RegionTrainer(Trainer):
    """Levanter's trainer, with the line after its step."""

    method = cc.methods.get(
        "streaming_diloco", sync_interval=12, num_fragments=2, delay_steps=2
    )
    sync = None

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        path = self.config.checkpointer.expanded_path(self.run_id)
        self.folder = epath.Path(f"{path}-region")
        self.levanter_save = self._checkpointer.save_checkpoint
        self._checkpointer.save_checkpoint = self.save

    def initial_state(self, *args, **options):
        """Make or restore Levanter's state; take part in the run, at its step."""
        state = super().initial_state(*args, **options)
        place = cc.Place(
            region=int(os.environ["REGION"]),
            regions=int(os.environ["REGIONS"]),
            addresses=(),
            via=os.environ["VIA"],
            key=read_key(os.environ["KEY"]),
        )
        transport = cc.Transport("elastic", place=place)
        model = state.model
        self.sync = cc.RegionSync(
            self.method, model, place.regions, transport=transport
        )

        step = int(state.step)
        self.sync_state = self.restored(step) if step else self.sync.init(model)
        is_before_line = self.sync_state.step < step  # As Levanter saves.
        model, joined = self.sync.join(model, self.sync_state)
        if joined is self.sync_state and is_before_line:
            model, joined = self.sync.after_step(model, joined)
        self.sync_state = joined
        return self.with_model(state, model)

    def train_step(self, state, *batch, **options):
        """Do Levanter's step, and the line."""
        info = super().train_step(state, *batch, **options)
        model = info.state.model
        model, self.sync_state = self.sync.after_step(model, self.sync_state)
        return dataclasses.replace(info, state=self.with_model(info.state, model))

    def with_model(self, state, model):
        """Return Levanter's state with a model, at the step of all regions."""
        step = state.step
        if int(step) != self.sync_state.step:  # The others went on without this one.
            step = jax.device_put(
                jnp.full_like(step, self.sync_state.step), step.sharding
            )
        return dataclasses.replace(state, model=model, step=step)

    def save(self, *args, step, **options):
        """Save beside Levanter's own checkpoint; its `step` is that of the update."""
        arrays, note = self.sync.checkpoint(self.sync_state)
        name = f"{step + 1}"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(self.folder / name, arrays, force=True)
        if jax.process_index() == 0:
            (self.folder / f"{name}.json").write_text(json.dumps(note))
        self.levanter_save(*args, step=step, **options)

    def restored(self, step):
        """Return this package's state that was saved with Levanter's."""
        note = json.loads((self.folder / f"{step}.json").read_text())
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = self.sync.abstract(note)
            arrays = checkpointer.restore(self.folder / f"{step}", shapes)
        return self.sync.restore(arrays, note)

    def __exit__(self, *exception):
        if self.sync is not None:
            self.sync.__exit__(*exception)  # Waits for what others still need.
        super().__exit__(*exception)


if __name__ == "__main__":
    train_lm.Trainer = RegionTrainer
    levanter.config.main(train_lm.main)()
