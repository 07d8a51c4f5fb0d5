"""What a delay costs at each sync, and which part of it every merge rule gets back.

A run without delay is followed. At each of its syncs, step s, the regions stage
theta^m_s and the outer step makes theta^g of their mean. From there two ways are gone
with the same batches and the same inner optimizer states:

    theta^*m      tau steps from theta^g: what the run without delay does
    theta^m       tau steps from theta^m_s: what a region does that waits for nothing

A rule is given what it has when the mean is late (theta^m, staged, theta^g, tau) and
says where the region goes on. Its distance to theta^*m is what it did not get back. Of
the squared distance d over all regions and parameters,

    cost       sqrt(d(theta^m) / d(staged, theta^g)): of doing nothing, in lengths of D
    recovered  1 - d(rule) / d(theta^m): 0 for doing nothing, 1 for no delay at all
    along D    of what replay leaves, e = theta^* - replay, the share
               (e D)^2 / ((e e) (D D)) that lies along D = theta^g - staged: all that a
               pull on D can get back of it

The run then goes on from theta^*, so that every rule is judged at the same states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import jobs, rules
from .settings import Settings
from .trials import Flight, Trainer, Trials, make_finish

PyTree = Any
KEEP, REPLAY = "keep", "replay"


class Recovery(NamedTuple):
    """What was measured at every sync.

    Attributes:
      steps: of the syncs, `[S]`.
      cost: `[S, E]`.
      along: `[S, E]`.
      recovered: by rule and strength (None without one), each `[S, E]`.
      loss: by rule and strength, of the mean of the regions' parameters once merged,
        less the loss of theta^*'s mean, nats per token, each `[S, E]`; `KEEP` too.
    """

    steps: list[int]
    cost: np.ndarray
    along: np.ndarray
    recovered: dict[tuple[str, float | None], np.ndarray]
    loss: dict[tuple[str, float | None], np.ndarray]


def measure(
    settings: Settings,
    delay_steps: int,
    names: Sequence[str],
    outer_lr: float,
) -> Recovery:
    """Follow runs without delay, a trial a test seed, and judge rules at each sync.

    Args:
      settings: of the ablation; the whole model is one fragment here.
      delay_steps: tau, at most H.
      names: of `rules.table`.
      outer_lr: of the outer Nesterov optimizer.
    """
    trainer = jobs.make_trainer(settings, 1)
    trials, tokens = jobs.begin(settings, trainer, settings.test_seeds)
    judged = _judged(settings, trainer, delay_steps, names)
    rate = jnp.full(len(settings.test_seeds), outer_lr)
    found, steps, now = [], [], 0
    interval = settings.sync_interval
    for sync in range(interval, settings.steps - delay_steps + 1, interval):
        trials = _advanced(trainer, trials, tokens, now, sync)
        fork = _fork(trainer, trials, tokens, sync, delay_steps, rate)
        found.append(_judge(settings, trainer, fork, judged, tokens, rate))
        steps.append(sync)
        trials, now = fork.undelayed, sync + delay_steps
    cost, along, recovered, loss = zip(*found, strict=True)
    return Recovery(
        steps, np.array(cost), np.array(along), _by_rule(recovered), _by_rule(loss)
    )


class _Fork(NamedTuple):
    """Two ways from one sync: with the delay, and without."""

    late: Trials
    undelayed: Trials
    flight: Flight
    step: int


def _advanced(trainer: Trainer, trials: Trials, tokens, first, last) -> Trials:
    """Train from step `first` to `last`; what goes in is kept, for the other way."""
    if first == last:
        return trials
    own = jax.tree.map(jnp.copy, (trials.params, trials.opt_state))
    params, opt_state = trainer.advance(*own, tokens, first, last, False)
    return trials._replace(params=params, opt_state=opt_state)


def _fork(
    trainer: Trainer, trials: Trials, tokens, step: int, delay_steps: int, outer_lr
) -> _Fork:
    staged, mean = trainer.start(trials.params, trials.outer[0], 0)
    outer, outer_state = _outer_step(trainer)(
        trials.outer[0], trials.outer_state[0], mean, outer_lr
    )
    everywhere = jax.tree.map(
        lambda o, x: jnp.broadcast_to(o[:, None], x.shape), outer, staged
    )
    whole = trainer.fragments.put(trials.params, 0, everywhere, lead=2)
    synced = trials._replace(params=whole, outer=(outer,), outer_state=(outer_state,))
    end, middle = step + delay_steps, step + delay_steps // 2
    undelayed = _advanced(trainer, synced, tokens, step, end)
    half = _advanced(trainer, trials, tokens, step, middle)
    midway = trainer.take(half.params, 0)
    late = _advanced(trainer, half, tokens, middle, end)
    return _Fork(late, undelayed, Flight(staged, mean, midway), end)


@functools.cache
def _outer_step(trainer: Trainer):
    return jax.jit(trainer.outer_step)


def _judged(settings, trainer, delay_steps, names) -> list[tuple[str, Any, list]]:
    """Return each rule's name, its compiled merge, and the strengths to try."""
    table = rules.table(settings.sync_interval)
    return [
        (
            name,
            make_finish(trainer, table[name].make, delay_steps),
            [*table[name].strengths_at(delay_steps)] or [None],
        )
        for name in dict.fromkeys([REPLAY, *names])
        if delay_steps >= table[name].least_delay
    ]


