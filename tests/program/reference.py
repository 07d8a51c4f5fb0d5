"""NumPy reference of data parallelism, (Streaming) DiLoCo and CoCoDC, from formulas.

It shares no code with the package. Parameters are flat dicts from name to float64
array, one dict a region; a fragment is a list of names. Everything is a loop.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np


def each(fn, *trees):
    return {n: fn(*(tree[n] for tree in trees)) for n in trees[0]}


def zeros(tree):
    return each(np.zeros_like, tree)


def length(tree):
    return math.sqrt(sum((x**2).sum() for x in tree.values()))


# --- Problems -----------------------------------------------------------------


@dataclasses.dataclass
class Quadratic:
    """f(x) = weight (x - target)' A (x - target) / 2, x all parameters end to end.

    `A` couples the fragments; the batch is `(target, weight)`, of one region and step.
    """

    hessian: np.ndarray
    sizes: dict[str, int]

    def _join(self, params):
        return np.concatenate([params[name] for name in self.sizes])

    def _split(self, x):
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        return dict(zip(self.sizes, np.split(x, ends), strict=True))

    def gradient(self, params, batch):
        target, weight = batch
        return self._split(weight * self.hessian @ (self._join(params) - target))

    def hessian_vector(self, vector, batch):
        """H v for a fragment's v, the other fragments standing still."""
        whole = {n: vector.get(n, np.zeros(s)) for n, s in self.sizes.items()}
        product = self._split(batch[1] * self.hessian @ self._join(whole))
        return {name: product[name] for name in vector}


@dataclasses.dataclass
class Mlp:
    """tanh layers and a linear head; f = mean of squares over batch and outputs."""

    num_blocks: int

    def gradient(self, params, batch):
        x, y = batch
        layers = ["embed", *(f"block{i}" for i in range(self.num_blocks))]
        values = [x]
        for name in layers:
            values.append(np.tanh(values[-1] @ params[name]))
        out = values[-1] @ params["head"]
        back = 2 * (out - y) / out.size
        grads = {"head": values[-1].T @ back}
        back = back @ params["head"].T
        for i in reversed(range(len(layers))):
            back = back * (1 - values[i + 1] ** 2)
            grads[layers[i]] = values[i].T @ back
            back = back @ params[layers[i]].T
        return grads


# --- Inner optimizers -----------------------------------------------------------


@dataclasses.dataclass
class Sgd:
    lr: float

    def init(self, params):
        return {}

    def step(self, params, state, grads):
        return each(lambda x, g: x - self.lr * g, params, grads), state


@dataclasses.dataclass
class AdamW:
    lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float

    def init(self, params):
        return {"t": 0, "m": zeros(params), "v": zeros(params)}

    def step(self, params, state, grads):
        t = state["t"] + 1
        m = each(lambda m, g: self.b1 * m + (1 - self.b1) * g, state["m"], grads)
        v = each(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, state["v"], grads)

        def moved(x, m, v):
            size = np.sqrt(v / (1 - self.b2**t)) + self.eps
            step = m / (1 - self.b1**t) / size
            return x - self.lr * (step + self.weight_decay * x)

        return each(moved, params, m, v), {"t": t, "m": m, "v": v}

    def second_moment(self, state, names):
        return {n: state["v"][n] / (1 - self.b2 ** state["t"]) for n in names}


# --- Compensation, sections 4.1 and 4.2 -----------------------------------------
# Each gives Hessian(D) in parameter units per step, before lambda.


@dataclasses.dataclass
class Context:
    """What a curvature may look at besides g and D; `batch` is the last one."""

    sync_interval: int
    tau: int
    lr: float
    second_moment: dict | None
    problem: Quadratic | Mlp
    batch: tuple


def no_curvature(g, d, context):
    return zeros(g)


def isotropic(tau):
    return lambda g, d, context: each(lambda d: d / tau, d)


def outer_product(g, d, context):
    return each(lambda g, d: g**2 * d / context.sync_interval, g, d)


def outer_product_of_gradients(g, d, context):
    """G = g / lr is a gradient; lr G G D is the change of an SGD step."""
    lr, interval = context.lr, context.sync_interval
    return each(lambda g, d: lr * (g / lr) ** 2 * d / interval, g, d)


def _as_long_as(x, curved):
    return np.linalg.norm(x) / (np.linalg.norm(curved) + 1e-8) * curved


def normalized(g, d, context):
    return each(lambda g, d: _as_long_as(g, g**2 * d), g, d)


def as_coded(g, d, context):
    """Section 4.2 line by line, of the undivided progress; then divided by tau."""
    progress = each(lambda g: g * context.tau, g)
    curved = each(lambda p, d: _as_long_as(p, p * p * d / 4e-4), progress, d)
    return each(lambda c: c / context.tau, curved)


def adam_second_moment(g, d, context):
    nu = context.second_moment
    return each(lambda d, nu: context.lr * np.sqrt(nu) * d, d, nu)


def hessian_vector_sgd(g, d, context):
    curved = context.problem.hessian_vector(d, context.batch)
    return each(lambda c: context.lr * c, curved)


def hessian_vector_adam(g, d, context):
    curved = hessian_vector_sgd(g, d, context)
    return each(lambda c, nu: c / (np.sqrt(nu) + 1e-8), curved, context.second_moment)


# --- Methods --------------------------------------------------------------------


