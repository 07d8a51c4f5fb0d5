"""Asynchronous SGD with a parameter server: stale, compensated and fresh gradients.

    python -m experiments.studies.async_sgd

Worker i takes i + 1 units of time for a gradient. Then the server applies it to its
parameters w, which others have changed since the worker read them (w_stale), and the
worker reads w again. With g = gradient(w_stale), on the batch of this update,

    stale     w <- w - eta g
    constant  w <- w - eta (g + lambda g g (w - w_stale))                 DC-ASGD-c
    adaptive  the same with lambda_0 / sqrt(mean square of g)             DC-ASGD-a
    exact     w <- w - eta (g + Hessian(w_stale) (w - w_stale))
    fresh     w <- w - eta gradient(w), without any delay

Prints the last loss of each rule's own run. Also prints the relative error of each
rule's gradient, ||gradient - fresh|| / ||fresh||, at the points of the stale run, so
that all rules are compared on the same gradients.

Source: DC-ASGD (arXiv 1609.08326, equations 10 and 14). The constant form was read from
the authors' code. The adaptive form's defaults are from memory, unchecked.
"""

import dataclasses
import functools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from cocodc_jax.run import flags
from cocodc_jax.run.leaves import attribute_notes
from cocodc_jax.transforms import dc_asgd
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.numerics import check_rate, safe_norm

from .. import program
from ..sweeps.cells import Interval

FEATURES, HIDDEN, CLASSES, POOL = 16, 32, 8, 4096


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes of the example.

    Attributes:
      updates: gradients that the server applies.
      workers: W; worker i takes i + 1 units of time.
      batch: examples in a gradient.
      learning_rate: eta.
      constant_strength: lambda of the constant form.
      adaptive_strength: lambda_0 of the adaptive form.
      seeds: runs of each rule: 0, 1, ...
    """

    updates: int = 2000
    workers: int = 8
    batch: int = 32
    learning_rate: float = 0.5
    constant_strength: float = 0.04
    adaptive_strength: float = 2.0
    seeds: int = 5

    def __post_init__(self):
        """Check the numbers."""
        for name in ("updates", "workers", "batch", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_rate("learning_rate", self.learning_rate)
        for name in ("constant_strength", "adaptive_strength"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be finite")


def rules(setup: Setup) -> dict[str, optax.GradientTransformationExtraArgs]:
    """Return the transform of each rule but "fresh", applied to gradients first."""
    return {
        "stale": delay_compensation("none"),
        "constant": delay_compensation("outer_product", setup.constant_strength),
        "adaptive": dc_asgd.adaptive_delay_compensation(setup.adaptive_strength),
        "exact": delay_compensation("hessian_vector", 1.0),
    }


def arrivals(num_workers: int, num_updates: int) -> np.ndarray:
    """Return the worker whose gradient each update applies, int32 `[num_updates]`.

    >>> print(arrivals(3, 8))
    [0 0 1 0 2 0 1 0]
    """
    # The fastest worker delivers at most all gradients.
    times = np.arange(1, num_updates + 1)[:, None] * np.arange(1, num_workers + 1)
    workers = np.broadcast_to(np.arange(num_workers), times.shape)
    order = np.lexsort((workers.ravel(), times.ravel()))
    return workers.ravel()[order][:num_updates].astype(np.int32)


class Server(NamedTuple):
    """The server's state."""

    params: Any  # w
    read: Any  # w as each worker last read it, leaves `[W, ...]`.
    states: Any


class Problem(NamedTuple):
    """Labels of a random network, with a tenth of them drawn at random."""

    params: Any
    x: jax.Array  # float32 `[POOL, FEATURES]`.
    y: jax.Array  # int32 `[POOL]`.
    key: jax.Array


def make_problem(seed: int | jax.Array) -> Problem:
    """Return a small classification problem, a different one for every seed."""
    keys = jax.random.split(jax.random.key(seed), 6)
    x = jax.random.normal(keys[0], (POOL, FEATURES))
    labels = jnp.argmax(_logits(_init_params(keys[1]), x), axis=-1)
    noise = jax.random.randint(keys[2], (POOL,), 0, CLASSES)
    is_noise = jax.random.bernoulli(keys[3], 0.1, (POOL,))
    y = jnp.where(is_noise, noise, labels)
    return Problem(_init_params(keys[4]), x, y, keys[5])


def _init_params(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "head": jax.random.normal(second, (HIDDEN, CLASSES)) / HIDDEN**0.5,
    }


def _logits(params, x):
    return jnp.tanh(x @ params["hidden"]) @ params["head"]


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(_logits(params, x), y)
    return losses.mean()


def names(setup: Setup) -> tuple[str, ...]:
    """Return the names of the compared gradients, in the order of the table."""
    return (*rules(setup), "fresh")


