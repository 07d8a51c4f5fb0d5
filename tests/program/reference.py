"""NumPy reference of data parallelism, (Streaming) DiLoCo and CoCoDC, from formulas.

It shares no code with the package. Parameters are flat dicts from name to float64
array, one dict a region; a fragment is a list of names. Everything is a loop.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

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
        return {n: params[n] - self.lr * grads[n] for n in params}, state


@dataclasses.dataclass
class AdamW:
    lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float

    def init(self, params):
        return {"t": 0, "m": _zeros(params), "v": _zeros(params)}

    def step(self, params, state, grads):
        t = state["t"] + 1
        m, v, new = {}, {}, {}
        for n, g in grads.items():
            m[n] = self.b1 * state["m"][n] + (1 - self.b1) * g
            v[n] = self.b2 * state["v"][n] + (1 - self.b2) * g**2
            step = m[n] / (1 - self.b1**t)
            step = step / (np.sqrt(v[n] / (1 - self.b2**t)) + self.eps)
            new[n] = params[n] - self.lr * (step + self.weight_decay * params[n])
        return new, {"t": t, "m": m, "v": v}

    def second_moment(self, state, names):
        return {n: state["v"][n] / (1 - self.b2 ** state["t"]) for n in names}


def _zeros(params):
    return {n: np.zeros_like(x) for n, x in params.items()}


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
    return _zeros(g)


def isotropic(tau):
    return lambda g, d, context: {n: d[n] / tau for n in g}


def outer_product(g, d, context):
    return {n: g[n] ** 2 * d[n] / context.sync_interval for n in g}


def outer_product_of_gradients(g, d, context):
    """G = g / lr is a gradient; lr G G D is the change of an SGD step."""
    lr, interval = context.lr, context.sync_interval
    return {n: lr * (g[n] / lr) ** 2 * d[n] / interval for n in g}


def normalized(g, d, context):
    curved = {n: g[n] ** 2 * d[n] for n in g}
    length = np.linalg.norm
    return {n: length(g[n]) / (length(curved[n]) + 1e-8) * curved[n] for n in g}


def as_coded(g, d, context):
    """Section 4.2 line by line, of the undivided progress; then divided by tau."""
    found = {}
    for n in g:
        progress = g[n] * context.tau
        c = progress * progress * d[n] / 4e-4
        weight = np.linalg.norm(progress) / (np.linalg.norm(c) + 1e-8)
        found[n] = weight * c / context.tau
    return found


def adam_second_moment(g, d, context):
    return {n: context.lr * np.sqrt(context.second_moment[n]) * d[n] for n in g}


def hessian_vector_sgd(g, d, context):
    curved = context.problem.hessian_vector(d, context.batch)
    return {n: context.lr * curved[n] for n in g}


def hessian_vector_adam(g, d, context):
    nu = context.second_moment
    curved = context.problem.hessian_vector(d, context.batch)
    return {n: context.lr * curved[n] / (np.sqrt(nu[n]) + 1e-8) for n in g}


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


def train(problem, method, optimizer, params, batches, itemsize):
    """Trains on `batches[t][m]`; `itemsize` is the bytes of one number sent."""
    num_regions = len(batches[0])
    run = Run(
        local=[{n: x.copy() for n, x in params.items()} for _ in range(num_regions)],
        inner=[optimizer.init(params) for _ in range(num_regions)],
        outer={n: x.copy() for n, x in params.items()},
        momentum=_zeros(params),
    )
    for t, step_batches in enumerate(batches, start=1):
        _inner_step(run, problem, method, optimizer, step_batches, itemsize)
        if method.interval:
            _sync(run, problem, method, optimizer, step_batches, t, itemsize)
    return run


def _inner_step(run, problem, method, optimizer, batches, itemsize):
    num_regions = len(batches)
    grads = [problem.gradient(run.local[m], batches[m]) for m in range(num_regions)]
    if method.reduce_gradients:
        mean = {n: sum(g[n] for g in grads) / num_regions for n in grads[0]}
        grads = [mean] * num_regions
        run.num_bytes += itemsize * sum(x.size for x in mean.values())
    for m in range(num_regions):
        run.local[m], run.inner[m] = optimizer.step(
            run.local[m], run.inner[m], grads[m]
        )


def _sync(run, problem, method, optimizer, batches, t, itemsize):
    def land():
        for flight in [f for f in run.in_flight if f[1] + method.tau == t]:
            run.in_flight.remove(flight)
            _apply(run, problem, method, optimizer, batches, t, *flight)

    land()
    p = _choose(run, method, t) if t % method.slot == 0 else None
    if p is None:
        return
    names = method.fragments[p]
    staged = [{n: local[n].copy() for n in names} for local in run.local]
    delta = {n: np.mean([run.outer[n] - s[n] for s in staged], axis=0) for n in names}
    run.in_flight.append((p, t, staged, delta))
    run.starts.append((p, t))
    run.num_bytes += itemsize * sum(x.size for x in delta.values())
    if method.tau == 0:
        land()


def _apply(run, problem, method, optimizer, batches, t, p, start, staged, delta):
    """Section 0's outer Nesterov, then the merge of section 2, 3 or 4.1."""
    mu, eta = method.momentum, method.outer_lr
    for n in delta:
        run.momentum[n] = mu * run.momentum[n] + delta[n]
        run.outer[n] = run.outer[n] - eta * (delta[n] + mu * run.momentum[n])
    norm = math.sqrt(sum((x**2).sum() for x in delta.values()))
    before = [s for q, s in run.starts if q == p and s < start]
    steps = start - (before[-1] if before else 0)
    size = sum(x.size for x in delta.values())
    run.rates[p] = (norm / size / steps, norm / math.sqrt(size) / steps)
    ratios = []
    for m, local in enumerate(run.local):
        new, ratio = _merged(run, problem, method, optimizer, m, staged[m], batches[m])
        local.update(new)
        ratios.append(ratio)
    run.syncs.append((p, start, t))
    run.ratios.append(ratios)
    run.norms.append(norm)


