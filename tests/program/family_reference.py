"""NumPy reference of the other methods, written from the formulas.

It shares no code with the package. Parameters are flat dicts from name to float64
array, one dict a region; `targets[t][m]` is what region m trains on in tick t. Every
method is a function that gives the regions' parameters and the outer ones at the end;
inner steps are plain SGD. Pseudo-gradients are old minus new.

What the package keeps in float32 whatever the parameters (scales of a quantizer, the
staleness gap) is rounded to float32 here too, where its formula says so.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np


def each(fn, *trees):
    return {n: fn(*(tree[n] for tree in trees)) for n in trees[0]}


def zeros(tree):
    return each(np.zeros_like, tree)


def minus(a, b):
    return each(np.subtract, a, b)


def mean(trees, weights=None):
    weights = [1 / len(trees)] * len(trees) if weights is None else weights
    return {
        n: sum(w * tree[n] for w, tree in zip(weights, trees, strict=True))
        for n in trees[0]
    }


def length(tree):
    return math.sqrt(sum((x**2).sum() for x in tree.values()))


@dataclasses.dataclass
class SyncSpec:
    """f(x) = (x - target)' A (x - target) / 2, all parameters end to end."""

    hessian: np.ndarray
    params: dict
    targets: np.ndarray
    lr: float

    @property
    def num_regions(self):
        return self.targets.shape[1]

    @property
    def num_steps(self):
        return self.targets.shape[0]

    def copies(self):
        return [each(np.copy, self.params) for _ in range(self.num_regions)]

    def gradient(self, params, t, m):
        whole = np.concatenate([x.ravel() for x in params.values()])
        flat = self.hessian @ (whole - self.targets[t][m])
        ends = np.cumsum([x.size for x in params.values()])[:-1]
        parts = zip(params, np.split(flat, ends), strict=True)
        return {n: part.reshape(params[n].shape) for n, part in parts}

    def step(self, params, t, m):
        return each(lambda x, g: x - self.lr * g, params, self.gradient(params, t, m))

    def round(self, starts, t, num_steps):
        """All regions from `starts`, for `num_steps` ticks from tick t on."""
        local = list(starts)
        for tick in range(t, t + num_steps):
            local = [self.step(x, tick, m) for m, x in enumerate(local)]
        return local

    def rounds(self, interval):
        """First ticks of the whole rounds, and of the steps left over."""
        return range(0, self.num_steps - self.num_steps % interval, interval)

    def rest(self, starts, interval):
        left = self.num_steps % interval
        return self.round(starts, self.num_steps - left, left)


@dataclasses.dataclass
class Nesterov:
    lr: float
    momentum: float
    m: dict | None = None

    def step(self, params, delta):
        old = self.m or zeros(delta)
        self.m = old | each(lambda m, d: self.momentum * m + d, _of(old, delta), delta)
        moved = each(
            lambda x, d, m: x - self.lr * (d + self.momentum * m),
            _of(params, delta),
            delta,
            _of(self.m, delta),
        )
        return params | moved


def _of(tree, names):
    return {n: tree[n] for n in names}


# --- Compressors: what a region's message decodes to --------------------------


def plain(tree):
    return tree


def top_k(density, quantize=None):
    """The largest; then they are quantized, by themselves, in falling order."""

    def one(x):
        k = max(1, round(density * x.size))
        kept = _largest(x.ravel()[None], k)
        if quantize:
            sent = sorted(np.flatnonzero(kept), key=lambda i: -abs(kept[0, i]))
            kept[0, sent] = quantize(kept[0, sent])
        return kept.reshape(x.shape)

    return lambda tree: each(one, tree)


def _largest(rows, k):
    kept = np.zeros_like(rows)
    for row, out in zip(rows, kept, strict=True):
        best = sorted(range(row.size), key=lambda i: -abs(row[i]))[:k]
        out[best] = row[best]
    return kept


