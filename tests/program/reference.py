"""NumPy reference of data parallelism, (Streaming) DiLoCo and CoCoDC, from formulas.

It shares no code with the package. A model is one float64 vector `[N]`, its tensors end
to end; those of all regions are the rows of a matrix `[R, N]`. A fragment's vector
has the same length, and is 0 elsewhere.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tests.program.family_reference import Momenta, Nesterov


@dataclasses.dataclass
class Quadratic:
    """f(x) = weight (x - target)' A (x - target) / 2, of tensors with these shapes.

    `A` couples the fragments; the batch is `(target, weight)`, of one region and step.
    """

    shapes: dict[str, tuple]
    hessian: np.ndarray

    def gradient(self, x, batch):
        target, weight = batch
        return weight * self.hessian @ (x - target)

    def hessian_vector(self, vector, batch):
        return batch[1] * self.hessian @ vector

    def split(self, x):
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(
            self.shapes.items(), np.split(x, np.cumsum(sizes)[:-1]), strict=True
        )
        return {n: part.reshape(shape) for (n, shape), part in parts}

    def join(self, tensors):
        return np.concatenate([np.ravel(tensors[n]) for n in self.shapes])

    def is_of(self, names):
        """Which entries are of these tensors."""
        return self.join({n: np.full(s, n in names) for n, s in self.shapes.items()})

    def sums(self, x):
        """At each entry the sum of its tensor, of every region."""
        tensors = [self.split(local).items() for local in x]
        return np.array(
            [self.join({n: np.full(p.shape, p.sum()) for n, p in t}) for t in tensors]
        )

    def norms(self, x):
        return np.sqrt(self.sums(x**2))


@dataclasses.dataclass
class Sgd:
    lr: float

    def step(self, x, grads):
        return x - self.lr * grads


# --- Compensation, sections 4.1 and 4.2 -----------------------------------------
# Each gives Hessian(D) in parameter units per step, before lambda.


@dataclasses.dataclass
class Context:
    """Inputs of a curvature besides g and D.

    `batches` are the last ones; `path` is the models at the start, after tau // 2 steps
    and now.
    """

    sync_interval: int
    tau: int
    lr: float
    second_moment: np.ndarray | None
    problem: Quadratic
    batches: list
    path: tuple

    def hessian_vector(self, d):
        pairs = zip(d, self.batches, strict=True)
        return np.array([self.problem.hessian_vector(*pair) for pair in pairs])


def no_curvature(g, d, context):
    return 0 * g


def isotropic(tau):
    return lambda g, d, context: d / tau


def outer_product(g, d, context):
    return g**2 * d / context.sync_interval


def outer_product_of_gradients(g, d, context):
    """G = g / lr is a gradient; lr G G D is the change of an SGD step."""
    return context.lr * (g / context.lr) ** 2 * d / context.sync_interval


def normalized(g, d, context):
    curved = g**2 * d
    norms = context.problem.norms
    return norms(g) / (norms(curved) + 1e-8) * curved


def as_coded(g, d, context):
    """Section 4.2 line by line, of the undivided progress; then divided by tau."""
    progress = g * context.tau
    norms = context.problem.norms
    c = progress * progress * d / 4e-4
    return norms(progress) / (norms(c) + 1e-8) * c / context.tau


def secant(g, d, context):
    """Isotropic, weighted for each tensor by how well it predicts the progress."""
    staged, midway, local = context.path
    half = context.tau // 2
    tau = context.tau
    sums = context.problem.sums
    change = (midway - local) / (tau - half) - (staged - midway) / half
    predicted = (midway - staged) / tau
    fitted = sums(change * predicted) / sums(predicted**2)
    return np.clip(fitted, 0, 1) * d / tau


def adam_second_moment(g, d, context):
    return context.lr * np.sqrt(context.second_moment) * d


def hessian_vector_sgd(g, d, context):
    """H d for a fragment's d, the other fragments standing still."""
    return context.lr * context.hessian_vector(d)


def hessian_vector_adam(g, d, context):
    curved = context.hessian_vector(d)
    return context.lr * curved / (np.sqrt(context.second_moment) + 1e-8)


# --- Methods --------------------------------------------------------------------


@dataclasses.dataclass
class Method:
    """A schedule and a merge.

    `fragments` lists the names of each; `slot` is h; `score` None is the fixed round.
    `merge` is "replace", "mix" or "compensate".
    """

    fragments: list[list[str]]
    interval: int = 0
    slot: int = 0
    tau: int = 0
    score: str | None = None
    merge: str = "replace"
    alpha: float = 0.0
    curvature: Callable = no_curvature
    strength: float = 0.0
    outer_lr: float = 1.0
    momentum: float = 0.0
    reduce_gradients: bool = False