def _merged(run, problem, method, optimizer, m, staged, batch):
    local, outer, tau = run.local[m], run.outer, method.tau
    if method.merge == "mix":
        a = method.alpha
        return {n: a * local[n] + (1 - a) * outer[n] for n in staged}, None
    if method.merge == "replace" or tau == 0:
        return {n: outer[n].copy() for n in staged}, None
    moment = None
    if isinstance(optimizer, AdamW):
        moment = optimizer.second_moment(run.inner[m], staged)
    context = Context(method.interval, tau, optimizer.lr, moment, problem, batch)
    g = {n: (staged[n] - local[n]) / tau for n in staged}
    d = {n: outer[n] - staged[n] for n in staged}
    curved = method.curvature(g, d, context)
    term = {n: method.strength * curved[n] for n in g}
    length = {
        name: math.sqrt(sum((x**2).sum() for x in tree.values()))
        for name, tree in (("term", term), ("g", g))
    }
    new = {n: outer[n] - tau * (g[n] + term[n]) for n in g}
    return new, length["term"] / length["g"]


# --- Adaptive transmission, section 4.3 -----------------------------------------


def _choose(run, method, t):
    num_fragments = len(method.fragments)
    away = [f[0] for f in run.in_flight]
    free = [p for p in range(num_fragments) if p not in away]
    if method.score is None:
        p = t // method.slot % num_fragments
        return p if p in free else None
    if not free:
        return None
    last = {p: 0 for p in range(num_fragments)} | {p: s for p, s in run.starts}
    deadline = {p: last[p] + method.interval for p in last}
    for j in range(method.interval + 1):
        # Due within j slots after this one: the slot after those is too late.
        due = [p for p in deadline if t + (j + 1) * method.slot > deadline[p]]
        if len(due) > j:
            soonest = min(deadline[p] - t for p in free) // method.slot
            return next(p for p in free if (deadline[p] - t) // method.slot == soonest)
    never = [p for p in free if all(q != p for q, _ in run.starts)]
    if never:
        return never[0]
    scores = [_score(run, method, p, t - last[p]) for p in free]
    if len(scores) > 1:
        first, second = sorted(scores)[::-1][:2]
        run.closest = min(run.closest, 1 - second / first)
    return free[int(np.argmax(scores))]


def _score(run, method, p, age):
    if method.score == "pseudo_gradient":
        return run.rates[p][0]
    if method.score in ("rms", "aged"):
        return run.rates[p][1] * (age if method.score == "aged" else 1)
    if method.score == "round_robin":
        return age
    if method.score in ("gain", "disagreement"):
        names = method.fragments[p]
        squares = [
            np.concatenate([(run.outer[n] - x[n]).ravel() ** 2 for n in names]).mean()
            for x in run.local
        ]
        shared = run.rates[p][1] * age if method.score == "disagreement" else 0
        return np.mean(squares) - shared**2
    total = 0.0
    for local in run.local:
        gaps = [np.abs(run.outer[n] - local[n]).ravel() for n in method.fragments[p]]
        total += np.concatenate(gaps).mean()
    return total / age
