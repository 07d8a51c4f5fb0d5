"""A tiny mixture of experts in two regions, in place of the tiny regression."""

import functools
import itertools
import types

import jax
import numpy as np
import optax

from cocodc_jax import methods, models
from cocodc_jax.engine.mesh import make_mesh
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.needs import UserInputs
from tests.program.tiny import follow

MODEL = models.TransformerConfig(
    vocab_size=16,
    num_layers=2,
    width=8,
    mlp_width=8,
    num_heads=1,
    num_kv_heads=1,
    num_experts=4,
    expert_width=6,
)
OPTIONS = {
    "num_fragments": 2,
    "fragment_strategy": "experts",
    "expert_weights": "tokens",
}
METHODS = {
    "streaming_diloco": methods.get(
        "streaming_diloco", sync_interval=4, delay_steps=2, mixing_alpha=0.5, **OPTIONS
    ),
    "cocodc": methods.get(
        "cocodc",
        sync_interval=4,
        delay_steps=1,
        syncs_per_interval=4,
        transmission_score="load",
        compress="ef+int8",
        **OPTIONS,
    ),
}
OPTIMIZER = models.experts.counting(optax.adamw(1e-2, weight_decay=0.1))
USER_INPUTS = UserInputs(token_counts=models.experts.is_token_count)
_KEY = jax.random.key(0)
loss_fn = models.make_loss_fn(MODEL)


@functools.cache
def drawn_params(config):
    """Draw parameters of any mixture; counts of tokens are 0."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        scale = 0.0 if path[-1].key == "tokens" else 0.3
        drawn = rng.normal(path[-1].key == "scale", scale, leaf.shape)
        return drawn.astype(np.float32)

    shapes = jax.eval_shape(functools.partial(models.init_params, config), _KEY)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_params():
    return drawn_params(MODEL)


def make_batch(step):
    """Draw one token for each region, so that it uses two of a layer's experts."""
    token = np.random.default_rng(1000 + step).integers(0, 3, (2, 1, 1))
    token += np.int64([0, 8]).reshape(2, 1, 1)
    return np.tile(token, (1, 2, 6)).astype(np.int32)


def stream(first_step=0):
    return map(make_batch, itertools.count(first_step))


def make_program(name):
    return RegionProgram(
        loss_fn,
        OPTIMIZER,
        METHODS[name],
        make_params(),
        2,
        mesh=make_mesh(2),
        user_inputs=USER_INPUTS,
    )


shared_program = functools.cache(make_program)


def start(program):
    return program.init(make_params(), _KEY)


def finish(program, state, num_steps):
    return follow(program, state, stream(state.step), num_steps)


def in_place_of(tiny):
    """Return the names of `tiny`, with those of this module where it has them."""
    return types.SimpleNamespace(**vars(tiny) | globals())
