"""The transformer's loss as a pipeline: its blocks divided between stages.

Stage s of S holds layers s n/S to (s+1) n/S of n, and everything that is not a
block. A batch goes through in M microbatches; at tick t stage s works on microbatch
t - s, so all is done after M + S - 1 ticks, and a stage is idle for S - 1 of them
(GPipe, Huang et al., arXiv 1811.06965, section 2.3). Between ticks every stage hands
its activations on by `ppermute`; backward runs the same schedule in reverse, by
differentiation. What leaves the last stage is shared out between the stages by
position in the sequence, so that each computes the logits and the loss of a part.

With random routing (NoLoCo, arXiv 2506.10911) activations of region r go on to the
next stage of region (r + shift) mod R, and the gradients come back the same way.
Differs from the paper: each tick draws one shift, the same for all regions and
stages, where the paper may draw any permutation. A region is met with probability
1/R either way; a cyclic shift is one collective among R compiled ones.

Everything runs in a `jax.shard_map` over "stage", which may lie inside another over
"region". The gradient is taken inside: what JAX 0.10.2 itself would save between
forward and backward leaves the inner `shard_map` sharded over both axes, and is
refused by the compiler (github.com/jax-ml/jax/pull/26588).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.loss import cross_entropy
from cocodc_jax.models.sharding import check_pipeline
from cocodc_jax.models.transformer import LossFn, Params, Transformer, bind

# Axes of the mesh that the loss is called under.
STAGE, REGION = "stage", "region"

# A microbatch on its way: activations [B, L, D] and the targets [B, L] they are for.
Message = tuple[jax.Array, jax.Array]


def make_pipelined_loss_fn(
    config: TransformerConfig,
    num_stages: int,
    num_microbatches: int,
    num_routed_regions: int | None = None,
) -> LossFn:
    """Make the language-model loss of one region, computed by a pipeline.

    The same function of the same parameters as `make_loss_fn`, but for the order of
    float32 sums. It has to be called under a mesh (`jax.set_mesh`, or inside a
    `jax.shard_map` over other axes) with an axis "stage" of `num_stages` devices,
    and is fast when blocks lie as `partition_specs(..., stage="stage")` says.

    First derivatives in reverse mode, and forward mode over these.

    Args:
      config: the model, with `scan_layers`.
      num_stages: S, divides `config.num_layers`.
      num_microbatches: M, divides the sequences of a batch. A stage is idle for
        `(S - 1) / (M + S - 1)` of the ticks.
      num_routed_regions: R, to route activations between that many regions at
        random; the loss must then be called inside a `shard_map` over "region" with
        one region a device. None keeps them at home.

    Returns:
      `loss_fn(params, tokens, key) -> (loss, aux)` as `make_loss_fn`'s. With routing
      it is the loss of the microbatches that ended in this region, the gradient is
      that of the sum of all regions' losses with respect to this region's
      parameters, and the shifts come from the key of region 0.

    Raises:
      ValueError: sizes that do not divide, here or when first called.
    """
    check_pipeline(config, num_stages, num_microbatches)
    # The same blocks, fewer of them.
    stage_config = dataclasses.replace(
        config, num_layers=config.num_layers // num_stages
    )
    pipeline = _Pipeline(
        stage_config, num_stages, num_microbatches, num_routed_regions or 1
    )

    @jax.custom_vjp
    def loss_fn(params, tokens, key):
        return _over_stages(pipeline, pipeline.loss, params, tokens, key)

    def forward(params, tokens, key):
        return _over_stages(pipeline, pipeline.loss_and_grad, params, tokens, key)

    def backward(grads, cotangents):
        loss_cotangent, _ = cotangents
        return jax.tree.map(lambda g: g * loss_cotangent, grads), None, None

    loss_fn.defvjp(forward, backward)
    return loss_fn


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """What one stage computes, manual over the stage axis.

    Attributes:
      config: the model of one stage, with its share of the layers.
      num_stages: S.
      num_microbatches: M.
      num_regions: regions that routing goes between; 1 without.
    """

    config: TransformerConfig
    num_stages: int
    num_microbatches: int
    num_regions: int

    @property
    def num_ticks(self) -> int:
        """Ticks from the first microbatch's entry to the last one's exit."""
        return self.num_microbatches + self.num_stages - 1

    def loss(self, params: Params, tokens: jax.Array, shifts: jax.Array):
        """Return `(loss, aux)` of the batch, the same on all stages."""
        loss, accuracy = self._share(_as_own(params), tokens, shifts)
        return self._sum_shares(loss, accuracy, tokens)

    def loss_and_grad(self, params: Params, tokens: jax.Array, shifts: jax.Array):
        """Return `(loss, aux)` and the gradient, laid out as the parameters."""
        # A stage differentiates its own share; the other stages' shares reach its
        # parameters by the transposes of the collectives.
        (loss, accuracy), grads = jax.value_and_grad(self._share, has_aux=True)(
            _as_own(params), tokens, shifts
        )
        grads = {
            name: grad if name == "blocks" else jax.lax.psum(grad, STAGE)
            for name, grad in grads.items()
        }
        return self._sum_shares(loss, accuracy, tokens), grads

    def _sum_shares(self, loss, accuracy, tokens):
        num_tokens = jnp.asarray(tokens[:, 1:].size, jnp.float32)
        aux = {"num_tokens": num_tokens, "accuracy": jax.lax.psum(accuracy, STAGE)}
        return jax.lax.psum(loss, STAGE), aux

    def _share(self, params: Params, tokens: jax.Array, shifts: jax.Array):
        """Compute this stage's shares of the batch's loss and accuracy."""
        model = bind(self.config, params)
        entering = (model.embed(tokens[:, :-1]), tokens[:, 1:])
        hidden_BLD, targets_BL = self._run(model, entering, shifts)
        hidden_BLD = self._part(hidden_BLD, padding=0)
        targets_BL = self._part(targets_BL, padding=-1)
        loss, accuracy = cross_entropy(
            model.norm(hidden_BLD),
            model.output_head(),
            targets_BL,
            self.config.loss_chunk_tokens,
        )
        # Means over this part's positions, padding among them, to shares of the mean.
        weight = targets_BL.size / tokens[:, 1:].size
        return loss * weight, accuracy * weight

    def _run(self, model: Transformer, batch: Message, shifts: jax.Array) -> Message:
        """Send a batch through the stages; the last stage's result is the batch's."""
        is_first = jax.lax.axis_index(STAGE) == 0

        def tick(received: Message, step: tuple[Message, jax.Array]):
            fresh, shift = step
            x_BLD, targets_BL = jax.tree.map(
                lambda new, old: jnp.where(is_first, new, old), fresh, received
            )
            done = (model.run_blocks(x_BLD), targets_BL)
            return self._send(done, shift), done

        entering = jax.tree.map(self._microbatches, batch)
        # What stage 0 receives is never used; so chosen, zeros vary over every mesh
        # axis that messages vary over.
        nothing = jax.tree.map(
            lambda x: jnp.where(is_first, x[0], jnp.zeros_like(x[0])), entering
        )
        _, done = jax.lax.scan(tick, nothing, (entering, shifts))
        return jax.tree.map(self._batch, done)

    def _microbatches(self, x: jax.Array) -> jax.Array:
        """Cut `[B, ...]` to what enters at each tick, `[ticks, B / M, ...]`."""
        # Microbatch m is every M-th sequence from m on, so that a batch divided over
        # "data" makes microbatches that are divided as well.
        cut = x.reshape(-1, self.num_microbatches, *x.shape[1:]).swapaxes(0, 1)
        idle = [(0, self.num_stages - 1)] + [(0, 0)] * x.ndim
        return jnp.pad(cut, idle)

    def _batch(self, done: jax.Array) -> jax.Array:
        """Undo `_microbatches` on what the last stage returned at each tick."""
        cut = done[self.num_stages - 1 :].swapaxes(0, 1)
        return cut.reshape(-1, *cut.shape[2:])

    def _send(self, message: Message, shift: jax.Array) -> Message:
        """Hand a message to the next stage, `shift` regions on; stage 0 gets zeros."""
        if self.num_regions == 1:
            ahead = [(s, s + 1) for s in range(self.num_stages - 1)]
            return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, ahead), message)
        branches = [self._shifted(k) for k in range(self.num_regions)]
        return jax.lax.switch(shift, branches, message)

    def _shifted(self, shift: int) -> Callable[[Message], Message]:
        regions, stages = self.num_regions, self.num_stages
        pairs = [
            (r * stages + s, (r + shift) % regions * stages + s + 1)
            for r in range(regions)
            for s in range(stages - 1)
        ]
        return lambda message: jax.tree.map(
            lambda x: jax.lax.ppermute(x, (REGION, STAGE), pairs), message
        )

    def _part(self, x_BL: jax.Array, padding: int) -> jax.Array:
        """Give each stage its part of the last stage's positions, axis 1."""
        part = -(-x_BL.shape[1] // self.num_stages)
        pad = [(0, 0)] * x_BL.ndim
        pad[1] = (0, part * self.num_stages - x_BL.shape[1])
        padded = jnp.pad(x_BL, pad, constant_values=padding)
        parts = jax.lax.all_to_all(padded, STAGE, 1, 1, tiled=True)
        return parts[:, -part:]


def _over_stages(pipeline: _Pipeline, compute: Callable, params, tokens, key):
    """Call `compute(params, tokens, shifts)` on every stage, blocks divided."""
    _check_call(pipeline, tokens.shape[0])
    specs = {name: P(STAGE) if name == "blocks" else P() for name in params}
    mapped = jax.shard_map(
        compute,
        axis_names={STAGE},
        in_specs=(specs, P(), P()),
        out_specs=((P(), P()), specs) if compute == pipeline.loss_and_grad else P(),
    )
    return mapped(params, tokens, _draw_shifts(pipeline, key))


def _check_call(pipeline: _Pipeline, batch: int):
    sizes = jax.sharding.get_abstract_mesh().shape
    if sizes.get(STAGE) != pipeline.num_stages:
        raise ValueError(
            f"stages={pipeline.num_stages}, but the mesh the loss is called under has "
            f"the axes {dict(sizes)}; make it with stage={pipeline.num_stages}"
        )
    if batch % pipeline.num_microbatches:
        raise ValueError(
            f"a batch of {batch} sequences is not a multiple of microbatches="
            f"{pipeline.num_microbatches}"
        )
    if pipeline.num_regions not in (1, sizes.get(REGION)):
        raise ValueError(
            f"routing between {pipeline.num_regions} regions needs as many places on "
            f"the mesh's region axis, but the axes are {dict(sizes)}; use more "
            "devices, or do not route"
        )


def _draw_shifts(pipeline: _Pipeline, key: jax.Array) -> jax.Array:
    """Draw the regions a message moves on by after each tick, alike in all regions."""
    if pipeline.num_regions == 1:
        return jnp.zeros(pipeline.num_ticks, jnp.int32)
    # Regions have keys of their own, and one that took another branch than the rest
    # would wait for ever: all use the key of region 0.
    own = jax.random.key_data(key)
    is_chosen = jax.lax.axis_index(REGION) == 0
    shared = jax.lax.psum(jnp.where(is_chosen, own, jnp.zeros_like(own)), REGION)
    return jax.random.randint(
        jax.random.wrap_key_data(shared, impl=jax.random.key_impl(key)),
        (pipeline.num_ticks,),
        0,
        pipeline.num_regions,
    )


def _as_own(params: Params) -> Params:
    """Give every stage parameters of its own, so that gradients are summed once.

    Left replicated, they would be summed where they are used: at every tick, and in
    the compute dtype.
    """
    return {
        name: part if name == "blocks" else jax.lax.pcast(part, STAGE, to="varying")
        for name, part in params.items()
    }
