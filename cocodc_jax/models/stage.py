"""What one stage of a pipeline computes: its ticks, and its part of the loss.

Manual over the mesh axis "stage"; see `pipeline.py` for the whole.
"""

import dataclasses

import jax
import jax.numpy as jnp

from cocodc_jax.models.config import TransformerConfig
from cocodc_jax.models.loss import cross_entropy
from cocodc_jax.models.stage_links import STAGE, Hop, Links, StageCodec, stage_bytes
from cocodc_jax.models.subspace import Subspace
from cocodc_jax.models.transformer import Params, Transformer, bind

# A microbatch on its way: activations [B, L, D], the targets [B, L] they are for, and
# the tokens [B, L] that they come from where these are needed to read activations.
Message = tuple[jax.Array, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one stage computes, manual over the stage axis.

    Attributes:
      config: the model of one stage, with its share of the layers.
      num_microbatches: M.
      links: the ways between stages, S of them, and between regions.
      subspace: of what crosses between stages; None sends it whole.
      codec: how it is written; None sends it as it is.
    """

    config: TransformerConfig
    num_microbatches: int
    links: Links
    subspace: Subspace | None
    codec: StageCodec | None

    @property
    def num_stages(self) -> int:
        """S."""
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
        """Return `(loss, aux)` and the gradient, laid out as the parameters."""
        # A stage differentiates its own share; the other stages' shares reach its
        # parameters by the transposes of the collectives.
        params = _as_own(params)
        share = jax.value_and_grad(self._share, argnums=(0, 1), has_aux=True)
        (loss, seen), (grads, way_back) = share(
            params, self._way_back(params, tokens), tokens, shifts
        )
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
            aux["stage_bytes"] = jnp.float32(
                stage_bytes(
                    self.config, self.num_stages, batch, length, self.subspace, num_ways
                )
            )
        return jax.lax.psum(loss, STAGE), aux

    def _share(self, params: Params, way_back, tokens: jax.Array, shifts: jax.Array):
        """Compute this stage's shares of the batch's loss and of what is reported."""
        model = bind(self.config, params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        ids = (targets,) if self.subspace is None else (targets, inputs)
        (hidden_BLD, ids), (_, num_bytes) = self._run(
            model, way_back, (model.embed(inputs), ids), shifts
        )
        hidden_BLD = self._part(hidden_BLD, padding=0)
        targets_BL, *own = [self._part(x, padding=-1) for x in ids]
        if self._shares_out:
            hidden_BLD = self._decode(model, hidden_BLD, own)
        loss, accuracy = cross_entropy(
            model.norm(hidden_BLD),
            model.output_head(),
            targets_BL,
            self.config.loss_chunk_tokens,
        )
        # Means over this part's positions, padding among them, to shares of the mean.
        weight = targets_BL.size / targets.size
        seen = {"accuracy": accuracy * weight}
        if self.codec:
            seen["stage_bytes"] = num_bytes
        return loss * weight, seen

    def _run(self, model: Transformer, way_back, batch: Message, shifts: jax.Array):
        """Send a batch through the stages; the last stage's result is the batch's."""
        stage = jax.lax.axis_index(STAGE)
        is_first, is_last = stage == 0, stage == self.num_stages - 1

        def tick(carry, step):
            (coded, ids), ahead, back = carry
            (fresh_BLD, fresh_ids), shift, now = step
            ids = jax.tree.map(
                lambda new, x: jnp.where(is_first, new, x), fresh_ids, ids
            )
            came_BLD = self._decode(model, coded, ids[1:])
            x_BLD, _ = model.run_blocks(jnp.where(is_first, fresh_BLD, came_BLD))
            coded = self._encode(x_BLD)
            done = (coded if self._shares_out else x_BLD, ids)
            if self.codec is None:
                return (self.links.ahead((coded, ids), shift), ahead, back), done
            # This stage works on microbatch `now - stage`, the one before on the next.
            has_sent = self._is_batch(now - stage) & ~is_last
            has_received = self._is_batch(now - stage + 1) & ~is_first
            hop = Hop(self.links, self.codec)
            coded, ahead, back = hop(coded, ahead, back, shift, has_sent, has_received)
            num_ids = sum(x.size * x.dtype.itemsize for x in ids)
            ahead = (ahead[0], ahead[1] + jnp.where(has_sent, num_ids, 0))
            return ((coded, self.links.ahead(ids, shift)), ahead, back), done

        entering = jax.tree.map(self._microbatches, batch)
        # What stage 0 receives is never used; so chosen, zeros vary over every mesh
        # axis that messages vary over.
        nothing = jax.tree.map(
            lambda x: jnp.where(is_first, x[0], jnp.zeros_like(x[0])), entering
        )
        nothing = (self._encode(nothing[0]), nothing[1])
        ahead = ()
        if self.codec:
            first = Hop(self.links, self.codec).init(nothing[0])
            # Zeros that vary as they do on the way back.
            zeros = jax.lax.stop_gradient(way_back)
            ahead = jax.tree.map(jnp.add, first, zeros)
        start = (nothing, ahead, way_back)
        (_, ahead, _), done = jax.lax.scan(
            tick, start, (entering, shifts, jnp.arange(self.num_ticks))
        )
        return jax.tree.map(self._batch, done), ahead or ((), 0.0)

    def _way_back(self, params: Params, tokens: jax.Array):
        """Return zeros like what a codec remembers; they vary as parameters do."""
        if self.codec is None:
            return ()
        batch, length = tokens.shape
        width = self.subspace.rank if self.subspace else self.config.width
        shape = (batch // self.num_microbatches, length - 1, width)
        memory = jax.eval_shape(
            Hop(self.links, self.codec).init,
            jax.ShapeDtypeStruct(shape, self.config.compute_dtype),
        )
        own = params["embedding"][0, 0]
        return jax.tree.map(
            lambda x: jnp.where(own == own, jnp.zeros(x.shape), jnp.zeros(x.shape)),
            memory,
        )

    def _is_batch(self, microbatch: jax.Array) -> jax.Array:
        return (microbatch >= 0) & (microbatch < self.num_microbatches)

    def _encode(self, x_BLD: jax.Array) -> jax.Array:
        return self.subspace.encode(x_BLD) if self.subspace else x_BLD

    def _decode(self, model: Transformer, coded: jax.Array, inputs) -> jax.Array:
        """Undo `_encode`; `inputs` holds the tokens where that takes them."""
        if self.subspace is None:
            return coded
        return self.subspace.decode(coded, model.embedding[...], inputs[0])

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

    @property
    def _shares_out(self) -> bool:
        """Whether each stage computes a part of the logits."""
        return self.codec is None

    def _part(self, x_BL: jax.Array, padding: int) -> jax.Array:
        """Give each stage its part of the last stage's positions, axis 1."""
        if not self._shares_out:
            # All for the last stage, as sharing out would send what no codec wrote.
            is_last = jax.lax.axis_index(STAGE) == self.num_stages - 1
            return jnp.where(is_last, x_BL, jnp.full_like(x_BL, padding))
        part = -(-x_BL.shape[1] // self.num_stages)
        pad = [(0, 0)] * x_BL.ndim
        pad[1] = (0, part * self.num_stages - x_BL.shape[1])
        padded = jnp.pad(x_BL, pad, constant_values=padding)
        parts = jax.lax.all_to_all(padded, STAGE, 1, 1, tiled=True)
        return parts[:, -part:]


def _as_own(params: Params) -> Params:
    """Give every stage parameters of its own, so that gradients are summed once.

    Left replicated, they would be summed where they are used: at every tick, and in
    the compute dtype.
    """
    return {
        name: part if name == "blocks" else jax.lax.pcast(part, STAGE, to="varying")
        for name, part in params.items()
    }
