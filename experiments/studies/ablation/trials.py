"""What is compiled for many experiments at once: inner steps, evaluation, merges.

`RegionProgram` compiles one method for one set of numbers. Here an experiment is a
*trial*: seed, outer learning rate and strength are values, so one compiled program
trains E of them side by side, each with R regions. Fragments, merge rules, what they
need to know and optimizers are the package's own. There are no devices, meshes or
collectives here: regions are a leading axis, and a mean over them is `x.mean(axis)`.

Shapes: E trials, R regions, T steps of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.merge import Merge
from cocodc_jax.sync.needs import HALFWAY, STAGED, LossFn, MergeContext, UserInputs
from cocodc_jax.sync.schedules.base import replaced

PyTree = Any


class Trials(NamedTuple):
    """All experiments at one step.

    Attributes:
      params: local parameters, leaves `[E, R, ...]`.
      opt_state: inner optimizer states, `[E, R, ...]`.
      outer: outer fragments, an entry a fragment, `[E, ...]`.
      outer_state: their outer optimizer states, `[E, ...]`.
      memory: what merges have left out of regions' progress and no message has told
        yet, an entry a fragment, `[E, R, ...]`; None where it is forgotten.
    """

    params: PyTree
    opt_state: PyTree
    outer: tuple[PyTree, ...]
    outer_state: tuple[PyTree, ...]
    memory: tuple[PyTree, ...] | None = None


class Flight(NamedTuple):
    """A fragment on its way.

    Attributes:
      staged: the regions' own when it started, `[E, R, ...]`.
      mean: mean pseudo-gradient, `[E, ...]`.
      midway: the regions' own in the middle of the overlap, or None.
    """

    staged: PyTree
    mean: PyTree
    midway: PyTree | None = None


class Trainer:
    """Inner steps and evaluation, compiled once for all rules and delays."""

    def __init__(
        self,
        loss_fn: LossFn,
        user_inputs: UserInputs,
        optimizer: optax.GradientTransformation,
        fragments: Fragments,
        outer_momentum: float = 0.9,
    ):
        """Wrap everything in jit.

        Args:
          loss_fn: of one region, `(params, batch, key) -> (loss, aux)`.
          user_inputs: what merges may ask for besides.
          optimizer: the inner optimizer.
          fragments: how the parameters are cut.
          outer_momentum: of the outer Nesterov optimizer.
        """
        self.loss_fn, self.user_inputs, self.fragments = loss_fn, user_inputs, fragments
        self._outer_momentum, self._optimizer = outer_momentum, optimizer
        self.start = jax.jit(self._start, static_argnums=2)
        self.take = jax.jit(functools.partial(fragments.take, lead=2), static_argnums=1)
        self.evaluate = jax.jit(self._evaluate)
        self.advance = jax.jit(self._advance, static_argnums=5, donate_argnums=(0, 1))

    def init(self, params: PyTree, num_regions: int) -> Trials:
        """Return the trials before the first step.

        Args:
          params: leaves `[E, ...]`; each trial's regions all begin with them.
          num_regions: R.
        """

        def spread(x):
            x = jnp.asarray(x)
            return jnp.repeat(x[:, None], num_regions, axis=1)

        opt_state = jax.vmap(self._optimizer.init)(params)
        each = range(len(self.fragments))
        outer = tuple(self.fragments.take(params, k, lead=1) for k in each)
        state = tuple(jax.vmap(self._nesterov(1.0).init)(part) for part in outer)
        return Trials(
            jax.tree.map(spread, params), jax.tree.map(spread, opt_state), outer, state
        )

    def no_memory(self, params: PyTree) -> tuple[PyTree, ...]:
        """Return what `Trials.memory` is before anything was left out."""
        nothing = jax.tree.map(jnp.zeros_like, params)
        return tuple(self.take(nothing, k) for k in range(len(self.fragments)))

    def _nesterov(self, outer_lr) -> optax.GradientTransformation:
        return optax.sgd(outer_lr, self._outer_momentum, nesterov=True)

    def _advance(
        self, params, opt_state, tokens, first, last, reduce_gradients, scale=None
    ):
        """Step `first` to `last` of all regions; tokens leaves `[T, E, R, ...]`.

        `scale` `[E]` multiplies the updates of a trial: its inner learning rate over
        the optimizer's, as AdamW's updates are linear in it.
        """
        shape = jax.tree.leaves(params)[0].shape[:2]
        scale = jnp.ones(shape[0]) if scale is None else scale
        scale = jnp.repeat(scale, shape[1])
        # One mapped axis in place of two: half as many batched products to lay out.
        merge_axes = functools.partial(
            jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:])
        )
        split_axes = functools.partial(
            jax.tree.map, lambda x: x.reshape(*shape, *x.shape[1:])
        )

        def gradient(params, batch):
            return jax.grad(self.loss_fn, has_aux=True)(
                params, batch, jax.random.key(0)
            )[0]

        def update(grads, opt_state, params, scale):
            updates, opt_state = self._optimizer.update(grads, opt_state, params)
            updates = jax.tree.map(lambda x: x * scale, updates)
            return optax.apply_updates(params, updates), opt_state

        def step(i, carry):
            params, opt_state = carry
            batch = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tokens
            )
            grads = jax.vmap(gradient)(params, merge_axes(batch))
            if reduce_gradients:
                grads = jax.tree.map(
                    lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape),
                    split_axes(grads),
                )
                grads = merge_axes(grads)
            return jax.vmap(update)(grads, opt_state, params, scale)

        carry = merge_axes((params, opt_state))
        return split_axes(jax.lax.fori_loop(first, last, step, carry))

    def _evaluate(self, params, tokens):
        """Loss `[E]` of the mean of the regions' parameters on one batch."""

        def one(params):
            mean = jax.tree.map(lambda x: x.mean(0), params)
            return self.loss_fn(mean, tokens, jax.random.key(0))[0]

        return jax.lax.map(one, params)

    def _start(self, params, outer, k, memory=None):
        told = staged = self.fragments.take(params, k, lead=2)
        if memory is not None:
            told = jax.tree.map(jnp.add, staged, memory)
        mean = jax.tree.map(lambda o, x: (o[:, None] - x).mean(1), outer, told)
        return staged, mean

    def outer_step(self, outer, state, mean, outer_lr):
        """Outer Nesterov on one fragment of every trial; `outer_lr` `[E]`."""

        def one(outer, state, mean, outer_lr):
            updates, state = self._nesterov(outer_lr).update(mean, state, outer)
            return optax.apply_updates(outer, updates), state

        return jax.vmap(one)(outer, state, mean, outer_lr)


