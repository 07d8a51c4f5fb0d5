"""Many trials of a small model, trained as one compiled program.

A trial is a run of one method in M regions. Trials differ in seed and in numbers
(learning rates, momentum, strengths), which are inputs of the program:

    trial      scan over T steps of vmap(axis "region") of `cc.synchronized`
    program    vmap over trials; on a CPU one trial after another, without a copy of
               each weight's products for every trial

Everything else (model, method, interval, messages) is part of the program. The state is
donated, and the host reads nothing between scans.

Shapes: E trials, R regions, S streams of data, T steps of a scan.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cocodc_jax as cc
from cocodc_jax import models
from cocodc_jax.core.optimizer import SynchronizedState
from cocodc_jax.engine.region_state import region_drift
from cocodc_jax.run.config.optimizer_config import OptimizerConfig
from cocodc_jax.sync.cutting import cut
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.outer import RegionalOuter
from cocodc_jax.sync.schedules import OneStepStale, traced
from cocodc_jax.sync.schedules.adaptive import Adaptive

PyTree = Any
Numbers = Mapping[str, Any]
# Of the numbers of one trial: inner optimizer, method, and what merges need.
Make = Callable[
    [Numbers], tuple[optax.GradientTransformation, cc.methods.Method, cc.UserInputs]
]
REGION = "region"
# The most steps of a scan; scans have few lengths, so programs are reused.
MOST_STEPS = 64


class Inner(OptimizerConfig):
    """An optimizer whose numbers may be traced, so they are not checked."""

    def __post_init__(self):
        """Check nothing: the numbers of each trial were checked."""

    def learning_rate(
        self, steps: int, method: cc.methods.Method | None = None
    ) -> optax.Schedule:
        """Return the schedule for a peak of 1, times `inner_lr`."""
        at_one = dataclasses.replace(self, inner_lr=1.0)
        of_one = OptimizerConfig.learning_rate(at_one, steps, method)
        return lambda step: self.inner_lr * of_one(step)


class State(NamedTuple):
    """Trials at one step."""

    params: PyTree  # Of the regions, leaves `[E, R, ...]`.
    sync: Any  # A `SynchronizedState`; values equal in all trials have no trial axis.
    # Sum of correction ratios over merges, mean over regions, float32 `[E]`.
    ratios: Any
    merges: Any  # Fragments merged, int32 `[E]`.


class Evaluation(NamedTuple):
    """Losses on held-out batches, float32 `[E]` each."""

    loss: Any  # Of the regions' mean.
    loss_outer: Any  # Of the outer parameters.
    drift: Any  # See `region_drift`.


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
    """Compiled parts of trials of one method."""

    loss_fn: Callable  # Of one region, `(params, batch, key) -> (loss, aux)`.
    make: Make  # Of a trial's numbers; structure must not depend on their values.
    example: Mapping[str, float]  # Numbers of one trial, for shapes and checks.
    num_regions: int  # M.
    # Whether trials are computed one after another.
    in_turn: bool = dataclasses.field(
        default_factory=lambda: jax.default_backend() == "cpu"
    )

    @functools.cached_property
    def method(self) -> cc.methods.Method:
        """The method with the example's numbers."""
        return self.make(dict(self.example))[1]

    @functools.cached_property
    def init(self) -> Callable[[PyTree, Numbers], State]:
        """`init(params, numbers)`: leaves `[E, ...]`; before the first step."""

        def one(params: PyTree, numbers: Numbers) -> State:
            axes = cc.sync_axes(self.method)
            num = self.num_regions
            sync = jax.vmap(self.transform(numbers).init, None, axes, axis_size=num)
            every = jax.tree.map(lambda x: jnp.stack([x] * num), params)
            none = jnp.zeros(())
            return State(every, sync(params), none, none.astype(jnp.int32))

        return jax.jit(jax.vmap(one, out_axes=self._axes))

    @functools.cached_property
    def advance(self) -> Callable[..., tuple[State, jax.Array]]:
        """`advance(state, numbers, tokens, stream)`: train T steps.

        The state is donated. Tokens are `[T, S, R, ...]`; stream, int32 `[E]`, says
        which of S a trial reads. Returns the state and losses, float32 `[E, T, R]`.
        """

        def every(state: State, numbers: Numbers, tokens: PyTree, stream: jax.Array):
            def one(state: State, numbers: Numbers, stream: jax.Array):
                def step(state: State, batches: PyTree):
                    of_trial = jax.tree.map(lambda x: x[stream], batches)
                    return self._step(state, numbers, of_trial)

                return jax.lax.scan(step, state, tokens)

            mapped = self._map(one, (self._axes, 0, 0), (self._axes, 0))
            return mapped(state, numbers, stream)

        return jax.jit(every, donate_argnums=0)

    @functools.cached_property
    def evaluate(self) -> Callable[[State, PyTree], Evaluation]:
        """`evaluate(state, batches)`: leaves `[N, ...]`, the same for all trials."""

        def every(state: State, batches: PyTree) -> Evaluation:
            def loss(params: PyTree) -> jax.Array:
                def of_batch(batch: PyTree) -> jax.Array:
                    return self.loss_fn(params, batch, jax.random.key(0))[0]

                return jax.lax.map(of_batch, batches).astype(jnp.float32).mean()

            def one(state: State) -> Evaluation:
                mean = jax.tree.map(lambda x: x.mean(0), state.params)
                both = jax.tree.map(
                    lambda x, outer: jnp.stack([x, outer.astype(x.dtype)]),
                    mean,
                    self._outer(state, mean),
                )
                losses = jax.lax.map(loss, both)
                return Evaluation(losses[0], losses[1], region_drift(state.params))

            return self._map(one, (self._axes,))(state)

        return jax.jit(every)

    def _map(self, one: Callable, in_axes: Any, out_axes: Any = 0) -> Callable:
        """Map a function of one trial over all."""
        if self.in_turn:
            return lambda *every: jax.lax.map(lambda trial: one(*trial), every)
        return jax.vmap(one, in_axes, out_axes)

    @functools.cached_property
    def _axes(self) -> State:
        """Axes of trials. Equal predicates without an axis stay branches."""
        schedule = self.method.schedule
        every = SynchronizedState(*[0] * len(SynchronizedState._fields))
        if self.in_turn or isinstance(schedule, Adaptive):
            return State(0, every, 0, 0)
        shared: dict[str, Any] = {"step": None, "counts": None, "message_bytes": None}
        if schedule is not None:
            shared["times"] = traced.Times(None, None, None, None, norm=0)
        return State(0, every._replace(**shared), 0, 0)

    def transform(self, numbers: Numbers) -> optax.GradientTransformationExtraArgs:
        """Return a trial's optimizer with its method."""
        inner, method, user_inputs = self.make(numbers)
        return cc.synchronized(
            inner,
            method,
            axis_name=REGION,
            num_regions=self.num_regions,
            user_inputs=user_inputs,
        )

    def _step(self, state: State, numbers: Numbers, batches: PyTree):
        """Take one step of all regions of one trial; return losses `[R]` too."""
        transform = self.transform(numbers)
        axes = cc.sync_axes(self.method)

        def region(params: PyTree, sync: Any, batch: PyTree):
            def loss_of(params: PyTree) -> jax.Array:
                return self.loss_fn(params, batch, jax.random.key(0))[0]

            loss, gradient = jax.value_and_grad(loss_of)(params)
            updates, sync = transform.update(
                gradient, sync, params, value_fn=loss_of, batch=batch
            )
            return optax.apply_updates(params, updates), sync, loss

        mapped = jax.vmap(region, (0, axes, 0), (0, axes, 0), axis_name=REGION)
        params, sync, losses = mapped(state.params, state.sync, batches)
        merges = self._merges(state.sync, sync)
        ratio = jnp.where(merges > 0, sync.correction_ratio.mean(), 0.0)

        return State(params, sync, state.ratios + ratio, state.merges + merges), losses

    def _merges(self, before: Any, after: Any) -> jax.Array:
        """Return how many fragments a step has merged."""
        schedule = self.method.schedule
        if schedule is None:
            return jnp.zeros((), jnp.int32)
        if schedule.delay_steps and not isinstance(schedule, OneStepStale):
            return traced.arriving(before.times, after.step).sum(dtype=jnp.int32)
        return (after.counts - before.counts)[: schedule.num_fragments].sum()

    def _outer(self, state: State, mean: PyTree) -> PyTree:
        """Return one trial's outer parameters; the mean if they are regional."""
        sync = self.method.sync
        if sync is None:
            return mean
        parts = state.sync.outer
        if isinstance(sync.outer, RegionalOuter):
            parts = jax.tree.map(lambda x: x.mean(0), parts)
        return self.fragments(mean).join(parts)

    def fragments(self, params: PyTree) -> Fragments:
        """Return how one region's parameters are cut."""
        sync = self.method.sync
        strategy = sync.fragment_strategy if sync else "strided"
        return cut(params, self.method.num_fragments, strategy)


