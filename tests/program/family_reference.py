"""NumPy reference of the other methods, written from the formulas.

It shares no code with the package. A model is a float64 vector, its tensors end to end,
and what all regions have of it is `[M, N]`; `targets[t, m]` is what region m trains on
in tick t. Every method is a function that gives the regions' parameters and the outer
ones at the end; inner steps are plain SGD. Pseudo-gradients are old minus new.

What the package keeps in float32 whatever the parameters (scales of a quantizer, the
staleness gap) is rounded to float32 here too, where its formula says so.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np

SHAPES = {"a": (4, 8), "b": (8,), "c": (4,)}


def split(model):
    """The tensors of a model."""
    ends = np.cumsum([math.prod(shape) for shape in SHAPES.values()])
    parts = zip(np.split(model, ends[:-1]), SHAPES.values(), strict=True)
    return [part.reshape(shape) for part, shape in parts]


def join(tensors):
    return np.concatenate([np.ravel(x) for x in tensors])


def tensorwise(fn):
    """As `fn`, of each tensor of a model."""
    return lambda model: join(map(fn, split(model)))


def by_region(fn, models):
    return np.array([fn(model) for model in models])


@dataclasses.dataclass
class SyncSpec:
    """f(x) = (x - target)' A (x - target) / 2."""

    hessian: np.ndarray
    params: np.ndarray
    targets: np.ndarray
    lr: float

    @property
    def num_regions(self):
        return self.targets.shape[1]

    @property
    def num_steps(self):
        return self.targets.shape[0]

    def everywhere(self, model):
        """A model, or the regions' own ones, as `[M, N]`."""
        return np.broadcast_to(model, self.targets.shape[1:]).copy()

    def gradient(self, x, t, m=slice(None)):
        return (x - self.targets[t, m]) @ self.hessian

    def step(self, x, t, m=slice(None)):
        return x - self.lr * self.gradient(x, t, m)

    def round(self, starts, t, num_steps):
        """All regions from `starts`, for `num_steps` ticks from tick t on."""
        local = self.everywhere(starts)
        for tick in range(t, t + num_steps):
            local = self.step(local, tick)
        return local

    def rounds(self, interval):
        """First ticks of the whole rounds, without the steps left over."""
        return range(0, self.num_steps - self.num_steps % interval, interval)

    def rest(self, starts, interval):
        left = self.num_steps % interval
        return self.round(starts, self.num_steps - left, left)


@dataclasses.dataclass
class Nesterov:
    lr: float
    momentum: float
    m: np.ndarray | float = 0.0

    def step(self, x, delta):
        self.m = self.momentum * self.m + delta
        return x - self.lr * (delta + self.momentum * self.m)


# --- Compressors: what a region's message decodes to --------------------------


def plain(model):
    return model


def top_k(density, quantize=None):
    """The largest; then they are quantized, by themselves, in falling order."""

    def one(x):
        flat, kept = x.ravel(), np.zeros(x.size)
        k = max(1, round(density * x.size))
        largest = np.argsort(-np.abs(flat), kind="stable")[:k]
        kept[largest] = quantize(flat[largest]) if quantize else flat[largest]
        return kept.reshape(x.shape)

    return tensorwise(one)