def simulate(
    setup: Setup, chosen_rule: int | jax.Array, seed: int | jax.Array
) -> tuple[Any, Any]:
    """Run one rule, and measure all rules along its path."""
    problem, table = make_problem(seed), rules(setup)

    def update(server: Server, event):
        worker, key = event
        chosen = jax.random.randint(key, (setup.batch,), 0, POOL)
        gradient = jax.grad(
            functools.partial(loss_fn, x=problem.x[chosen], y=problem.y[chosen])
        )
        stale_params = jax.tree.map(lambda x: x[worker], server.read)
        stale, fresh = gradient(stale_params), gradient(server.params)

        guesses, states = {}, {}
        for name, rule in table.items():
            guesses[name], states[name] = rule.update(
                stale,
                server.states[name],
                server.params,
                stale_params=stale_params,
                gradient_fn=gradient,
            )
        guesses["fresh"] = fresh
        used = jax.tree.map(lambda *g: jnp.stack(g)[chosen_rule], *guesses.values())
        params = jax.tree.map(
            lambda w, g: w - setup.learning_rate * g, server.params, used
        )
        read = jax.tree.map(lambda r, w: r.at[worker].set(w), server.read, params)
        errors = {name: _distance(guess, fresh) for name, guess in guesses.items()}
        return Server(params, read, states), errors

    states = {name: rule.init(problem.params) for name, rule in table.items()}
    read = jax.tree.map(lambda w: jnp.stack([w] * setup.workers), problem.params)
    events = (
        jnp.asarray(arrivals(setup.workers, setup.updates)),
        jax.random.split(problem.key, setup.updates),
    )
    server, errors = jax.lax.scan(update, Server(problem.params, read, states), events)
    loss = loss_fn(server.params, problem.x, problem.y)
    return loss, jax.tree.map(jnp.mean, errors)


def _distance(guess, fresh):
    difference = jax.tree.map(jnp.subtract, guess, fresh)
    return safe_norm(difference) / safe_norm(fresh)


def measure(setup: Setup) -> dict[str, tuple[list[float], list[float]]]:
    """Return each rule's last losses and relative errors, by seed."""
    each_seed = jax.vmap(functools.partial(simulate, setup), in_axes=(None, 0))
    each_rule = jax.jit(jax.vmap(each_seed, in_axes=(0, None)))
    losses, errors = each_rule(jnp.arange(len(names(setup))), jnp.arange(setup.seeds))
    stale = names(setup).index("stale")
    return {
        name: (losses[index].tolist(), errors[name][stale].tolist())
        for index, name in enumerate(names(setup))
    }


def main() -> None:
    """Read the flags, run all rules, print the table."""
    fields = dataclasses.fields(Setup)
    with flags.usage_errors():
        setup = Setup(**{field.name: flags.value(field.name) for field in fields})
    begin_s = time.perf_counter()
    measured = measure(setup)
    seconds = time.perf_counter() - begin_s
    stale, fresh = (statistics.fmean(measured[name][0]) for name in ("stale", "fresh"))
    rows = []
    for name, (losses, errors) in measured.items():
        # Not finite if one diverged, or without a gap, as with a single worker.
        gap, own = stale - fresh, stale - statistics.fmean(losses)
        closed = f"{100 * own / gap:.0f} %" if gap and math.isfinite(own / gap) else "-"
        rows.append((name, _over_seeds(losses), closed, _over_seeds(errors)))
    heads = ("gradient", "final loss", "of the gap closed", "error to fresh")
    console = Console()
    console.print(program.table(heads, rows, is_ruled=True))
    seeds = f"{setup.seeds} seeds, mean and 95 % interval"
    console.print(
        f"{seeds if setup.seeds > 1 else 'One seed'}; {setup.workers} workers, "
        f"{setup.updates} updates, {mean_delay(setup):.1f} updates between reading and "
        f"applying on average. {seconds:.0f} s.",
        highlight=False,
    )


def _over_seeds(values: list[float]) -> str:
    if not all(map(math.isfinite, values)):
        return "diverged"
    return f"{Interval.of(values):.4f}".replace("± ", "+-")


def mean_delay(setup: Setup) -> float:
    """Return the mean updates by others while a gradient was computed."""
    last: dict[int, int] = {}
    delays = []
    for step, worker in enumerate(arrivals(setup.workers, setup.updates).tolist()):
        delays.append(step - last.get(worker, 0))
        last[worker] = step + 1
    return statistics.fmean(delays)


def define() -> None:
    """Define the program's flags."""
    notes = attribute_notes(Setup)
    for field in dataclasses.fields(Setup):
        default = field.default
        flags.define_one(type(default), field.name, default, notes[field.name])


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
