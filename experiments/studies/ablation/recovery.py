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

The run then continues from theta^*, so that every rule is compared at the same states.

Both ways are methods: DiLoCo, and one fragment tau steps late with each rule's merge.
They share the steps up to the last before the mean arrives, where their states branch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax.sync import merge, needs
from cocodc_jax.sync.schedules import staggered

from ...trials import State, Trials
from . import jobs, rules
from .jobs import Settings

PyTree = Any
Key = tuple[str, float | None]
KEEP, REPLAY = "keep", "replay"


class Recovery(NamedTuple):
    """What was measured at every sync."""

    steps: list[int]  # Of the syncs, `[S]`.
    cost: np.ndarray  # `[S, E]`.
    along: np.ndarray  # `[S, E]`.
    # By rule and strength (None without one), each `[S, E]`.
    recovered: dict[Key, np.ndarray]
    # By rule and strength, of the mean of the regions' parameters once merged, less the
    # loss of theta^*'s mean, nats per token, each `[S, E]`; `KEEP` too.
    loss: dict[Key, np.ndarray]


def measure(
    settings: Settings,
    delay_steps: int,
    names: Sequence[str],
    outer_lr: float,
) -> Recovery:
    """Follow runs without delay, a trial a test seed, and judge rules at each sync."""
    ways = _Ways(settings, delay_steps, names, outer_lr)
    found, steps, interval = [], [], settings.sync_interval
    state, now = ways.begin(), 0
    for sync in range(interval, settings.steps - delay_steps + 1, interval):
        state = ways.advance(ways.prompt, state, now, sync - 1)
        state, measured = ways.branch(state, sync)
        found.append(measured)
        steps.append(sync)
        now = sync + delay_steps - 1
    cost, along, recovered, loss = zip(*found, strict=True)
    return Recovery(
        steps, np.array(cost), np.array(along), _by_rule(recovered), _by_rule(loss)
    )


class _Ways:
    """Compiled trials of both ways, one trial a test seed."""

    def __init__(self, settings, delay_steps: int, names, outer_lr: float):
        """Build the methods; compile nothing."""
        self._settings, self._delay = settings, delay_steps
        table, interval = rules.table(settings.sync_interval), settings.sync_interval
        self._rules = [
            (name, table[name], [*table[name].strengths_at(delay_steps)] or [None])
            for name in dict.fromkeys([REPLAY, *names])
            if delay_steps >= table[name].least_delay
        ]
        wanted = [rule.make(0.5, delay_steps).needs for _, rule, _ in self._rules]
        copies = needs.copies({"staged"}.union(*wanted))
        keeps = {"later_params"} if needs.HALFWAY in copies else {"staged"}
        keep = dataclasses.replace(merge.keep(), needs=frozenset(keeps))
        late, replace = staggered(interval, 1, delay_steps), merge.replace()

        def of(schedule, make) -> Trials:
            def method(outer_lr, strength):
                # What is fed back has no next message here.
                rule = dataclasses.replace(make(strength), feedback_weight=0.0)
                return jobs.with_merge(rule, schedule, outer_lr)

            return jobs.trials_of(settings, method)

        self.prompt = of(staggered(interval), lambda _: replace)
        # The last step of a delay of H is a slot again, and has no sync yet.
        self._quiet = of(staggered(settings.steps + 1), lambda _: replace)
        self._keep = of(late, lambda _: keep)
        self._merges = {
            name: of(late, lambda x, rule=rule: rule.make(x, delay_steps))
            for name, rule, _ in self._rules
        }
        runs = [
            jobs.Trial(seed, rules.INNER_LR, outer_lr, None)
            for seed in settings.test_seeds
        ]
        self._given = {k: jnp.asarray(x) for k, x in jobs.numbers(runs).items()}
        each = [jobs.tokens(settings, seed) for seed in settings.test_seeds]
        self._tokens = np.stack(each, axis=1)

    def begin(self) -> State:
        """Return the state before the first step."""
        params = jobs.init_params(self._settings, self._settings.test_seeds)
        return self.prompt.init(params, self._given)

    def advance(
        self, trials: Trials, state: State, first: int, last: int, strength: float = 0.0
    ) -> State:
        """Train a copy of a state from step `first` to `last`."""
        if first == last:
            return state
        stream = jnp.arange(len(self._settings.test_seeds))
        given = self._given | {"strength": jnp.full(len(stream), strength)}
        state = jax.tree.map(jnp.copy, state)
        return trials.advance(state, given, self._tokens[first:last], stream)[0]

    def branch(self, state: State, sync: int) -> tuple[State, tuple]:
        """Go both ways from the step before a sync."""
        last = sync + self._delay
        prompt = self.advance(self.prompt, state, sync - 1, last - 1)
        target = self.advance(self._quiet, prompt, last - 1, last)
        begun = self._keep.init(
            jax.tree.map(lambda x: x[:, 0], state.params), self._given
        )
        same = ("step", "inner", "outer", "opt_states")
        shared = {name: getattr(state.sync, name) for name in same}
        late = begun._replace(params=state.params, sync=begun.sync._replace(**shared))
        late = self.advance(self._keep, late, sync - 1, last - 1)
        kept = self.advance(self._keep, late, last - 1, last)
        aim, apart = self._loss(target), _squared(target.params, kept.params)
        recovered: dict[Key, np.ndarray] = {}
        loss: dict[Key, np.ndarray] = {(KEEP, None): self._loss(kept) - aim}
        replayed = None
        for name, _, strengths in self._rules:
            trials = self._merges[name]
            own = trials.method.sync.copies if trials.method.sync else ()
            copies = tuple(
                {n: x for n, x in part.items() if n in own} for part in late.sync.copies
            )
            here = late._replace(sync=late.sync._replace(copies=copies))
            for strength in strengths:
                merged = self.advance(trials, here, last - 1, last, strength or 0.0)
                left = _squared(target.params, merged.params)
                recovered[name, strength] = np.asarray(1 - left / apart)
                loss[name, strength] = self._loss(merged) - aim
                if name == REPLAY:
                    replayed = merged.params
        (outer,), (part,) = target.sync.outer, late.sync.copies
        gap = jax.tree.map(lambda o, x: o[:, None] - x, outer, part[needs.STAGED])
        one = jax.tree.map(lambda x: x[0, 0], target.params)
        rest = self.prompt.fragments(one).take(
            jax.tree.map(jnp.subtract, target.params, replayed), 0, lead=2
        )
        length, left = _dot(gap, gap), _dot(rest, rest)
        # 0 where replay gets all of it back.
        along = _dot(rest, gap) ** 2 / (jnp.where(left > 0, left, 1.0) * length)
        cost = np.sqrt(apart / length)
        return prompt, (cost, np.asarray(along), recovered, loss)

    def _loss(self, state: State) -> np.ndarray:
        """Return the loss of the regions' mean, `[E]`."""
        batch = jobs.eval_tokens(self._settings)
        return np.asarray(self._quiet.evaluate(state, batch).loss)


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