def make_finish(
    trainer: Trainer,
    make: Callable[[Any, int], Merge],
    delay_steps: int,
) -> Callable:
    """Compile what happens when a fragment arrives.

    Args:
      trainer: shared parts.
      make: `make(strength, delay_steps) -> Merge`, see `rules.Rule`.
      delay_steps: tau.

    Returns:
      `finish(trials, flight, batch, key, rate, outer_lr, strength, k)` gives the trials
      with fragment k stepped and merged, and the correction ratio `[E]`; batch
      `[E, R, ...]` is the last one trained on; rate, outer_lr and strength `[E]`.
    """
    fragments, user_inputs = trainer.fragments, trainer.user_inputs
    wanted = make(1.0, delay_steps).needs

    def one_region(local, kept, outer, regional, params, batch, key, rate, strength, k):
        seen = MergeContext(
            local=local,
            outer=outer,
            kept=kept,
            delay_steps=delay_steps,
            regional=regional,
            learning_rate=rate,
            batch=batch,
            key=key,
            whole=functools.partial(fragments.put, params, k),
            loss_fn=trainer.loss_fn,
            user_inputs=user_inputs,
        )
        merged, metrics = make(strength, delay_steps).apply(
            local,
            kept[STAGED],
            outer,
            delay_steps=delay_steps,
            **needs.arguments(wanted, seen),
        )
        return merged, metrics.get("correction_ratio", jnp.zeros([]))

    def regional(opt_state, k):
        """Return what is made of all regions at once, a fragment, `[E, R, ...]`."""
        made = jax.vmap(lambda state: needs.regional(wanted, state, user_inputs))(
            opt_state
        )
        return {name: fragments.take(tree, k, lead=2) for name, tree in made.items()}

    def finish(trials, flight, batch, key, rate, outer_lr, strength, k):
        outer, outer_state = trainer.outer_step(
            trials.outer[k], trials.outer_state[k], flight.mean, outer_lr
        )
        local = fragments.take(trials.params, k, lead=2)
        keys = jax.random.split(key, jax.tree.leaves(local)[0].shape[:2])
        in_region = (0, 0, None, 0, 0, 0, 0, None, None)
        in_trial = (0, 0, 0, 0, 0, 0, 0, 0, 0)
        one = functools.partial(one_region, k=k)
        merged, ratio = jax.vmap(jax.vmap(one, in_region), in_trial)(
            local,
            {STAGED: flight.staged, HALFWAY: flight.midway},
            outer,
            regional(trials.opt_state, k),
            trials.params,
            batch,
            keys,
            rate,
            strength,
        )
        memory = trials.memory
        if memory is not None:
            share = jnp.asarray(make(strength, delay_steps).feedback_weight)
            left_out = jax.tree.map(
                lambda x, s: share.reshape(-1, *[1] * (x.ndim - 1)) * (x - s),
                local,
                flight.staged,
            )
            memory = replaced(memory, k, left_out)
        return Trials(
            fragments.put(trials.params, k, merged, lead=2),
            trials.opt_state,
            replaced(trials.outer, k, outer),
            replaced(trials.outer_state, k, outer_state),
            memory,
        ), ratio.mean(1)

    return jax.jit(finish, static_argnums=7)