def chunked(k, side, is_cosine=False, quantize=None, unsent=0.0):
    """The k largest of each chunk, or of its cosine transform; `quantize` of them.

    Of a chunk smaller than side x side its share of k, but for the transform's.
    """

    def one(x):
        matrix = x.reshape(1, -1) if x.ndim < 2 else x
        h, w = min(side, matrix.shape[0]), min(side, matrix.shape[1])
        rows, columns = -(-matrix.shape[0] // h) * h, -(-matrix.shape[1] // w) * w
        padded = np.zeros((rows, columns))
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        corners = [(i, j) for i in range(0, rows, h) for j in range(0, columns, w)]
        left, right = (cosines(h), cosines(w)) if is_cosine else (np.eye(h), np.eye(w))
        chunks = [left @ padded[i : i + h, j : j + w] @ right.T for i, j in corners]
        flat = np.array([c.ravel() for c in chunks])
        k_own = k if is_cosine else max(1, round(k * h * w / side**2))
        order = [sorted(range(h * w), key=lambda i, r=r: -abs(r[i])) for r in flat]
        order = np.array(order)[:, :k_own]
        sent = np.take_along_axis(flat, order, 1)
        kept = np.full_like(flat, unsent)
        sent = quantize(sent) if quantize else sent
        np.put_along_axis(kept, order, sent, 1)
        out = np.zeros_like(padded)
        for (i, j), values in zip(corners, kept, strict=True):
            back = values.reshape(h, w)
            # Not times an identity, which would spread holes.
            back = left.T @ back @ right if is_cosine else back
            out[i : i + h, j : j + w] = back
        return out[: matrix.shape[0], : matrix.shape[1]].reshape(x.shape)

    return lambda tree: each(one, tree)


def cosines(n):
    """Orthonormal DCT-II, element by element."""
    rows = [
        [math.cos(math.pi * (i + 0.5) * f / n) * math.sqrt((1 if f == 0 else 2) / n)
         for i in range(n)]
        for f in range(n)
    ]  # fmt: skip
    return np.array(rows)


def stat2(x):
    """Codes around the mean, decoded as the means of their bins, in float32."""
    shift = x.mean()
    sigma = np.sqrt(((x - shift) ** 2).sum() / max(1, x.size - 1))
    codes = np.clip(np.round((x - shift) / (1.5 * sigma or 1) + 2), 0, 3)
    out = np.empty_like(x)
    for code in np.unique(codes):
        out[codes == code] = np.float32(x[codes == code].mean())
    return out


def four_bit(x):
    """-7/7 to 7/7 of the largest magnitude, which is sent in float32."""
    scale = np.abs(x).max().astype(np.float32)
    return np.round(x.astype(np.float32) / scale * 7) / 7 * scale


def matrices(quantize):
    """Matrices quantized, vectors whole."""
    return lambda tree: each(lambda x: quantize(x) if x.ndim > 1 else x, tree)


@dataclasses.dataclass
class Threshold:
    """The k-th largest at every `every`-th call; what reaches it, up to a capacity."""

    density: float
    every: int
    slack: float
    calls: int = 0
    levels: dict = dataclasses.field(default_factory=dict)

    def __call__(self, tree):
        out = {}
        for n, x in tree.items():
            size = np.abs(x.ravel()).astype(np.float32)
            if self.calls % self.every == 0:
                k = max(1, round(self.density * size.size))
                self.levels[n] = np.sort(size)[-k]
            capacity = min(x.size, max(1, round(self.slack * self.density * x.size)))
            reached = [i for i, s in enumerate(size) if s >= self.levels[n]]
            sent = np.zeros(x.size)
            sent[reached[:capacity]] = x.ravel()[reached[:capacity]]
            out[n] = sent.reshape(x.shape)
        self.calls += 1
        return out


@dataclasses.dataclass
class Feedback:
    """e <- b e + x;  q = C(e);  e <- e - q."""

    compress: object
    decay: float = 1.0
    residual: dict | None = None

    def __call__(self, tree):
        old = self.residual or zeros(tree)
        meant = each(lambda e, x: self.decay * e + x, old, tree)
        sent = self.compress(meant)
        self.residual = minus(meant, sent)
        return sent


# --- Rounds that everybody is part of -----------------------------------------


def synchronous(s, interval, outer_lr, momentum, compress):
    """`compress()` makes the compressor of one region."""
    senders = [compress() for _ in range(s.num_regions)]
    x, optimizer = s.params, Nesterov(outer_lr, momentum)
    for t in s.rounds(interval):
        local = s.round([x] * s.num_regions, t, interval)
        sent = [c(minus(x, y)) for c, y in zip(senders, local, strict=True)]
        x = optimizer.step(x, mean(sent))
    return s.rest([x] * s.num_regions, interval), x


def sparseloco(s, interval, outer_lr, k, side, decay, over="senders"):
    """What nobody sent is a hole, nan, on the way."""
    sent_of = chunked(k, side, quantize=stat2, unsent=np.nan)
    x, es = s.params, [zeros(s.params)] * s.num_regions
    holes = 0
    for t in s.rounds(interval):
        local = s.round([x] * s.num_regions, t, interval)
        es = [
            each(lambda e, a, b: decay * e + a - b, e, x, y)
            for e, y in zip(es, local, strict=True)
        ]
        sent = [sent_of(e) for e in es]
        es = [
            each(lambda e, q: e - np.nan_to_num(q), *eq)
            for eq in zip(es, sent, strict=True)
        ]
        stacked = each(lambda *q: np.stack(q), *sent)
        counts = each(lambda q: (~np.isnan(q)).sum(0), stacked)
        holes += sum((c % s.num_regions > 0).sum() for c in counts.values())
        divisors = each(
            lambda c: np.maximum(c, 1) if over == "senders" else s.num_regions, counts
        )
        x = each(
            lambda y, q, n: y - outer_lr * np.nan_to_num(q).sum(0) / n,
            x, stacked, divisors,
        )  # fmt: skip
    assert holes > 50  # Entries that some regions sent and some did not.
    return s.rest([x] * s.num_regions, interval), x


def co2(s, interval, outer_lr, momentum, clip, seen=None, is_measured=False):
    x = began = s.params
    m, arriving = zeros(x), zeros(x)
    mean_move, num_moves = np.float32(0), np.int32(0)
    for t in s.rounds(interval):
        local = s.round([x] * s.num_regions, t, interval)
        leaving = mean([minus(x, y) for y in local])
        move = np.float32(length(minus(x, began)))
        gap = np.float32(1)
        if move > 0 and is_measured:
            gap = max(gap, move / (mean_move or move))
            num_moves += 1
            mean_move = mean_move + (move - mean_move) / np.float32(num_moves)
        shrunk = {n: d / np.float64(gap) for n, d in arriving.items()}
        raw = each(lambda v, d: momentum * v + d, m, shrunk)
        m = each(lambda v: np.clip(v, -clip, clip), raw)
        if seen is not None:
            seen.append((float(gap), any((m[n] != raw[n]).any() for n in m)))
        began, arriving = x, leaving
        x = each(lambda y, v: y - outer_lr * v, x, m)
    return s.rest([x] * s.num_regions, interval), x


def eager(s, interval, outer_lr, momentum):
    count = s.num_regions
    xs, late = s.copies(), [zeros(s.params)] * count
    optimizers = [Nesterov(outer_lr, momentum) for _ in range(count)]
    for t in s.rounds(interval):
        local = s.round(xs, t, interval)
        fresh = [minus(x, y) for x, y in zip(xs, local, strict=True)]
        arrived = mean(late)
        for m in range(count):
            own = each(lambda a, b: (a - b) / count, fresh[m], late[m])
            xs[m] = optimizers[m].step(xs[m], each(np.add, arrived, own))
        late = fresh
    return s.rest(xs, interval), mean(xs)


# --- Regions that are never equal ---------------------------------------------


def all_pairs(num_regions):
    """Circle method: who meets whom, `[N][M]`, of an even number of regions."""
    last, rounds = num_regions - 1, []
    for turn in range(last):
        partner = [0] * num_regions
        for i in range(last):
            j = (turn - i) % last
            partner[i] = last if i == j else j
            if i == j:
                partner[last] = i
        rounds.append(partner)
    return rounds


def noloco(s, interval, outer_lr, momentum, pull, seed, partners):
    """`partners(step)` gives each region's partner in the sync of that step."""
    xs, vs = s.copies(), [zeros(s.params)] * s.num_regions
    for t in s.rounds(interval):
        local = s.round(xs, t, interval)
        g = [minus(x, y) for x, y in zip(xs, local, strict=True)]
        who = partners(t + interval)
        for m in range(s.num_regions):
            pair_g, pair_x = mean([g[m], g[who[m]]]), mean([xs[m], xs[who[m]]])
            vs[m] = {
                n: momentum * vs[m][n]
                + outer_lr * pair_g[n]
                + pull * (xs[m][n] - pair_x[n])
                for n in s.params
            }
        xs = [minus(x, v) for x, v in zip(xs, vs, strict=True)]
    return s.rest(xs, interval), mean(xs)


def drawn_partners(seed, num_regions):
    """The documented draw, of fragment 0."""
    rounds = all_pairs(num_regions)
    return lambda step: rounds[
        np.random.default_rng((seed, step, 0)).integers(len(rounds))
    ]


def diloco_demo(s, interval, outer_lr, beta, compress):
    xs, ds = s.copies(), [zeros(s.params)] * s.num_regions
    for t in s.rounds(interval):
        local = s.round(xs, t, interval)
        g = [minus(x, y) for x, y in zip(xs, local, strict=True)]
        ds = [each(lambda d, v: beta * d + v, *dg) for dg in zip(ds, g, strict=True)]
        sent = [compress(d) for d in ds]
        everyone = mean(sent)
        ds = [
            each(lambda d, q, shared: d - q + shared, d, q, everyone)
            for d, q in zip(ds, sent, strict=True)
        ]
        xs = [
            each(lambda x, v, d: x - outer_lr * (v + beta * d), *xgd)
            for xgd in zip(xs, g, ds, strict=True)
        ]
    return s.rest(xs, interval), mean(xs)


@dataclasses.dataclass
class Masked:
    """What a core says, and of what it leaves M / n at the entries region m owns.

    `order` is that in which all entries, end to end, are dealt.
    """

    core: object
    density: float
    region: int
    num_regions: int
    order: np.ndarray

    def __call__(self, tree):
        sent, start = self.core(tree), 0
        rest = np.concatenate([(tree[n] - sent[n]).ravel() for n in tree])
        dealt = [self._places(m, rest.size) for m in range(self.num_regions)]
        own, out = np.zeros(rest.size), {}
        for place in dealt[self.region]:
            owners = sum(place in places for places in dealt)
            entry = self.order[place]
            own[entry] = rest[entry] * self.num_regions / owners
        for n, x in sent.items():
            out[n] = x + own[start : start + x.size].reshape(x.shape)
            start += x.size
        return out

    def _places(self, m, size):
        start = m * size // self.num_regions
        count = max(1, round(self.density * size))
        return {(start + j) % size for j in range(count)}


@dataclasses.dataclass
class Momenta:
    """AdamW's state of one region, with any number of momenta, and its step."""

    lr: float
    b1s: tuple
    weights: tuple
    b2: float
    us: list | None = None
    v: dict | None = None
    steps: int = 0

    def step(self, x, g):
        self.us = self.us or [zeros(x) for _ in self.b1s]
        self.v = self.v or zeros(x)
        self.steps += 1
        self.us = [
            {n: b * u[n] + (1 - b) * g[n] for n in g}
            for b, u in zip(self.b1s, self.us, strict=True)
        ]
        self.v = {n: self.b2 * self.v[n] + (1 - self.b2) * g[n] ** 2 for n in g}
        out = {}
        for n in x:
            mixed = (1 - sum(self.weights)) * g[n]
            for b, w, u in zip(self.b1s, self.weights, self.us, strict=True):
                mixed = mixed + w * u[n] / (1 - b**self.steps)
            size = np.sqrt(self.v[n] / (1 - self.b2**self.steps))
            out[n] = x[n] - self.lr * mixed / (size + 1e-8)
        return out


def des_loc(s, interval, first, second, optimizer):
    """`optimizer()` makes the `Momenta` of one region."""
    xs, own = s.copies(), [optimizer() for _ in range(s.num_regions)]
    for t in range(s.num_steps):
        for m, o in enumerate(own):
            xs[m] = o.step(xs[m], s.gradient(xs[m], t, m))
        sync, left = divmod(t + 1, interval)
        if left:
            continue
        x = mean(xs)
        xs = [x] * s.num_regions
        if sync % first == 0:
            us = [mean(each_u) for each_u in zip(*(o.us for o in own), strict=True)]
            for o in own:
                o.us = us
        if sync % second == 0:
            v = mean([o.v for o in own])
            for o in own:
                o.v = v
    return xs, x


def lt_admm(s, interval, rho, neighbours, compress):
    """Edge by edge, as published; `neighbours[i]` lists those of region i."""
    each_region, xs, told = range(s.num_regions), s.copies(), s.copies()
    z = {(i, j): each(lambda x: rho * x, s.params) for i in each_region
         for j in neighbours[i]}  # fmt: skip
    for t in range(s.num_steps):
        for i in each_region:
            pull = each(lambda *zs: sum(zs), *(z[i, j] for j in neighbours[i]))
            tied = each(lambda x: rho * len(neighbours[i]) * x, xs[i])  # noqa: B023
            xs[i] = each(
                lambda x, g, own, p: x - s.lr * (g + own - p),
                xs[i],
                s.gradient(xs[i], t, i),
                tied,
                pull,
            )
        if (t + 1) % interval == 0:
            told = [
                each(np.add, h, compress(minus(x, h)))
                for x, h in zip(xs, told, strict=True)
            ]
            z = {
                (i, j): each(
                    lambda a, b, h: (a - b + 2 * rho * h) / 2, z[i, j], z[j, i], told[j]
                )
                for i, j in z
            }
    return xs, mean(told)


# --- Something at every step --------------------------------------------------


def _descend(s, x, direction):
    return each(lambda y, d: y - s.lr * d, x, direction)


def demo(s, beta, k, side):
    """Coefficients that several regions sent are averaged over those regions."""
    x, ds = s.params, [zeros(s.params)] * s.num_regions
    select = chunked(k, side, is_cosine=True)
    for t in range(s.num_steps):
        grads = [s.gradient(x, t, m) for m in range(s.num_regions)]
        ds = [
            each(lambda d, g: beta * d + g, *dg) for dg in zip(ds, grads, strict=True)
        ]
        sent = [select(d) for d in ds]
        total = each(lambda *q: sum(q), *sent)
        counts = [each(lambda q: _is_sent(q, side), q) for q in sent]
        share = each(
            lambda q, *c: _divided(q, np.maximum(sum(c), 1), side), total, *counts
        )
        ds = [minus(d, q) for d, q in zip(ds, sent, strict=True)]
        x = _descend(s, x, each(np.sign, share))
    return [x] * s.num_regions, x


def _spectrum(x, side, back=False):
    """Cosine transform of every chunk of a matrix, in place, or its inverse."""
    h, w = min(side, x.shape[0]), min(side, x.shape[1])
    out = np.zeros_like(x)
    left, right = cosines(h), cosines(w)
    for i in range(0, x.shape[0], h):
        for j in range(0, x.shape[1], w):
            part = x[i : i + h, j : j + w]
            out[i : i + h, j : j + w] = (
                left.T @ part @ right if back else left @ part @ right.T
            )
    return out


def _is_sent(q, side):
    """Which coefficients a decoded message holds; sizes are multiples of the chunk."""
    return np.abs(_spectrum(q.reshape(-1, q.shape[-1]), side)) > 1e-12


def _divided(q, counts, side):
    spectrum = _spectrum(q.reshape(-1, q.shape[-1]), side)
    return _spectrum(spectrum / counts, side, back=True).reshape(q.shape)


def lion(s, b1, b2, vote):
    x, ms = s.params, [zeros(s.params)] * s.num_regions
    ties = 0
    for t in range(s.num_steps):
        grads = [s.gradient(x, t, m) for m in range(s.num_regions)]
        signs = [
            each(lambda m, g: np.where(b1 * m + (1 - b1) * g >= 0, 1.0, -1.0), *mg)
            for mg in zip(ms, grads, strict=True)
        ]
        ms = [
            each(lambda m, g: b2 * m + (1 - b2) * g, *mg)
            for mg in zip(ms, grads, strict=True)
        ]
        direction = mean(signs)
        ties += sum((d == 0).sum() for d in direction.values())
        if vote == "majority":
            direction = each(np.sign, direction)
        x = _descend(s, x, direction)
    return [x] * s.num_regions, x, ties


def compressed_gradients(s, compress):
    x, senders = s.params, [compress() for _ in range(s.num_regions)]
    for t in range(s.num_steps):
        sent = [c(s.gradient(x, t, m)) for m, c in enumerate(senders)]
        x = _descend(s, x, mean(sent))
    return [x] * s.num_regions, x


# --- Regions of unequal speed -------------------------------------------------


def clock(s, step_times):
    """`(tick, region)` of every inner step, in order; a step ends at its tick."""
    steps = []
    for m, time in enumerate(step_times):
        count = math.floor(Fraction(s.num_steps) / time)
        steps += [(math.ceil(i * time), m) for i in range(1, count + 1)]
    return sorted(steps)


def asynchronous(
    s, step_times, interval, is_dynamic, take, compress=lambda: plain, start=plain
):
    """Each region on its own clock; `take(x, delta) -> x` is the outer optimizer.

    A region goes on from `start(x)`, and counts what it does from there.

    At one tick steps come before arrivals, and arrivals in the order of regions.
    """
    events = [(tick, 0, m) for tick, m in clock(s, step_times)]
    for m, time in enumerate(step_times):
        steps = max(1, math.floor(interval / time)) if is_dynamic else interval
        ends = range(1, math.floor(s.num_steps / (steps * time)) + 1)
        ticks = [math.ceil(i * steps * time) for i in ends]
        events += [(tick, 1, m) for tick in ticks if tick <= s.num_steps]
    x, local, anchor = s.params, s.copies(), s.copies()
    arrivals, senders = [], [compress() for _ in step_times]
    for tick, is_arrival, m in sorted(events):
        if not is_arrival:
            local[m] = s.step(local[m], tick - 1, m)
            continue
        x = take(x, senders[m](minus(anchor[m], local[m])))
        anchor[m] = local[m] = start(x)
        arrivals.append((tick, m))
    return local, x, arrivals


def delayed_nesterov(lr, momentum, count, spread):
    memory = {"m": None, "buffer": []}

    def take(x, delta):
        memory["m"] = memory["m"] or zeros(x)
        memory["buffer"].append(delta)
        weight = spread
        if len(memory["buffer"]) == count:
            total = each(lambda *d: sum(d) / count, *memory["buffer"])
            memory["m"] = each(lambda m, d: momentum * m + d, memory["m"], total)
            memory["buffer"] = []
            weight = 1 - spread * count + spread
        return each(
            lambda y, m, d: y - lr * (weight * momentum * m + d / count),
            x,
            memory["m"],
            delta,
        )

    return take


def heloco_corrected(d, m, keep, removal, turn, kappa, most):
    """The published table, and its case; it is silent where there is no angle."""
    nd, nm = np.linalg.norm(d), np.linalg.norm(m)
    if nd == 0 or nm == 0:
        return d, "keep"
    u, v = d / nd, m / nm
    c, conf = (u * v).sum(), nd / (nd + kappa * nm)
    if c >= keep:
        return d, "keep"
    if c < 0:
        return d - min(removal * -c * conf, most) * c * nd * v, "take off"
    share = min(turn * (1 - c) * conf, 1)
    mixed = (1 - share) * u + share * v
    return nd * mixed / np.linalg.norm(mixed), "turn"


def look_ahead(lr, momentum, rho, numbers, seen):
    """`(take, start)`; `numbers` are HeLoCo's c_ok, k_s, k_d, kappa, beta_max."""
    memory = {}

    def take(x, delta):
        out = {}
        for n, d in delta.items():
            m = memory.get(n, np.zeros_like(d))
            corrected, case = heloco_corrected(d, m, *numbers)
            seen.append(case)
            g = rho * corrected
            memory[n] = momentum * m + (1 - momentum) * g
            out[n] = x[n] - lr * (g + momentum * memory[n])
        return out

    def start(x):
        return {n: x[n] - lr * momentum * memory[n] for n in x}

    return take, start


def fragments_in_turn(
    s, fragments, interval, delay, outer_lr, momentum, merge,
    step_times=None, tokens=None, counted=None, phase=0, average=mean,
):  # fmt: skip
    """Streaming: fragment j mod K starts at slot j; `merge(local, staged, outer)`.

    Slots come `phase` ticks before the multiples of theirs; `average(deltas, weights)`.

    With `tokens` (of one step of each region) a mean is weighted by tokens * tokens
    per step since the fragment's sync before, over the regions `counted`.
    """
    step_times = step_times or [Fraction(1)] * s.num_regions
    counted = range(s.num_regions) if counted is None else counted
    slot = interval // len(fragments)
    x, local = s.params, s.copies()
    optimizer, flying = Nesterov(outer_lr, momentum), []
    steps = clock(s, step_times)
    for tick in range(1, s.num_steps + 1):
        for m in [m for at, m in steps if at == tick]:
            local[m] = s.step(local[m], tick - 1, m)
        for start, names, staged, delta in [f for f in flying if f[0] + delay == tick]:
            flying = [f for f in flying if f[0] != start]
            optimizer.m = optimizer.m or zeros(x)
            x = optimizer.step(x, delta)
            for m in range(s.num_regions):
                for n in names:
                    local[m][n] = merge(local[m][n], staged[m][n], x[n])
        if (tick + phase) % slot == 0:
            names = fragments[(tick + phase) // slot % len(fragments)]
            began = max(0, tick - interval)
            done = [
                sum(began < at <= tick for at, who in steps if who == m)
                for m in range(s.num_regions)
            ]
            weights = [1.0 if m in counted else 0.0 for m in range(s.num_regions)]
            if tokens:
                weights = [
                    w * (n * k) * (n * k) / n if n else 0.0
                    for w, n, k in zip(weights, done, tokens, strict=True)
                ]
            staged = [_of(y, names) for y in local]
            deltas = [minus(_of(x, names), y) for y in staged]
            share = [w / sum(weights) for w in weights]
            flying.append((tick, names, staged, average(deltas, share)))
    return local, x


def radial_directional(deltas, weights):
    """Mean length times the direction of the mean direction."""
    out = {}
    for n in deltas[0]:
        each_delta = [d[n] for d in deltas]
        sizes = [np.linalg.norm(x) for x in each_delta]
        by = [s or 1.0 for s in sizes]  # Of what did not move.
        u = sum(w * x / s for w, x, s in zip(weights, each_delta, by, strict=True))
        n_mean = sum(w * s for w, s in zip(weights, sizes, strict=True))
        out[n] = n_mean * u / np.linalg.norm(u)
    return out


def loscar(s, interval, delay, mask):
    """`mask(tick)` is the round's, of each tensor; as in the paper, of parameters."""
    x, local, flying = s.params, s.copies(), []
    for tick in range(1, s.num_steps + 1):
        local = [s.step(y, tick - 1, m) for m, y in enumerate(local)]
        for _, drawn, staged in [f for f in flying if f[0] + delay == tick]:
            center = mean(staged)
            x = each(np.where, drawn, center, x)
            local = [
                each(
                    lambda d, c, z, y: np.where(d, c + (z - y), z), drawn, center, z, y
                )
                for z, y in zip(local, staged, strict=True)
            ]
        flying = [f for f in flying if f[0] + delay > tick]
        if tick % interval == 0:
            flying.append((tick, mask(tick), local))
    return local, x
