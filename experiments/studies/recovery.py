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
Both ways are methods, DiLoCo and one fragment tau steps late, and branch at the last
step before the mean arrives. A rule's strength is the weight of its correction.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cocodc_jax import models
from cocodc_jax.data import DataConfig, load
from cocodc_jax.methods import get as get_method
from cocodc_jax.run.build import training_parts
from cocodc_jax.run.optimizer_config import OptimizerConfig
from cocodc_jax.sync import merge, needs
from cocodc_jax.sync.method import Method, Sync
from cocodc_jax.sync.outer import nesterov
from cocodc_jax.sync.schedules import Schedule, staggered
from cocodc_jax.transforms import curvature
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.secant import secant

from .. import trials
from ..trials import State, Trials

PyTree = Any
Key = tuple[str, float | None]
KEEP, REPLAY = "keep", "replay"
MODEL = models.get("smoke")
REGIONS, SEQUENCE_LENGTH, EVAL_SEQUENCES = 4, 32, 128
INNER_LR, WARMUP_STEPS = 3e-3, 40


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the runs that are followed, with the whole model as one fragment."""

    steps: int = 400  # Inner steps of each run.
    sync_interval: int = 20  # H.
    batch_per_region: int = 4  # Sequences of a region's step.
    seeds: int = 5  # Runs, each with a seed of its own.
    outer_lr: float = 0.7  # Of the outer Nesterov optimizer, of momentum 0.9.


@dataclasses.dataclass(frozen=True)
class Rule:
    """One merge rule."""

    name: str  # As on the command line and in the results.
    # Of a strength, which may be traced, and is None for a rule without one.
    make: Callable[[Any], merge.Merge]
    strengths: tuple[float, ...] = ()  # What is tried; empty for a rule without one.
    falls_with_delay: bool = False  # Strengths are divided by the delay.
    least_delay: int = 0  # Delay in steps below which the rule has no meaning.

    def strengths_at(self, delay_steps: int) -> tuple[float, ...]:
        """Return the strengths to try at this delay."""
        divisor = max(1, delay_steps) if self.falls_with_delay else 1
        return tuple(strength / divisor for strength in self.strengths)


def _taylor(
    name: str,
    kind: curvature.Curvature,
    strengths: tuple[float, ...] = (),
    **fields: Any,
) -> Rule:
    """Delay compensation; its strength is lambda, 0.5 where none is tried."""

    def make(strength):
        lambda_ = strength if strengths else 0.5
        return merge.compensate(delay_compensation(kind, lambda_), kind.needs)

    return Rule(name, make, strengths, **fields)


def rules(sync_interval: int) -> dict[str, Rule]:
    """Return all rules by name, with the strengths that are tried."""
    isotropic, falling = curvature.isotropic(), {"falls_with_delay": True}
    in_gradient_units = curvature.outer_product(units="gradient")
    normalized = curvature.normalized_outer_product()
    found = [
        # Alpha on local; 0.5 is Streaming DiLoCo.
        *(
            Rule(f"mix_{x:g}", lambda _, x=x: merge.mix(x))
            for x in (0.0, 0.25, 0.5, 0.75)
        ),
        # No curvature: all progress is kept.
        _taylor("replay", curvature.none()),
        # The outer product in parameter units, with 1/H.
        _taylor("paper", curvature.outer_product(sync_interval)),
        # c / tau times the identity.
        _taylor("isotropic", isotropic, (0.15, 0.3, 0.5, 0.75)),
        _taylor(  # Isotropic; c is measured from the overlap's two halves.
            *("secant", secant(isotropic, max_weight=1.0), (0.25, 0.5, 1.0, 2.0)),
            least_delay=2,
        ),
        # g * g * D; then the same scaled to lambda_0 of g.
        _taylor("outer_product", in_gradient_units, (30.0, 300.0, 1e3, 3e3), **falling),
        _taylor("normalized_outer_product", normalized, (0.1, 0.2, 0.5, 1.0)),
        # lr * sqrt(nu) * D.
        _taylor(
            *("adam_second_moment", curvature.adam_second_moment()),
            (1e3, 2e3, 4e3, 8e3),
            **falling,
        ),
        # An exact product through Adam's scale. A batch of one region is a noisy
        # Hessian: Taylor's own strength, 1, diverges at a delay of 4 and more.
        _taylor(
            "hessian_vector", curvature.hessian_vector("adam"), (0.4, 1.2), **falling
        ),
    ]
    return {rule.name: rule for rule in found}


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


def measure(settings: Settings, delay_steps: int, names: Sequence[str]) -> Recovery:
    """Follow runs without delay, a trial a seed, and judge rules at each sync."""
    ways = _Ways(settings, delay_steps, names)
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
    """Compiled trials of both ways, one trial a seed."""

    def __init__(self, settings: Settings, delay_steps: int, names: Sequence[str]):
        """Build the methods; compile nothing."""
        self._settings, self._delay = settings, delay_steps
        interval = settings.sync_interval
        table = rules(interval)
        self._rules = [
            (name, table[name], [*table[name].strengths_at(delay_steps)] or [None])
            for name in dict.fromkeys([REPLAY, *names])
            if delay_steps >= table[name].least_delay
        ]
        wanted = [rule.make(0.5).needs for _, rule, _ in self._rules]
        copies = needs.copies({"staged"}.union(*wanted))
        keeps = {"later_params"} if needs.HALFWAY in copies else {"staged"}
        keep = dataclasses.replace(merge.keep(), needs=frozenset(keeps))
        late, replace = staggered(interval, 1, delay_steps), merge.replace()
        of = functools.partial(_trials_of, settings)
        self.prompt = of(staggered(interval), lambda _: replace)
        # The last step of a delay of H is a slot again, and has no sync yet.
        self._quiet = of(staggered(settings.steps + 1), lambda _: replace)
        self._keep = of(late, lambda _: keep)
        self._merges = {name: of(late, rule.make) for name, rule, _ in self._rules}
        self._given = {"strength": jnp.zeros(settings.seeds)}
        each = [tokens(settings, seed) for seed in range(settings.seeds)]
        self._tokens = np.stack(each, axis=1)

    def begin(self) -> State:
        """Return the state before the first step."""
        return self.prompt.init(init_params(self._settings), self._given)

    def advance(
        self, trials: Trials, state: State, first: int, last: int, strength: float = 0.0
    ) -> State:
        """Train a copy of a state from step `first` to `last`."""
        if first == last:
            return state
        stream = jnp.arange(self._settings.seeds)
        given = {"strength": jnp.full(len(stream), strength)}
        state = jax.tree.map(jnp.copy, state)
        return trials.advance(state, given, self._tokens[first:last], stream)[0]

    def branch(self, state: State, sync: int) -> tuple[State, tuple]:
        """Go both ways from the step before a sync."""
        last = sync + self._delay
        prompt = self.advance(self.prompt, state, sync - 1, last - 1)
        target = self.advance(self._quiet, prompt, last - 1, last)
        first = jax.tree.map(lambda x: x[:, 0], state.params)
        begun = self._keep.init(first, self._given)
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
        missed = jax.tree.map(jnp.subtract, target.params, replayed)
        rest = self.prompt.fragments(one).take(missed, 0, lead=2)
        length, left = _dot(gap, gap), _dot(rest, rest)
        # 0 where replay gets all of it back.
        along = _dot(rest, gap) ** 2 / (jnp.where(left > 0, left, 1.0) * length)
        cost = np.sqrt(apart / length)
        return prompt, (cost, np.asarray(along), recovered, loss)

    def _loss(self, state: State) -> np.ndarray:
        """Return the loss of the regions' mean, `[E]`."""
        batch = eval_tokens(self._settings)
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