def chunks_of(matrix, h, w):
    """`[n, h * w]`, row by row of chunks."""
    cut = matrix.reshape(matrix.shape[0] // h, h, matrix.shape[1] // w, w)
    return cut.swapaxes(1, 2).reshape(-1, h * w)


def glued(chunks, h, w, shape):
    """The matrix of these chunks."""
    cut = chunks.reshape(shape[0] // h, shape[1] // w, h, w)
    return cut.swapaxes(1, 2).reshape(shape)


def cosines(n):
    """Orthonormal DCT-II, element by element."""
    rows = [
        [math.cos(math.pi * (i + 0.5) * f / n) * math.sqrt((1 if f == 0 else 2) / n)
         for i in range(n)]
        for f in range(n)
    ]  # fmt: skip
    return np.array(rows)


def chunked(k, side, is_cosine=False, quantize=None, unsent=0.0):
    """The k largest of each chunk, or of its cosine transform; `quantize` of them.

    Of a chunk smaller than side x side its share of k, but for the transform's.
    """

    def one(x):
        matrix = np.atleast_2d(x)
        h, w = (min(side, n) for n in matrix.shape)
        room = [(0, -n % size) for n, size in zip(matrix.shape, (h, w), strict=True)]
        padded = np.pad(matrix, room)
        chunks = chunks_of(padded, h, w)
        basis = np.kron(cosines(h), cosines(w))
        if is_cosine:
            chunks = chunks @ basis.T
        k_own = k if is_cosine else max(1, round(k * h * w / side**2))
        order = np.argsort(-np.abs(chunks), axis=1, kind="stable")[:, :k_own]
        sent = np.take_along_axis(chunks, order, 1)
        kept = np.full_like(chunks, unsent)
        np.put_along_axis(kept, order, quantize(sent) if quantize else sent, 1)
        if is_cosine:
            kept = kept @ basis
        whole = glued(kept, h, w, padded.shape)
        return whole[: matrix.shape[0], : matrix.shape[1]].reshape(x.shape)

    return tensorwise(one)


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
    return tensorwise(lambda x: quantize(x) if x.ndim > 1 else x)


@dataclasses.dataclass
class Threshold:
    """The k-th largest at every `every`-th call; what reaches it, up to a capacity."""

    density: float
    every: int
    slack: float
    calls: int = 0
    levels: list = dataclasses.field(default_factory=list)

    def __call__(self, model):
        sizes = [np.abs(x.ravel()).astype(np.float32) for x in split(model)]
        if self.calls % self.every == 0:
            counts = [max(1, round(self.density * size.size)) for size in sizes]
            self.levels = [
                np.sort(size)[-k] for size, k in zip(sizes, counts, strict=True)
            ]
        self.calls += 1
        out = []
        for x, size, level in zip(split(model), sizes, self.levels, strict=True):
            capacity = min(x.size, max(1, round(self.slack * self.density * x.size)))
            reached = np.flatnonzero(size >= level)[:capacity]
            sent = np.zeros(x.size)
            sent[reached] = x.ravel()[reached]
            out.append(sent)
        return join(out)


@dataclasses.dataclass
class Feedback:
    """e <- b e + x;  q = C(e);  e <- e - q."""

    compress: object
    decay: float = 1.0
    residual: np.ndarray | float = 0.0

    def __call__(self, model):
        meant = self.decay * self.residual + model
        sent = self.compress(meant)
        self.residual = meant - sent
        return sent


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

    def __call__(self, model):
        sent = self.core(model)
        rest, out = model - sent, sent.copy()
        dealt = [self._places(m, model.size) for m in range(self.num_regions)]
        for place in dealt[self.region]:
            owners = sum(place in places for places in dealt)
            entry = self.order[place]
            out[entry] += rest[entry] * self.num_regions / owners
        return out

    def _places(self, m, size):
        start = m * size // self.num_regions
        count = max(1, round(self.density * size))
        return {(start + j) % size for j in range(count)}


def sent_by(senders, models):
    return np.array([send(x) for send, x in zip(senders, models, strict=True)])


# --- Rounds that everybody is part of -----------------------------------------


def synchronous(s, interval, outer_lr, momentum, compress):
    """`compress()` makes the compressor of one region."""
    senders = [compress() for _ in range(s.num_regions)]
    x, optimizer = s.params, Nesterov(outer_lr, momentum)
    for t in s.rounds(interval):
        sent = sent_by(senders, x - s.round(x, t, interval))
        x = optimizer.step(x, sent.mean(0))
    return s.rest(x, interval), x


def sparseloco(s, interval, outer_lr, k, side, decay, over="senders"):
    """What nobody sent is a hole, nan, on the way."""
    sent_of = chunked(k, side, quantize=stat2, unsent=np.nan)
    x, e, holes = s.params, 0.0, 0
    for t in s.rounds(interval):
        e = decay * e + x - s.round(x, t, interval)
        sent = by_region(sent_of, e)
        e = e - np.nan_to_num(sent)
        counts = (~np.isnan(sent)).sum(0)
        holes += (counts % s.num_regions > 0).sum()
        divisor = np.maximum(counts, 1) if over == "senders" else s.num_regions
        x = x - outer_lr * np.nan_to_num(sent).sum(0) / divisor
    assert holes > 50  # Entries that some regions sent and some did not.
    return s.rest(x, interval), x


def co2(s, interval, outer_lr, momentum, clip, seen, is_measured):
    x = began = s.params
    m = arriving = np.zeros_like(x)
    mean_move, num_moves = np.float32(0), np.int32(0)
    for t in s.rounds(interval):
        leaving = (x - s.round(x, t, interval)).mean(0)
        move = np.float32(np.linalg.norm(x - began))
        gap = np.float32(1)
        if move > 0 and is_measured:
            gap = max(gap, move / (mean_move or move))
            num_moves += 1
            mean_move = mean_move + (move - mean_move) / np.float32(num_moves)
        raw = momentum * m + arriving / np.float64(gap)
        m = np.clip(raw, -clip, clip)
        seen.append((float(gap), (m != raw).any()))
        began, arriving = x, leaving
        x = x - outer_lr * m
    return s.rest(x, interval), x


def eager(s, interval, outer_lr, momentum):
    xs, late = s.everywhere(s.params), np.zeros(s.targets.shape[1:])
    optimizer = Nesterov(outer_lr, momentum)
    for t in s.rounds(interval):
        fresh = xs - s.round(xs, t, interval)
        own = (fresh - late) / s.num_regions
        xs = optimizer.step(xs, late.mean(0) + own)
        late = fresh
    return s.rest(xs, interval), xs.mean(0)


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


def noloco(s, interval, outer_lr, momentum, pull, partners):
    """`partners(step)` gives each region's partner in the sync of that step."""
    xs, v = s.everywhere(s.params), 0.0
    for t in s.rounds(interval):
        g = xs - s.round(xs, t, interval)
        who = partners(t + interval)
        pair_g, pair_x = (g + g[who]) / 2, (xs + xs[who]) / 2
        v = momentum * v + outer_lr * pair_g + pull * (xs - pair_x)
        xs = xs - v
    return s.rest(xs, interval), xs.mean(0)


def drawn_partners(seed, num_regions):
    """The documented draw, of fragment 0."""
    rounds = all_pairs(num_regions)
    return lambda step: rounds[
        np.random.default_rng((seed, step, 0)).integers(len(rounds))
    ]


def diloco_demo(s, interval, outer_lr, beta, compress):
    xs, d = s.everywhere(s.params), 0.0
    for t in s.rounds(interval):
        g = xs - s.round(xs, t, interval)
        d = beta * d + g
        sent = by_region(compress, d)
        d = d - sent + sent.mean(0)
        xs = xs - outer_lr * (g + beta * d)
    return s.rest(xs, interval), xs.mean(0)


@dataclasses.dataclass
class Momenta:
    """AdamW's state, with any number of momenta, and its step."""

    lr: float
    b1s: tuple
    weights: tuple
    b2: float
    us: list | None = None
    v: np.ndarray | float = 0.0
    steps: int = 0

    def step(self, x, g):
        old = self.us or [0.0] * len(self.b1s)
        self.us = [b * u + (1 - b) * g for b, u in zip(self.b1s, old, strict=True)]
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        self.steps += 1
        mixed = (1 - sum(self.weights)) * g
        for b, w, u in zip(self.b1s, self.weights, self.us, strict=True):
            mixed = mixed + w * u / (1 - b**self.steps)
        size = np.sqrt(self.v / (1 - self.b2**self.steps))
        return x - self.lr * mixed / (size + 1e-8)


def des_loc(s, interval, first, second, optimizer):
    """`optimizer` is a `Momenta`, of all regions."""
    xs = s.everywhere(s.params)
    for t in range(s.num_steps):
        xs = optimizer.step(xs, s.gradient(xs, t))
        sync, left = divmod(t + 1, interval)
        if left:
            continue
        x = xs.mean(0)
        xs = s.everywhere(x)
        if sync % first == 0:
            optimizer.us = [s.everywhere(u.mean(0)) for u in optimizer.us]
        if sync % second == 0:
            optimizer.v = s.everywhere(optimizer.v.mean(0))
    return xs, x


def lt_admm(s, interval, rho, neighbours, compress):
    """Edge by edge, as published; `neighbours[i]` lists those of region i."""
    edges = [(i, j) for i, others in enumerate(neighbours) for j in others]
    z = {edge: rho * s.params for edge in edges}
    degree = np.array([[len(others)] for others in neighbours])
    xs = told = s.everywhere(s.params)
    for t in range(s.num_steps):
        pull = np.array([sum(z[i, j] for j in js) for i, js in enumerate(neighbours)])
        xs = xs - s.lr * (s.gradient(xs, t) + rho * degree * xs - pull)
        if (t + 1) % interval == 0:
            told = told + by_region(compress, xs - told)
            z = {(i, j): (z[i, j] - z[j, i] + 2 * rho * told[j]) / 2 for i, j in edges}
    return xs, told.mean(0)


# --- Something at every step --------------------------------------------------


def demo(s, beta, k, side):
    """Coefficients that several regions sent are averaged over those regions."""
    x, d = s.params, 0.0
    select = chunked(k, side, is_cosine=True)
    for t in range(s.num_steps):
        d = beta * d + s.gradient(x, t)
        sent = by_region(select, d)
        d = d - sent
        x = x - s.lr * np.sign(mean_over_senders(sent, side))
    return s.everywhere(x), x


def mean_over_senders(sent, side):
    """Of each coefficient, from what regions' messages `[M, N]` decode to."""
    spectra = by_region(spectrum(side), sent)
    counts = (np.abs(spectra) > 1e-12).sum(0)
    return spectrum(side, is_inverse=True)(spectra.sum(0) / np.maximum(counts, 1))


def spectrum(side, is_inverse=False):
    """The cosine transform of every chunk, in place; sizes are multiples of one."""

    def one(x):
        matrix = np.atleast_2d(x)
        h, w = (min(side, n) for n in matrix.shape)
        basis = np.kron(cosines(h), cosines(w))
        out = chunks_of(matrix, h, w) @ (basis if is_inverse else basis.T)
        return glued(out, h, w, matrix.shape)

    return tensorwise(one)


def lion(s, b1, b2, vote):
    x, m, ties = s.params, 0.0, 0
    for t in range(s.num_steps):
        g = s.gradient(x, t)
        direction = np.where(b1 * m + (1 - b1) * g >= 0, 1.0, -1.0).mean(0)
        m = b2 * m + (1 - b2) * g
        ties += (direction == 0).sum()
        x = x - s.lr * (np.sign(direction) if vote == "majority" else direction)
    return s.everywhere(x), x, ties


def compressed_gradients(s, compress):
    x, senders = s.params, [compress() for _ in range(s.num_regions)]
    for t in range(s.num_steps):
        x = x - s.lr * sent_by(senders, s.gradient(x, t)).mean(0)
    return s.everywhere(x), x


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
    x, local, anchor = s.params, s.everywhere(s.params), s.everywhere(s.params)
    arrivals, senders = [], [compress() for _ in step_times]
    for tick, is_arrival, m in sorted(events):
        if not is_arrival:
            local[m] = s.step(local[m], tick - 1, m)
            continue
        x = take(x, senders[m](anchor[m] - local[m]))
        anchor[m] = local[m] = start(x)
        arrivals.append((tick, m))
    return local, x, arrivals


def delayed_nesterov(lr, momentum, count, spread):
    m, buffer = 0.0, []

    def take(x, delta):
        nonlocal m
        buffer.append(delta)
        weight = spread
        if len(buffer) == count:
            m = momentum * m + sum(buffer) / count
            buffer.clear()
            weight = 1 - spread * count + spread
        return x - lr * (weight * momentum * m + delta / count)

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
    m = 0.0

    def take(x, delta):
        nonlocal m
        pairs = zip(split(delta), split(m + np.zeros_like(x)), strict=True)
        parts, cases = zip(
            *(heloco_corrected(*p, *numbers) for p in pairs), strict=True
        )
        seen.extend(cases)
        g = rho * join(parts)
        m = momentum * m + (1 - momentum) * g
        return x - lr * (g + momentum * m)

    return take, lambda x: x - lr * momentum * m


def mean_by(weights, deltas):
    return weights @ deltas


def fragments_in_turn(
    s, fragments, interval, delay, outer_lr, momentum, merge,
    step_times=None, tokens=None, counted=None, phase=0, average=mean_by,
):  # fmt: skip
    """Streaming: fragment j mod K starts at slot j; `merge(local, staged, outer)`.

    Slots come `phase` ticks before the multiples of theirs; `average(weights, deltas)`.

    With `tokens` (of one step of each region) a mean is weighted by tokens * tokens
    per step since the fragment's sync before, over the regions `counted`.
    """
    step_times = step_times or [Fraction(1)] * s.num_regions
    counted = range(s.num_regions) if counted is None else counted
    num_fragments, slot = len(fragments), interval // len(fragments)
    places = [
        join(np.full(shape, name in names) for name, shape in SHAPES.items())
        for names in fragments
    ]
    optimizers = [Nesterov(outer_lr, momentum) for _ in fragments]
    x, local, flying = s.params.copy(), s.everywhere(s.params), []
    steps = clock(s, step_times)
    for tick in range(1, s.num_steps + 1):
        for m in [m for at, m in steps if at == tick]:
            local[m] = s.step(local[m], tick - 1, m)
        if flying and flying[0][0] + delay == tick:
            _, k, staged, delta = flying.pop(0)
            own = places[k]
            x[own] = optimizers[k].step(x, delta)[own]
            local[:, own] = merge(local, staged, x)[:, own]
        if (tick + phase) % slot == 0:
            began = max(0, tick - interval)
            done = [
                sum(began < at <= tick for at, who in steps if who == m)
                for m in range(s.num_regions)
            ]
            weights = np.isin(range(s.num_regions), counted).astype(float)
            if tokens:
                by_tokens = [
                    (n * k) * (n * k) / n if n else 0.0
                    for n, k in zip(done, tokens, strict=True)
                ]
                weights = weights * by_tokens
            delta = average(weights / weights.sum(), x - local)
            k = (tick + phase) // slot % num_fragments
            flying.append((tick, k, local.copy(), delta))
    return local, x


def radial_directional(weights, deltas):
    """Mean length times the direction of the mean direction, of each tensor."""
    out = []
    for each_delta in zip(*map(split, deltas), strict=True):
        sizes = np.array([np.linalg.norm(x) for x in each_delta])
        by = np.where(sizes, sizes, 1)  # Of what did not move.
        u = sum(w * x / s for w, x, s in zip(weights, each_delta, by, strict=True))
        out.append(weights @ sizes * u / np.linalg.norm(u))
    return join(out)


def loscar(s, interval, delay, mask):
    """`mask(tick)` is the round's; as in the paper, of parameters."""
    x, local, flying = s.params, s.everywhere(s.params), []
    for tick in range(1, s.num_steps + 1):
        local = s.step(local, tick - 1)
        if flying and flying[0][0] + delay == tick:
            _, drawn, staged = flying.pop(0)
            center = staged.mean(0)
            x = np.where(drawn, center, x)
            local = np.where(drawn, center + (local - staged), local)
        if tick % interval == 0:
            flying.append((tick, mask(tick), local))
    return local, x