@functools.partial(jax.jit, static_argnums=0)
def _init(model: models.TransformerConfig, keys: jax.Array) -> models.Params:
    return jax.vmap(functools.partial(models.init_params, model))(keys)


def init_params(model: models.TransformerConfig, seeds: Sequence[int]) -> models.Params:
    """Return initial parameters by seed, `[E, ...]`, equal to those of single runs."""
    keys = [jax.random.fold_in(jax.random.key(seed), 0) for seed in seeds]
    return _init(model, jnp.stack(keys))


def _stacked(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


class StoppedError(Exception):
    """Training was asked to end before its last step."""


class Outcome(NamedTuple):
    """The results of trials."""

    losses: np.ndarray  # Of each step and region, float32 `[E, T, R]`.
    steps: list[int]  # At which they were evaluated.
    evaluations: list[Evaluation]  # Of each of these.
    # Messages that one region of each trial had sent at each of these, int64 `[E, N]`:
    # by fragment and moment, or all of an exchange at every step.
    counts: list[np.ndarray]
    message_bytes: np.ndarray  # Of each message, int64 `[N]`.
    ratios: np.ndarray  # Sum of correction ratios over merges, float32 `[E]`.
    merges: np.ndarray  # Fragments merged, int32 `[E]`.
    # Of the regions after the last step, leaves `[E, R, ...]`, on the device.
    params: PyTree
    num_fragments: int  # K; 0 if parameters are never exchanged.

    @property
    def bytes_sent(self) -> list[np.ndarray]:
        """Bytes that one region had sent at each evaluation, int64 `[E]`."""
        return [counts @ self.message_bytes for counts in self.counts]

    def fragment_bytes(self, trial: int) -> dict[int, float]:
        """Mean bytes of a message of each fragment that was sent, with its moments."""
        counts = self.counts[-1][trial]
        num = self.num_fragments or 1
        moments = counts[num:] @ self.message_bytes[num:] / max(counts[:num].sum(), 1)
        sizes = self.message_bytes[:num] + moments
        return {k: float(x) for k, x in enumerate(sizes) if counts[k] and x}


def train(
    trials: Trials,
    params: PyTree,
    numbers: Mapping[str, Sequence[float]],
    streams: Sequence[Iterator[Any]],
    stream: Sequence[int],
    num_steps: int,
    eval_batches: PyTree,
    eval_every: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train trials to their last step."""
    arrays = {name: jnp.asarray(x, float) for name, x in numbers.items()}
    which = jnp.asarray(stream, jnp.int32)
    eval_batches = jax.tree.map(jnp.asarray, eval_batches)
    state = trials.init(params, arrays)

    step = 0
    losses = []
    steps = []
    evaluations = []
    counts = []
    while step < num_steps:
        next_eval = (step // (eval_every or num_steps) + 1) * (eval_every or num_steps)
        end = min(step + MOST_STEPS, next_eval, num_steps)
        # Read while the devices are busy, but no further ahead than the next scan.
        batches = [_stacked([next(x) for x in streams]) for _ in range(step, end)]
        tokens = _stacked(batches)
        jax.block_until_ready(losses[-2:-1])
        state, of_steps = trials.advance(state, arrays, tokens, which)
        losses.append(of_steps)

        step = end
        if step in (next_eval, num_steps):
            steps.append(step)
            evaluations.append(trials.evaluate(state, eval_batches))
            counts.append(jnp.copy(state.sync.counts))  # The state is donated.

        if step < num_steps and should_stop():
            raise StoppedError(f"{len(stream)} trials at step {step}")

    sizes = np.asarray(state.sync.message_bytes).astype(np.int64)
    sizes = sizes.reshape(-1, sizes.shape[-1])[0]  # Equal in all trials.
    method = trials.method
    shape = (len(stream), len(sizes))

    return Outcome(
        losses=np.concatenate([np.asarray(x) for x in losses], axis=1),
        steps=steps,
        evaluations=[
            jax.tree.map(np.asarray, evaluation) for evaluation in evaluations
        ],
        counts=[np.broadcast_to(np.asarray(x).astype(np.int64), shape) for x in counts],
        message_bytes=sizes,
        ratios=np.asarray(state.ratios),
        merges=np.asarray(state.merges),
        params=state.params,
        num_fragments=method.num_fragments if method.sync else 0,
    )