@dataclasses.dataclass
class Method:
    """How regions are kept together.

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


@dataclasses.dataclass
class Run:
    """The state of all regions, and what happened."""

    problem: Quadratic | Mlp
    method: Method
    optimizer: Sgd | AdamW
    itemsize: int
    local: list[dict]
    inner: list
    outer: dict
    momentum: dict
    num_bytes: int = 0
    starts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    syncs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    ratios: list[list[float]] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    closest: float = math.inf
    in_flight: list[tuple] = dataclasses.field(default_factory=list)
    rates: dict = dataclasses.field(default_factory=dict)

    def inner_step(self, batches):
        pairs = list(zip(self.local, batches, strict=True))
        grads = [self.problem.gradient(local, batch) for local, batch in pairs]
        if self.method.reduce_gradients:
            mean = each(lambda *g: sum(g) / len(g), *grads)
            grads = [mean] * len(batches)
            self.num_bytes += self.itemsize * sum(x.size for x in mean.values())
        for m, g in enumerate(grads):
            self.local[m], self.inner[m] = self.optimizer.step(
                self.local[m], self.inner[m], g
            )

    def sync(self, t, batches):
        self.land(t, batches)
        p = self.choose(t) if t % self.method.slot == 0 else None
        if p is None:
            return
        names = self.method.fragments[p]
        staged = [{n: local[n].copy() for n in names} for local in self.local]
        outer = {n: self.outer[n] for n in names}
        delta = each(lambda o, *s: np.mean([o - x for x in s], axis=0), outer, *staged)
        self.in_flight.append((p, t, staged, delta))
        self.starts.append((p, t))
        self.num_bytes += self.itemsize * sum(x.size for x in delta.values())
        if self.method.tau == 0:
            self.land(t, batches)

    def land(self, t, batches):
        for flight in [f for f in self.in_flight if f[1] + self.method.tau == t]:
            self.in_flight.remove(flight)
            self.apply(t, batches, *flight)

    def apply(self, t, batches, p, start, staged, delta):
        """Section 0's outer Nesterov, then the merge of section 2, 3 or 4.1."""
        mu, eta = self.method.momentum, self.method.outer_lr
        for n in delta:
            self.momentum[n] = mu * self.momentum[n] + delta[n]
            self.outer[n] = self.outer[n] - eta * (delta[n] + mu * self.momentum[n])
        before = [s for q, s in self.starts if q == p and s < start]
        steps = start - (before[-1] if before else 0)
        norm, size = length(delta), sum(x.size for x in delta.values())
        self.rates[p] = (norm / size / steps, norm / math.sqrt(size) / steps)
        ratios = []
        for m, local in enumerate(self.local):
            new, ratio = self.merged(m, staged[m], batches[m])
            local.update(new)
            ratios.append(ratio)
        self.syncs.append((p, start, t))
        self.ratios.append(ratios)
        self.norms.append(norm)

    def merged(self, m, staged, batch):
        method, tau = self.method, self.method.tau
        local, outer = ({n: x[n] for n in staged} for x in (self.local[m], self.outer))
        if method.merge == "mix":
            a = method.alpha
            return each(lambda x, o: a * x + (1 - a) * o, local, outer), None
        if method.merge == "replace" or tau == 0:
            return each(np.copy, outer), None
        moment = None
        if isinstance(self.optimizer, AdamW):
            moment = self.optimizer.second_moment(self.inner[m], staged)
        context = Context(
            method.interval, tau, self.optimizer.lr, moment, self.problem, batch
        )
        g = each(lambda s, x: (s - x) / tau, staged, local)
        d = each(np.subtract, outer, staged)
        term = each(lambda c: method.strength * c, method.curvature(g, d, context))
        new = each(lambda o, g, c: o - tau * (g + c), outer, g, term)
        return new, length(term) / length(g)

    # Adaptive transmission, section 4.3.

    def choose(self, t):
        method, num_fragments = self.method, len(self.method.fragments)
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
                soonest = min(deadline[p] - t for p in free) // method.slot
                return next(
                    p for p in free if (deadline[p] - t) // method.slot == soonest
                )
        never = [p for p in free if all(q != p for q, _ in self.starts)]
        if never:
            return never[0]
        scores = [self.score(p, t - last[p]) for p in free]
        if len(scores) > 1:
            first, second = sorted(scores)[::-1][:2]
            self.closest = min(self.closest, 1 - second / first)
        return free[int(np.argmax(scores))]

    def score(self, p, age):
        score, names = self.method.score, self.method.fragments[p]
        if score == "pseudo_gradient":
            return self.rates[p][0]
        if score in ("rms", "aged"):
            return self.rates[p][1] * (age if score == "aged" else 1)
        if score == "round_robin":
            return age
        gaps = [
            np.concatenate([(self.outer[n] - x[n]).ravel() for n in names])
            for x in self.local
        ]
        if score in ("gain", "disagreement"):
            shared = self.rates[p][1] * age if score == "disagreement" else 0
            return np.mean([(gap**2).mean() for gap in gaps]) - shared**2
        return sum(np.abs(gap).mean() for gap in gaps) / age


def train(problem, method, optimizer, params, batches, itemsize):
    """Trains on `batches[t][m]`; `itemsize` is the bytes of one number sent."""
    regions = range(len(batches[0]))
    run = Run(
        problem, method, optimizer, itemsize,
        local=[each(np.copy, params) for _ in regions],
        inner=[optimizer.init(params) for _ in regions],
        outer=each(np.copy, params), momentum=zeros(params),
    )  # fmt: skip
    for t, step_batches in enumerate(batches, start=1):
        run.inner_step(step_batches)
        if method.interval:
            run.sync(t, step_batches)
    return run
