"""A plain Optax loop with its own files, whose regions `cc.RegionSync` joins.

    python -m experiments.faults.plain_loop --workdir=DIR --key_file=FILE \
        --region_id=0 --region_addresses=HOST:PORT,HOST:PORT

It is an example of any trainer: step, optimizer, data and checkpoints are its own, and
no part of `experiments.train` runs. `experiments.chaos --plan` starts its regions if
the plan has `program = "experiments.faults.plain_loop"`. A region trains until it is
asked to stop (SIGTERM); then it saves and exits with code 75.

In DIR/region_N it writes `syncs.jsonl` and `joins.jsonl` as `experiments.train` does,
`metrics.jsonl`, and `checkpoint.npz`.
"""

import contextlib
import hashlib
import io
import json
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc
from cocodc_jax.core.state import AppliedSync
from cocodc_jax.elastic.link import AskedToStopError
from cocodc_jax.elastic.objects import reach
from cocodc_jax.elastic.place import read_key
from cocodc_jax.files import append_line, ensure_folder, write_whole
from cocodc_jax.region_sync.seam import RegionSyncState
from cocodc_jax.run.exits import STOPPED
from cocodc_jax.run.taking_part import JOINS_FILE, SYNCS_FILE

from .. import program

METHOD = "streaming_diloco"
OPTIONS = {"sync_interval": 20, "num_fragments": 2, "delay_steps": 3}
OPTIMIZER = optax.adam(1e-2)
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FILE = "checkpoint.npz"
_WIDTHS = (8, 32, 32, 1)
_BATCH = 16

PyTree = Any


def init_params() -> PyTree:
    """Return the parameters of a small perceptron, equal in all regions."""
    rng = np.random.default_rng(0)
    layers = zip(_WIDTHS[:-1], _WIDTHS[1:], strict=True)
    return {
        f"layer_{number}": {
            "kernel": jnp.asarray(
                rng.normal(size=shape) / np.sqrt(shape[0]), "float32"
            ),
            "bias": jnp.zeros(shape[1]),
        }
        for number, shape in enumerate(layers)
    }


def batch_of(region: int, step: int) -> np.ndarray:
    """Return the inputs of a region's step, float32 `[B, D]`.

    They depend only on the step and the region, so a region that returns can continue
    at the others' step.
    """
    rng = np.random.default_rng((region, step))
    return rng.normal(size=(_BATCH, _WIDTHS[0])).astype(np.float32)


