"""A tiny regression in four regions, small enough to compile for every method."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from cocodc_jax import methods
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.train.checkpoint import Checkpoints
from cocodc_jax.train.hooks import Hooks
from cocodc_jax.train.loop import train
from cocodc_jax.train.run_steps import run_steps as run
from cocodc_jax.transforms.compensation import adam_second_moment

NUM_REGIONS = 4
LEARNING_RATE = 0.05
OPTIMIZER = optax.sgd(LEARNING_RATE, 0.9)


def model(params, batch):
    x = batch["x"] @ params["embed"]
    for i in range(2):
        x = x + jnp.tanh(x @ params["blocks"]["w"][i])
    return x @ params["head"]


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


# The b2 of `optax.adam`.
USER_INPUTS = UserInputs(LEARNING_RATE, adam_second_moment(0.999), (model, mean_square))

# Events are 2 steps apart in all, so that one scan is compiled for each. Streaming has
# both fragments in flight at every step after 4, CoCoDC one of the two it may choose.
_COCODC = {"sync_interval": 8, "num_fragments": 2, "delay_steps": 2}
METHODS = {
    "data_parallel": methods.get("data_parallel"),
    "diloco": methods.get("diloco", sync_interval=2),
    "streaming_diloco": methods.get(
        "streaming_diloco", sync_interval=4, num_fragments=2, delay_steps=4
    ),
    "cocodc": methods.get("cocodc", curvature="adam_second_moment", **_COCODC),
    "cocodc_hessian": methods.get(
        "cocodc", curvature="hessian_vector", transmission_score="drift", **_COCODC
    ),
}

SPECS = {
    "embed": P("data", "model"),
    "blocks": {"w": P(None, "data", "model")},
    "head": P("model", "data"),
}


def loss_fn(params, batch, key):
    """Mean square error of a residual MLP; aux shows the key it was given."""
    loss = mean_square(model(params, batch), batch)
    return loss, {"draw": jax.random.key_data(key)[1]}


def make_params(seed=0):
    """Two stacked blocks, one a fragment, between two other leaves."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    embed = normal(4, 8)
    blocks = normal(2, 8, 8)
    head = normal(8, 2)
    return {"embed": embed, "blocks": {"w": blocks}, "head": head}


def make_batch(step):
    """Return the regions' batches at `step`, leaves `[R, B, ...]`."""
    rng = np.random.default_rng(1000 + step)
    x = rng.normal(size=(NUM_REGIONS, 4, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[..., :2]) + x[..., 2:]}


def stream(first_step=0):
    """Endless batches from `first_step` on."""
    return map(make_batch, itertools.count(first_step))


def make_program(name, mesh=None, loss=loss_fn, **options):
    """A program of one of `METHODS`."""
    return program_of(METHODS[name], mesh, loss, **options)


def program_of(method, mesh=None, loss=loss_fn, optimizer=None, regions=4, **options):
    """Make a program; its default optimizer is Adam if the method needs moments."""
    if optimizer is None:
        has_adam = "second_moment" in method.needs
        optimizer = optax.adam(LEARNING_RATE) if has_adam else OPTIMIZER
    params = options.pop("params", make_params())
    options = {"user_inputs": USER_INPUTS} | options
    return RegionProgram(loss, optimizer, method, params, regions, mesh=mesh, **options)


@functools.cache
def shared_program(name):
    """One program a method for all tests: it holds only compiled code."""
    return make_program(name)


@functools.cache
def sharded_program(name, length, data, model):
    """As `shared_program`, on a mesh of these axes."""
    devices = jax.devices()[: length * data * model]
    mesh = make_mesh(NUM_REGIONS, data, model, devices)
    assert mesh.shape["region"] == length
    specs = SPECS if data * model > 1 else None
    return make_program(name, mesh, param_specs=specs)


def start(program, seed=0):
    return program.init(make_params(), jax.random.key(seed))


def follow(program, state, batches, num_steps):
    """Runs on for `num_steps` and returns the state and every `Output`."""
    outputs = []
    for new, output in run(program, state, iter(batches), num_steps):
        state = new
        outputs.append(output)
    return state, outputs


def finish(program, state, num_steps):
    return follow(program, state, stream(state.step), num_steps)


def trained(program, num_steps):
    """Runs `num_steps` from the start; the schedule knows of all that was applied."""
    state, outputs = finish(program, start(program), num_steps)
    return program.synchronize(state), outputs


def host(tree):
    """Copies to NumPy, so that donation of the original cannot matter."""
    return jax.tree.map(lambda x: np.array(x), tree)


def numbers(state):
    """Everything a run consists of, on the host, for comparing two runs."""
    memory = state.sync and state.sync.schedule.to_json()
    arrays = host((state.region, state.sync and state.sync.arrays))
    return arrays, memory, state.step, state.bytes_sent


def assert_same(one, other):
    """Bitwise equality of two trees of arrays and plain values."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def saved_and_restored(program, state, folder, again=None):
    """Return the state after a save, and the one that `again` restores from it."""
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.save(program, state, {})
    with Checkpoints(folder) as checkpoints:
        restored, _ = checkpoints.restore(again or program)
    return state, restored


def train_in(folder, program, state, batches, num_steps, **options):
    """Train from a folder's last checkpoint, if any; `batches` gives those from a step.

    Returns:
      The result, and all records.
    """
    records = []
    progress = None

    with Checkpoints(folder) as checkpoints:
        if restored := checkpoints.restore(program):
            state, extra = restored
            progress = extra["progress"]

        options |= {"checkpoints": checkpoints, "progress": progress}
        stream = batches(state.step)
        hooks = Hooks(record=records.append)
        result = train(
            program, state, stream, num_steps, lambda step: step, hooks=hooks, **options
        )

    return result, records


@contextlib.contextmanager
def compilations():
    """A list that grows by one with every program XLA compiles."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
