"""The transformer's loss as a pipeline, with its blocks divided between stages.

Stage s of S holds layers s n/S to (s+1) n/S of n, and everything that is not a
block. A batch passes in M microbatches; at tick t stage s works on microbatch t - s, so
the batch is done after M + S - 1 ticks, and a stage is idle for S - 1 of them (GPipe,
Huang et al., arXiv 1811.06965, section 2.3). Differentiation runs the same schedule in
reverse. The stages divide the result of the last stage by positions in the sequence,
and each computes the logits and the loss of its part.

With random routing (NoLoCo, arXiv 2506.10911) activations of region r go to the next
stage of region (r + shift) mod R, and the gradients come back the same way. Differs
from the paper: each tick draws one shift, the same for all regions and stages, while
the paper may draw any permutation. In both, a region is drawn with probability 1/R; a
cyclic shift is one of R compiled collectives.

The gradient is taken inside the `jax.shard_map`. Outside, the values that JAX 0.10.2
saves between forward and backward would leave it sharded over "stage" and "region",
which the compiler refuses (github.com/jax-ml/jax/pull/26588).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.loss import cross_entropy, with_gradient
from cocodc_jax.models.sharding import check_pipeline
from cocodc_jax.models.stage_links import (
    REGION,
    STAGE,
    Hop,
    Links,
    StageCodec,
    stage_bytes,
)
from cocodc_jax.models.subspace import Subspace
from cocodc_jax.models.transformer import LossFn, Params, Transformer, bind


def make_pipelined_loss_fn(
    config: TransformerConfig,
    num_stages: int,
    num_microbatches: int,
    num_routed_regions: int | None = None,
    subspace: Subspace | None = None,
    codec: StageCodec | None = None,
) -> LossFn:
    """Make the language-model loss of one region, computed by a pipeline.

    It is the same function of the same parameters as `make_loss_fn`, except for the
    order of float32 sums. Call it under a mesh (`jax.set_mesh`, or inside a
    `jax.shard_map` over other axes) with an axis "stage" of `num_stages` devices. It is
    fast if blocks are sharded by `partition_specs(..., stage="stage")`.

    It has first derivatives in reverse mode, and forward mode over these.

    Args:
      config: the model, with `scan_layers`.
      num_stages: S, divides `config.num_layers`.
      num_microbatches: M, divides the sequences of a batch.
      num_routed_regions: R, to route activations between that many regions at
        random; the loss must then be called inside a `shard_map` over "region" with
        one region a device and `check_vma=False`. None keeps them in their region.
      subspace: in which the residual stream is sent. Lossless if the parameters are
        confined to it, by `confine` and `confined`.
      codec: how activations and gradients are encoded between stages, with or without a
        subspace; lossy. The last stage then computes all the logits, because dividing
        its result would send it without the codec.

    Returns:
      `loss_fn(params, tokens, key) -> (loss, aux)` as `make_loss_fn`'s. With a subspace
      or a codec aux has `stage_bytes` too: the bytes that the stages of a region sent
      one another for this batch, with those of the backward pass if a gradient is
      taken. With routing, the loss is that of the microbatches that ended in this
      region, with the gradient of all regions' losses by this region's parameters;
      shifts come from region 0's key.
    """
    check_pipeline(config, num_stages, num_microbatches)

    # The same blocks, fewer of them.
    stage_config = dataclasses.replace(
        config, num_layers=config.num_layers // num_stages
    )
    links = Links(num_stages, num_routed_regions or 1)
    stage = _Stage(
        config=stage_config,
        num_microbatches=num_microbatches,
        links=links,
        subspace=subspace,
        codec=codec,
    )

    return with_gradient(
        functools.partial(_over_stages, stage, stage.loss),
        functools.partial(_over_stages, stage, stage.loss_and_grad),
    )


def _over_stages(
    stage: _Stage,
    compute: Callable,
    params: Params,
    tokens: jax.Array,
    key: jax.Array,
) -> Any:
    """Call `compute(params, tokens, shifts)` on every stage, blocks divided."""
    _check_call(stage, tokens.shape[0])
    specs = {name: P(STAGE) if name == "blocks" else P() for name in params}
    mapped = jax.shard_map(
        compute,
        axis_names={STAGE},
        in_specs=(specs, P(), P()),
        out_specs=((P(), P()), specs) if compute == stage.loss_and_grad else P(),
        # The `shard_map` over regions around this one has no varying types.
        check_vma=stage.links.num_regions == 1,
    )

    return mapped(params, tokens, _draw_shifts(stage, key))


def _check_call(stage: _Stage, batch: int):
    sizes = jax.sharding.get_abstract_mesh().shape
    if sizes.get(STAGE) != stage.num_stages:
        raise ValueError(
            f"stages={stage.num_stages}, but the mesh the loss is called under has "
            f"the axes {dict(sizes)}; make it with stage={stage.num_stages}"
        )
    if batch % stage.num_microbatches:
        raise ValueError(
            f"a batch of {batch} sequences is not a multiple of microbatches="
            f"{stage.num_microbatches}"
        )

    num_regions = stage.links.num_regions
    if num_regions not in (1, sizes.get(REGION)):
        raise ValueError(
            f"routing between {num_regions} regions needs as many places on the mesh's "
            f"region axis, but the axes are {dict(sizes)}; use more devices, or do not "
            "route"
        )


def _draw_shifts(stage: _Stage, key: jax.Array) -> jax.Array:
    """Draw the shift of regions after each tick, equal in all regions."""
    if stage.links.num_regions == 1:
        return jnp.zeros(stage.num_ticks, jnp.int32)
    # All use the key of region 0: a region that took another branch than the others
    # would wait for ever.
    data = jax.random.key_data(key)
    is_chosen = jax.lax.axis_index(REGION) == 0
    shared = jax.lax.psum(jnp.where(is_chosen, data, jnp.zeros_like(data)), REGION)
    key = jax.random.wrap_key_data(shared, impl=jax.random.key_impl(key))
    return jax.random.randint(key, (stage.num_ticks,), 0, stage.links.num_regions)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """The computation of one stage, manual over the stage axis."""

    config: TransformerConfig  # With the stage's share of the layers.
    num_microbatches: int
    links: Links
    subspace: Subspace | None  # Of what crosses between stages; None sends it whole.
    codec: StageCodec | None  # How it is written; None sends it as it is.

    @property
    def num_stages(self) -> int:
        return self.links.num_stages

    @property
    def num_ticks(self) -> int:
        """Ticks from the first microbatch's entry to the last one's exit."""
        return self.num_microbatches + self.num_stages - 1

    def loss(self, params: Params, tokens: jax.Array, shifts: jax.Array):
        """Return `(loss, aux)` of the batch, the same on all stages."""
        params = _as_own(params)
        way_back = self._way_back(params, tokens)
        loss, seen = self._share(params, way_back, tokens, shifts)
        return self._sum_shares(loss, seen, tokens, 1)

    def loss_and_grad(self, params: Params, tokens: jax.Array, shifts: jax.Array):
        """Return `(loss, aux)` and the gradient, sharded as the parameters."""
        # A stage differentiates its own share; the other stages' shares reach its
        # parameters by the transposes of the collectives.
        params = _as_own(params)
        share = jax.value_and_grad(self._share, argnums=(0, 1), has_aux=True)
        way_back = self._way_back(params, tokens)
        (loss, seen), (grads, way_back) = share(params, way_back, tokens, shifts)
        grads = {
            name: grad if name == "blocks" else jax.lax.psum(grad, STAGE)
            for name, grad in grads.items()
        }

        if self.codec:
            _, num_bytes = way_back
            seen["stage_bytes"] += num_bytes
        return self._sum_shares(loss, seen, tokens, 2), grads

    def _sum_shares(self, loss, seen, tokens, num_ways: int):
        num_tokens = jnp.asarray(tokens[:, 1:].size, jnp.float32)
        aux = {"num_tokens": num_tokens, **jax.lax.psum(seen, STAGE)}
        if self.subspace and not self.codec:
            batch, length = tokens[:, 1:].shape
            num_bytes = stage_bytes(
                self.config,
                num_stages=self.num_stages,
                batch=batch,
                length=length,
                subspace=self.subspace,
                num_ways=num_ways,
            )
            aux["stage_bytes"] = jnp.float32(num_bytes)

        return jax.lax.psum(loss, STAGE), aux

    def _share(self, params: Params, way_back, tokens: jax.Array, shifts: jax.Array):
        """Compute this stage's shares of the batch's loss and aux."""
        model = bind(self.config, params)
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        ids = (targets,) if self.subspace is None else (targets, inputs)
        (hidden_BLD, ids), (_, num_bytes) = self._run(
            model, way_back, (model.embed(inputs), ids), shifts
        )

        # This stage's positions of what the last stage returned.
        hidden_BLD = self._part(hidden_BLD, padding=0)
        targets_BL, *inputs_BL = [self._part(x, padding=-1) for x in ids]
        if self.codec is None:
            hidden_BLD = self._decode(model, hidden_BLD, inputs_BL)

        loss, accuracy = cross_entropy(
            model.norm(hidden_BLD),
            model.output_head(),
            targets_BL,
            self.config.loss_chunk_tokens,
        )

        # From means over this part's positions, with padding, to shares of the mean.
        weight = targets_BL.size / targets.size
        seen: dict[str, Any] = {"accuracy": accuracy * weight}
        if self.codec:
            seen["stage_bytes"] = num_bytes
        return loss * weight, seen

    def _run(self, model: Transformer, way_back, batch, shifts: jax.Array):
        """Send a batch through the stages; return the last stage's result.

        It is activations [B, L, D], targets, and with a subspace tokens [B, L].
        """
        stage = jax.lax.axis_index(STAGE)
        is_first = stage == 0
        is_last = stage == self.num_stages - 1

        def entered(fresh: Any, other: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(is_first, x, y), fresh, other)

        def tick(carry: Any, step: Any) -> tuple[Any, Any]:
            (coded, ids), ahead, back = carry
            (fresh_BLD, fresh_ids), shift, now = step

            ids = entered(fresh_ids, ids)
            came_BLD = self._decode(model, coded, ids[1:])
            x_BLD, _ = model.run_blocks(entered(fresh_BLD, came_BLD))
            coded = self._encode(x_BLD)

            done = (coded if self.codec is None else x_BLD, ids)
            if self.codec is None:
                return (self.links.send((coded, ids), shift), ahead, back), done

            # This stage works on microbatch `now - stage`, its predecessor on the next.
            has_sent = self._is_batch(now - stage) & ~is_last
            has_received = self._is_batch(now - stage + 1) & ~is_first
            hop = Hop(self.links, self.codec)
            coded, ahead, back = hop(coded, ahead, back, shift, has_sent, has_received)

            memory, num_bytes = ahead
            id_bytes = sum(x.size * x.dtype.itemsize for x in ids)
            ahead = (memory, num_bytes + jnp.where(has_sent, id_bytes, 0))
            return ((coded, self.links.send(ids, shift)), ahead, back), done

        entering = jax.tree.map(self._microbatches, batch)
        # Stage 0 never uses what it receives. These zeros vary over every mesh axis
        # that messages vary over.
        one = jax.tree.map(lambda x: x[0], entering)
        x_BLD, ids = entered(one, jax.tree.map(jnp.zeros_like, one))
        coded = self._encode(x_BLD)

        ahead = ()
        if self.codec:
            first = Hop(self.links, self.codec).init(coded)
            # Zeros that vary as they do on the way back.
            zeros = jax.lax.stop_gradient(way_back)
            ahead = jax.tree.map(jnp.add, first, zeros)

        steps = (entering, shifts, jnp.arange(self.num_ticks))
        start = ((coded, ids), ahead, way_back)
        (_, ahead, _), done = jax.lax.scan(tick, start, steps)
        return jax.tree.map(self._batch, done), ahead or ((), 0.0)

    def _way_back(self, params: Params, tokens: jax.Array):
        """Return zeros like a codec's memory, which vary as parameters do."""
        if self.codec is None:
            return ()

        batch, length = tokens.shape
        width = self.subspace.rank if self.subspace else self.config.width
        shape = (batch // self.num_microbatches, length - 1, width)
        sent = jax.ShapeDtypeStruct(shape, self.config.compute_dtype)
        memory = jax.eval_shape(Hop(self.links, self.codec).init, sent)
        varying = params["embedding"][0, 0]

        return jax.tree.map(
            lambda x: jnp.where(
                varying == varying, jnp.zeros(x.shape), jnp.zeros(x.shape)
            ),
            memory,
        )

    def _is_batch(self, microbatch: jax.Array) -> jax.Array:
        return (microbatch >= 0) & (microbatch < self.num_microbatches)

    def _encode(self, x_BLD: jax.Array) -> jax.Array:
        return self.subspace.encode(x_BLD) if self.subspace else x_BLD

    def _decode(self, model: Transformer, coded: jax.Array, inputs) -> jax.Array:
        """Invert `_encode`; `inputs` holds the tokens if it needs them."""
        if self.subspace is None:
            return coded
        return self.subspace.decode(coded, model.embedding[...], inputs[0])

    def _microbatches(self, x: jax.Array) -> jax.Array:
        """Cut `[B, ...]` into the inputs of each tick, `[ticks, B / M, ...]`.

        Every M-th sequence is in one microbatch, so "data" shards it as the batch.
        """
        cut = x.reshape(-1, self.num_microbatches, *x.shape[1:]).swapaxes(0, 1)
        idle = [(0, self.num_stages - 1)] + [(0, 0)] * x.ndim
        return jnp.pad(cut, idle)

    def _batch(self, done: jax.Array) -> jax.Array:
        """Invert `_microbatches` for the last stage's results of each tick."""
        cut = done[self.num_stages - 1 :].swapaxes(0, 1)
        return cut.reshape(-1, *cut.shape[2:])

    def _part(self, x_BL: jax.Array, padding: int) -> jax.Array:
        """Give each stage its part of the last stage's positions, axis 1."""
        if self.codec:
            # All for the last stage, as dividing them would send them without the
            # codec.
            is_last = jax.lax.axis_index(STAGE) == self.num_stages - 1
            return jnp.where(is_last, x_BL, jnp.full_like(x_BL, padding))

        part = -(-x_BL.shape[1] // self.num_stages)
        pad = [(0, 0)] * x_BL.ndim
        pad[1] = (0, part * self.num_stages - x_BL.shape[1])
        padded = jnp.pad(x_BL, pad, constant_values=padding)
        parts = jax.lax.all_to_all(padded, STAGE, 1, 1, tiled=True)
        return parts[:, -part:]


def _as_own(params: Params) -> Params:
    """Mark parameters as each stage's own: else gradients are summed at every tick."""
    return {
        name: part if name == "blocks" else jax.lax.pcast(part, STAGE, to="varying")
        for name, part in params.items()
    }