class Run:
    """Trains on `batches[t][m]`; `itemsize` is the bytes of one number sent."""

    def __init__(self, problem, method, optimizer, params, batches, itemsize):
        self.problem = problem
        self.method = method
        self.optimizer = optimizer
        self.is_of = [problem.is_of(names) for names in method.fragments]
        self.local = np.tile(params, (len(batches[0]), 1))
        self.outer = params
        self.nesterov = Nesterov(method.outer_lr, method.momentum)

        self.num_bytes = 0
        self.closest = math.inf
        self.starts = []
        self.syncs = []
        self.ratios = []
        self.norms = []
        self.in_flight = []
        self.rates = {}
        self.history = {}

        for t, step_batches in enumerate(batches, start=1):
            pairs = zip(self.local, step_batches, strict=True)
            grads = np.array([problem.gradient(*pair) for pair in pairs])
            if method.reduce_gradients:
                grads[:] = grads.mean(0)
                self.num_bytes += itemsize * params.size

            self.local = optimizer.step(self.local, grads)
            if method.interval:
                self._sync(step_batches, t, itemsize)

    def _sync(self, batches, t, itemsize):
        self._land(batches, t)
        self.history[t] = self.local
        p = self._choose(t) if t % self.method.slot == 0 else None
        if p is None:
            return

        delta = (self.outer - self.local).mean(0) * self.is_of[p]
        self.in_flight.append((p, t, delta))
        self.starts.append((p, t))
        self.num_bytes += itemsize * self.is_of[p].sum()

        if self.method.tau == 0:
            self._land(batches, t)

    def _land(self, batches, t):
        """Section 0's outer Nesterov, then the merge of section 2, 3 or 4.1."""
        for flight in [f for f in self.in_flight if f[1] + self.method.tau == t]:
            self.in_flight.remove(flight)
            p, start, delta = flight
            at = self.is_of[p]
            size = self.is_of[p].sum()
            self.outer = self.nesterov.step(self.outer, delta[at], at)

            norm = np.linalg.norm(delta)
            before = [s for q, s in self.starts if q == p and s < start]
            steps = start - (before[-1] if before else 0)
            self.rates[p] = (norm / size / steps, norm / math.sqrt(size) / steps)

            merged, ratios = self._merged(start, batches, at)
            self.local = np.where(at, merged, self.local)

            self.syncs.append((p, start, t))
            self.ratios.append(ratios)
            self.norms.append(norm)

    def _merged(self, start, batches, at):
        method = self.method
        tau = self.method.tau
        local = self.local
        outer = self.outer
        if method.merge == "mix":
            return method.alpha * local + (1 - method.alpha) * outer, None
        if method.merge == "replace" or tau == 0:
            return outer, None

        is_adam = isinstance(self.optimizer, Momenta)
        moment = self.optimizer.second_moment() if is_adam else None
        staged = self.history[start]
        path = (staged, self.history[start + tau // 2], local)
        context = Context(
            method.interval, tau, self.optimizer.lr, moment, self.problem, batches, path
        )

        g = (staged - local) / tau * at
        d = (outer - staged) * at
        term = method.strength * method.curvature(g, d, context) * at
        ratios = np.linalg.norm(term, axis=1) / np.linalg.norm(g, axis=1)
        return outer - tau * (g + term), ratios

    # --- Adaptive transmission, section 4.3 ---

    def _choose(self, t):
        method = self.method
        num_fragments = len(self.method.fragments)
        away = [f[0] for f in self.in_flight]
        free = [p for p in range(num_fragments) if p not in away]
        if method.score is None:
            p = t // method.slot % num_fragments
            return p if p in free else None

        if not free:
            return None
        last = {p: 0 for p in range(num_fragments)} | {p: s for p, s in self.starts}
        deadline = {p: last[p] + method.interval for p in last}
        for j in range(method.interval + 1):
            # Due within j slots after this one: the slot after those is too late.
            due = [p for p in deadline if t + (j + 1) * method.slot > deadline[p]]
            if len(due) > j:
                slots = {p: (deadline[p] - t) // method.slot for p in free}
                return min(free, key=slots.get)

        never = [p for p in free if all(q != p for q, _ in self.starts)]
        if never:
            return never[0]
        scores = [self._score(p, t - last[p]) for p in free]
        if len(scores) > 1:
            first, second = sorted(scores)[::-1][:2]
            self.closest = min(self.closest, 1 - second / first)
        return free[int(np.argmax(scores))]

    def _score(self, p, age):
        score = self.method.score
        if score == "pseudo_gradient":
            return self.rates[p][0]
        if score in ("rms", "aged"):
            return self.rates[p][1] * (age if score == "aged" else 1)
        if score == "round_robin":
            return age

        gaps = (self.outer - self.local)[:, self.is_of[p]]
        if score in ("gain", "disagreement"):
            shared = self.rates[p][1] * age if score == "disagreement" else 0
            return (gaps**2).mean() - shared**2
        return np.abs(gaps).mean(1).sum() / age