def _judge(settings, trainer, fork: _Fork, judged, tokens, outer_lr):
    """Return cost, the share along D, and by rule what was got back, and losses."""
    key = jax.random.fold_in(jax.random.key(0), fork.step)
    batch = jax.tree.map(lambda x: x[fork.step - 1], tokens)
    rate = jnp.full(outer_lr.shape, trainer.user_inputs.rate(fork.step))
    losses = functools.partial(_loss, settings, trainer)
    target, aim = fork.undelayed.params, losses(fork.undelayed.params)
    kept = _squared(target, fork.late.params)
    recovered = {}
    loss = {(KEEP, None): np.asarray(losses(fork.late.params) - aim)}
    replayed = None
    for name, finish, strengths in judged:
        for strength in strengths:
            merged, _ = finish(
                fork.late,
                fork.flight,
                batch,
                key,
                rate,
                outer_lr,
                jnp.full(outer_lr.shape, 0.0 if strength is None else strength),
                0,
            )
            left = _squared(target, merged.params)
            recovered[name, strength] = np.asarray(1 - left / kept)
            loss[name, strength] = np.asarray(losses(merged.params) - aim)
            if name == REPLAY:
                replayed = merged.params
    gap = jax.tree.map(
        lambda o, x: o[:, None] - x, fork.undelayed.outer[0], fork.flight.staged
    )
    mine, replays = (trainer.take(params, 0) for params in (target, replayed))
    rest = jax.tree.map(jnp.subtract, mine, replays)
    length = _dot(gap, gap)
    left = _dot(rest, rest)  # 0 where replay gets all of it back.
    along = _dot(rest, gap) ** 2 / (jnp.where(left > 0, left, 1.0) * length)
    return np.sqrt(kept / length), np.asarray(along), recovered, loss


def _loss(settings, trainer, params) -> jax.Array:
    return trainer.evaluate(params, jobs.eval_tokens(settings))


@jax.jit
def _dot(a: PyTree, b: PyTree) -> jax.Array:
    """Return the product over regions and parameters, of each trial, `[E]`."""
    each = jax.tree.map(lambda x, y: (x * y).reshape(len(x), -1).sum(1), a, b)
    return jnp.stack(jax.tree.leaves(each)).sum(0)


def _squared(a: PyTree, b: PyTree) -> jax.Array:
    gap = jax.tree.map(jnp.subtract, a, b)
    return _dot(gap, gap)


def _by_rule(found: Sequence[dict]) -> dict:
    return {key: np.stack([each[key] for each in found]) for key in found[0]}