def _trials_of(
    settings: Settings, schedule: Schedule, make_rule: Callable[[Any], merge.Merge]
) -> Trials:
    """Return trials whose one number is the strength of the merge rule."""
    loss_fn, inner, user_inputs = parts(settings)
    outer = nesterov(settings.outer_lr, 0.9)

    def make(given: trials.Numbers):
        rule = make_rule(given["strength"])
        sync = Sync(schedule=schedule, outer=outer, merge=rule)
        return inner, Method(name=rule.name, sync=sync), user_inputs

    return Trials(loss_fn, make, {"strength": 0.5}, REGIONS)


def parts(settings: Settings) -> tuple[Callable, Any, needs.UserInputs]:
    """Return the loss, the inner optimizer, and what merges may ask of both."""
    config = OptimizerConfig(
        inner_lr=INNER_LR,
        warmup_steps=min(WARMUP_STEPS, settings.steps - 1),
        beta2=0.99,
        final_lr_fraction=1.0,  # A step means the same at all times.
    )
    method = get_method("diloco")
    optimizer, inputs = training_parts(MODEL, method, config, settings.steps)
    return models.make_loss_fn(MODEL), optimizer, inputs


def init_params(settings: Settings) -> models.Params:
    """Return initial parameters by seed, leaves `[E, ...]`."""
    return trials.init_params(MODEL, range(settings.seeds))


def tokens(settings: Settings, seed: int) -> np.ndarray:
    """Return the text of one run, int32 `[steps, R, B, L + 1]`."""
    stream = _text(settings, seed).train_stream()
    with contextlib.closing(stream):
        return np.stack(list(itertools.islice(stream, settings.steps)))


@functools.cache
def eval_tokens(settings: Settings) -> jax.Array:
    """Return the validation text as one batch, int32 `[1, sequences, L + 1]`."""
    num_batches = -(-EVAL_SEQUENCES // settings.batch_per_region)
    batches = list(_text(settings, 0).eval_tokens(num_batches))
    return jnp.asarray(np.concatenate(batches))[None]


def _text(settings: Settings, seed: int):
    config = DataConfig(
        sequence_length=SEQUENCE_LENGTH,
        batch_per_region=settings.batch_per_region,
        seed=seed,
    )
    return load(config, REGIONS)