@jax.jit
def train_step(
    params: PyTree, opt_state: optax.OptState, x: jax.Array
) -> tuple[PyTree, optax.OptState, jax.Array]:
    """Take a step; return parameters, optimizer state and loss."""

    def loss_fn(params: PyTree) -> jax.Array:
        y = x
        for layer in params.values():
            y = jnp.tanh(y) @ layer["kernel"] + layer["bias"][None]
        return jnp.mean((y[:, 0] - jnp.sin(x.sum(axis=1))) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class Trained(NamedTuple):
    """The loop's state, which it saves."""

    params: PyTree
    opt_state: optax.OptState
    state: RegionSyncState


def save(path: pathlib.Path, sync: cc.RegionSync, trained: Trained) -> None:
    """Write a checkpoint: the trainer's arrays and those of `sync`, and its note."""
    arrays, note = sync.checkpoint(trained.state)
    leaves = jax.tree.leaves((trained.params, trained.opt_state, arrays))
    named: dict[str, Any] = {
        f"leaf_{number}": np.asarray(x) for number, x in enumerate(leaves)
    }

    content = io.BytesIO()
    np.savez(content, note=json.dumps(note), **named)
    write_whole(path, content.getvalue())


def restore(path: pathlib.Path, sync: cc.RegionSync, like: Trained) -> Trained:
    """Read a checkpoint of `save`; `like` has the structure of the trainer's part."""
    with np.load(path) as saved:
        note = json.loads(str(saved["note"]))
        shapes = like.params, like.opt_state, sync.abstract(note)
        leaves, structure = jax.tree.flatten(shapes)
        read = [
            jax.device_put(saved[f"leaf_{number}"], x.sharding)
            for number, x in enumerate(leaves)
        ]
    params, opt_state, arrays = structure.unflatten(read)
    return Trained(params, opt_state, sync.restore(arrays, note))


class Region:
    """One region: the trainer's loop, and its records.

    Attributes:
      is_asked: whether it was asked to stop.
    """

    def __init__(
        self,
        place: cc.Place,
        workdir: pathlib.Path,
        step_seconds: float,
        checkpoint_every: int,
    ):
        self._place = place
        self._folder = workdir / f"region_{place.region}"
        self._step_seconds = step_seconds
        self._checkpoint_every = checkpoint_every
        self.is_asked = False
        ensure_folder(self._folder)

    def stop(self, *_: Any) -> None:
        """Ask the region to stop; for signal handlers."""
        self.is_asked = True

    def train(self) -> None:
        """Train until the region is asked to stop, and save."""
        params = init_params()
        with cc.RegionSync(
            cc.methods.get(METHOD, **OPTIONS),
            params,
            self._place.num_regions,
            transport=cc.Transport("elastic", place=self._place),
            should_stop=lambda: self.is_asked,
        ) as sync:
            trained = Trained(params, OPTIMIZER.init(params), sync.init(params))
            checkpoint = self._folder / CHECKPOINT_FILE
            if checkpoint.exists():
                trained = restore(checkpoint, sync, trained)

            # Compile before the others wait for this region.
            batch = batch_of(self._place.region, 0)
            jax.block_until_ready(train_step(trained.params, trained.opt_state, batch))
            trained = self._joined(sync, trained)

            while not self.is_asked:
                began_s = time.monotonic()
                trained = self._step(sync, trained)
                if trained.state.step % self._checkpoint_every == 0:
                    save(checkpoint, sync, trained)
                rest_s = self._step_seconds - (time.monotonic() - began_s)
                time.sleep(max(rest_s, 0))

            save(checkpoint, sync, trained)
            sync.leave()

    def _joined(self, sync: cc.RegionSync, trained: Trained) -> Trained:
        """Take part in the run, from the memory of another region if it has begun."""
        began_s = time.monotonic()
        params, state = sync.join(trained.params, trained.state)
        self._note_join(sync, trained.state, state, began_s, is_back=False)
        return trained._replace(params=params, state=state)

    def _step(self, sync: cc.RegionSync, trained: Trained) -> Trained:
        """Take one step, and call `RegionSync` after it."""
        before = trained.state
        batch = batch_of(self._place.region, before.step)
        params, opt_state, loss = train_step(trained.params, trained.opt_state, batch)
        line = {"kind": "train", "step": before.step + 1, "loss": float(loss)}
        append_line(self._folder / METRICS_FILE, line)

        began_s = time.monotonic()
        params, state = sync.after_step(params, before)
        if state.step != before.step + 1:
            self._note_join(sync, before, state, began_s, is_back=True)
        for applied in state.applied:
            self._note_sync(sync, state, applied)
        return Trained(params, opt_state, state)

    def _note_join(
        self,
        sync: cc.RegionSync,
        before: RegionSyncState,
        after: RegionSyncState,
        began_s: float,
        is_back: bool,
    ) -> None:
        line = {
            "step": after.step,
            "own_step": before.step,
            "from_peer": after is not before,
            "carried": is_back,
            "regions": list(sync.regions),
            "seconds": {"let_in": time.monotonic() - began_s},
            "time": time.time(),
        }
        append_line(self._folder / JOINS_FILE, line)

    def _note_sync(
        self, sync: cc.RegionSync, state: RegionSyncState, applied: AppliedSync
    ) -> None:
        outer = state.sync.outer.params[applied.fragment_id]
        content = b"".join(
            np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outer)
        )

        line = {
            "fragment": applied.fragment_id,
            "start_step": applied.start_step,
            "apply_step": applied.apply_step,
            "regions": sync.regions_in_mean(applied),
            "digest": hashlib.sha256(content).hexdigest()[:16],
            "time": time.time(),
        }
        append_line(self._folder / SYNCS_FILE, line)


OWN_FLAGS = (
    ("workdir", pathlib.Path, "folder of the run"),
    ("region_id", 0, "index of this region"),
    ("regions", 0, "number of regions; by default that of --region_addresses"),
    ("region_addresses", [""], "host:port of every region, by index"),
    ("via", pathlib.Path, "folder that carries messages in place of sockets"),
    ("key_file", pathlib.Path, "file with the secret that the regions share"),
    ("dead_after_s", 10.0, "seconds of silence after which a region counts as dead"),
    ("min_regions", 1, "how many regions must remain for the run to continue"),
    ("step_seconds", 0.05, "seconds that a step lasts at least"),
    ("checkpoint_every", 50, "steps between two checkpoints"),
)


def place_of(values: Any) -> cc.Place:
    """Return the place that the flags describe."""
    addresses = tuple(filter(None, values.region_addresses))
    via = values.via or ""
    if via:
        reach(via)

    regions = values.regions or len(addresses)
    if addresses and regions != len(addresses):
        raise ValueError(
            f"regions={regions} must be the {len(addresses)} of region_addresses"
        )

    return cc.Place(
        region=values.region_id,
        addresses=addresses,
        key=read_key(values.key_file),
        timing=cc.Timing(dead_after_s=values.dead_after_s),
        min_regions=values.min_regions,
        via=via,
        regions=regions if via else 0,
    )


def main(argv: Sequence[str]) -> int:
    """Run the program."""
    values = program.own_flags(
        *OWN_FLAGS, min_regions=1, step_seconds=0.0, checkpoint_every=1
    )
    with program.usage_errors(values):
        program.parse(values, argv, __doc__, has_words=False)
        for name in ("workdir", "key_file"):
            if not values[name].value:
                raise ValueError(f"{name}=None is missing; name one")
        region = Region(
            place_of(values),
            pathlib.Path(values.workdir),
            values.step_seconds,
            values.checkpoint_every,
        )

    signal.signal(signal.SIGTERM, region.stop)
    # Before it takes part there is nothing to save.
    with contextlib.suppress(AskedToStopError):
        region.train()
    return STOPPED


if __name__ == "__main__":
    program.with_own_flags(main)()
