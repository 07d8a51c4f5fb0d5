"""NumPy reference of the other methods, written from the formulas.

It shares no code with the package. A model is one float64 vector `[N]`, its tensors end
to end in the order of their names; those of all regions are the rows of a matrix
`[R, N]`, and `targets[t, m]` is what region m trains on in tick t. Every method is a
function that gives the regions' models and the outer one at the end; inner steps are
plain SGD. Pseudo-gradients are old minus new.

What the package keeps in float32 whatever the parameters (scales of a quantizer, the
staleness gap) is rounded to float32 here too, where its formula says so.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np

SHAPES = {"a": (4, 8), "b": (8,), "c": (4,)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
SIZE = sum(SIZES)


def split(x):
    """The tensors of a model, or of each row of models."""
    parts = np.split(x, np.cumsum(SIZES)[:-1], axis=-1)
    shapes = SHAPES.values()
    return [p.reshape(*x.shape[:-1], *s) for p, s in zip(parts, shapes, strict=True)]


def join(tensors):
    return np.concatenate([x.ravel() for x in tensors])


def per_tensor(fn):
    """A function of a model from one of a tensor."""
    return lambda x: join(map(fn, split(x)))


def averaged(x):
    """The mean of all regions, in each."""
    return np.broadcast_to(x.mean(0), x.shape)


@dataclasses.dataclass
class Problem:
    """f(x) = (x - target)' A (x - target) / 2."""

    hessian: np.ndarray
    params: np.ndarray
    targets: np.ndarray
    lr: float

    @property
    def num_steps(self):
        return self.targets.shape[0]

    @property
    def num_regions(self):
        return self.targets.shape[1]

    def copies(self, x=None):
        """A model, at first the one before training, once a region."""
        return np.tile(self.params if x is None else x, (self.num_regions, 1))

    def gradient(self, x, t, m=slice(None)):
        """Of each region, or of region m."""
        return (x - self.targets[t, m]) @ self.hessian

    def step(self, x, t, m=slice(None)):
        return x - self.lr * self.gradient(x, t, m)

    def round(self, x, t, num_steps):
        """All regions, from one model or one each, for ticks from tick t on."""
        for tick in range(t, t + num_steps):
            x = self.step(x, tick)
        return x

    def rounds(self, interval):
        """Return the first ticks of the full rounds."""
        return range(0, self.num_steps - self.num_steps % interval, interval)

    def rest(self, x, interval):
        """Return the number of steps after the last full round."""
        left = self.num_steps % interval
        x = self.round(x, self.num_steps - left, left)
        return np.broadcast_to(x, self.targets.shape[1:])


@dataclasses.dataclass
class Nesterov:
    """Of a model, or of a part of it."""

    lr: float
    momentum: float
    m: np.ndarray | None = None

    def step(self, x, delta, at=slice(None)):
        if self.m is None:
            self.m = np.zeros_like(x)
        x = x.copy()
        self.m[at] = self.momentum * self.m[at] + delta
        x[at] -= self.lr * (delta + self.momentum * self.m[at])
        return x


# --- Compressors: what a region's message, or a tensor of it, decodes to ------


def plain(x):
    return x


def top_k(density, quantize=None):
    """Keep the largest; then quantize them in descending order."""

    def one(x):
        flat = x.ravel()
        kept = np.zeros(x.size)
        order = np.argsort(-np.abs(flat), kind="stable")
        order = order[: max(1, round(density * x.size))]
        kept[order] = quantize(flat[order]) if quantize else flat[order]
        return kept.reshape(x.shape)

    return per_tensor(one)


def to_chunks(x, side):
    """`[down, across, h, w]` of a matrix, with zeros where sides do not divide it."""
    matrix = np.atleast_2d(x)
    h, w = (min(side, n) for n in matrix.shape)
    rows, columns = matrix.shape
    padded = np.pad(matrix, [(0, -rows % h), (0, -columns % w)])
    return padded.reshape(-(-rows // h), h, -(-columns // w), w).swapaxes(1, 2)


def from_chunks(chunks, shape):
    down, across, h, w = chunks.shape
    rows, columns = (1, *shape)[-2:]
    matrix = chunks.swapaxes(1, 2).reshape(down * h, across * w)
    return matrix[:rows, :columns].reshape(shape)


def cosines(n):
    """Orthonormal DCT-II, element by element."""
    rows = [
        [
            math.cos(math.pi * (i + 0.5) * f / n) * math.sqrt((1 if f == 0 else 2) / n)
            for i in range(n)
        ]
        for f in range(n)
    ]
    return np.array(rows)


def spectrum(chunks, back=False):
    """Cosine transform of every chunk, or its inverse."""
    left, right = map(cosines, chunks.shape[-2:])
    return left.T @ chunks @ right if back else left @ chunks @ right.T


def chunked(k, side, is_cosine=False, quantize=None, unsent=0.0):
    """The k largest of each chunk, or of its cosine transform; `quantize` of them.

    Of a chunk smaller than side x side its share of k, but for the transform's.
    """

    def one(x):
        chunks = to_chunks(x, side)
        # Not times an identity, which would spread holes.
        chunks = spectrum(chunks) if is_cosine else chunks

        flat = chunks.reshape(-1, math.prod(chunks.shape[2:]))
        k_own = k if is_cosine else max(1, round(k * flat.shape[1] / side**2))

        order = np.argsort(-np.abs(flat), axis=1, kind="stable")[:, :k_own]
        sent = np.take_along_axis(flat, order, 1)
        kept = np.full_like(flat, unsent)
        np.put_along_axis(kept, order, quantize(sent) if quantize else sent, 1)

        kept = kept.reshape(chunks.shape)
        return from_chunks(spectrum(kept, back=True) if is_cosine else kept, x.shape)

    return per_tensor(one)


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
    """Quantize matrices; send vectors in full."""
    return per_tensor(lambda x: quantize(x) if x.ndim > 1 else x)


@dataclasses.dataclass
class Threshold:
    """The k-th largest at every `every`-th call; what reaches it, up to a capacity."""

    density: float
    every: int
    slack: float
    calls: int = 0
    levels: list = dataclasses.field(default_factory=list)

    def __call__(self, x):
        tensors = [tensor.ravel() for tensor in split(x)]
        out = []
        sizes = [np.abs(tensor).astype(np.float32) for tensor in tensors]
        if self.calls % self.every == 0:
            self.levels = [
                np.sort(s)[-max(1, round(self.density * s.size))] for s in sizes
            ]

        self.calls += 1
        for tensor, size, level in zip(tensors, sizes, self.levels, strict=True):
            capacity = max(1, round(self.slack * self.density * size.size))
            reached = np.flatnonzero(size >= level)[: min(size.size, capacity)]
            sent = np.zeros(size.size)
            sent[reached] = tensor[reached]
            out.append(sent)
        return join(out)


@dataclasses.dataclass
class Feedback:
    """e <- b e + x;  q = C(e);  e <- e - q."""

    compress: object
    decay: float = 1.0
    residual: np.ndarray | float = 0.0

    def __call__(self, x):
        meant = self.decay * self.residual + x
        sent = self.compress(meant)
        self.residual = meant - sent
        return sent


# --- Rounds that everybody is part of -----------------------------------------


def synchronous(s, interval, outer_lr, momentum, compress):
    """`compress()` makes the compressor of one region."""
    senders = [compress() for _ in range(s.num_regions)]
    x = s.params
    optimizer = Nesterov(outer_lr, momentum)
    for t in s.rounds(interval):
        deltas = x - s.round(x, t, interval)
        sent = [c(delta) for c, delta in zip(senders, deltas, strict=True)]
        x = optimizer.step(x, np.mean(sent, axis=0))
    return s.rest(x, interval), x


def periodic(s, outer_lr, momentum, parts):
    """`parts` are each a mask of the entries and the period at which they sync."""
    x = s.params
    optimizers = [Nesterov(outer_lr, momentum) for _ in parts]
    local = s.copies()

    for t in range(s.num_steps):
        local = s.step(local, t)
        for (mask, period), optimizer in zip(parts, optimizers, strict=True):
            if (t + 1) % period == 0:
                stepped = optimizer.step(x, (x - local).mean(0))
                x = np.where(mask, stepped, x)
                local = np.where(mask, x, local)

    return local, x


def gpa(s, mu_x, mu_y):
    """Three sequences, as the paper has them, of one region."""
    x = y = z = s.params
    for t in range(s.num_steps):
        z = z + (s.step(y, t)[0] - y)
        x = mu_x * x + (1 - mu_x) * z
        y = mu_y * x + (1 - mu_y) * z
    return y[None], x


def sparseloco(s, interval, outer_lr, k, side, decay, over="senders"):
    """Entries that no region sends are nan until they are filled."""
    compress = chunked(k, side, quantize=stat2, unsent=np.nan)
    x = s.params
    e = 0.0
    holes = 0

    for t in s.rounds(interval):
        e = decay * e + x - s.round(x, t, interval)
        sent = np.array(list(map(compress, e)))
        e = e - np.nan_to_num(sent)

        counts = (~np.isnan(sent)).sum(0)
        holes += (counts % s.num_regions > 0).sum()
        divisor = np.maximum(counts, 1) if over == "senders" else s.num_regions

        x = x - outer_lr * np.nan_to_num(sent).sum(0) / divisor

    assert holes > 50  # Entries that some regions sent and some did not.
    return s.rest(x, interval), x


def co2(s, interval, outer_lr, momentum, clip, is_measured):
    x = began = s.params
    m = arriving = np.zeros_like(x)
    mean_move = np.float32(0)
    num_moves = np.int32(0)
    gaps = []
    num_clipped = 0

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
        gaps.append(gap)
        num_clipped += (m != raw).any()

        began = x
        arriving = leaving
        x = x - outer_lr * m

    assert max(gaps) > 1.1 if is_measured else set(gaps) == {1}
    assert 1 < num_clipped < len(gaps)
    return s.rest(x, interval), x


def eager(s, interval, outer_lr, momentum):
    x = s.copies()
    optimizer = Nesterov(outer_lr, momentum)
    late = np.zeros_like(x)
    for t in s.rounds(interval):
        fresh = x - s.round(x, t, interval)
        x = optimizer.step(x, late.mean(0) + (fresh - late) / s.num_regions)
        late = fresh
    return s.rest(x, interval), x.mean(0)


# --- Regions that are never equal ---------------------------------------------


def all_pairs(num_regions):
    """Return partners `[N][M]` of an even number of regions, by the circle method."""
    last = num_regions - 1
    rounds = []
    for turn in range(last):
        partner = [(turn - i) % last for i in range(last)]
        (alone,) = [i for i in range(last) if partner[i] == i]
        partner[alone] = last
        rounds.append([*partner, alone])
    return rounds


def noloco(s, interval, outer_lr, momentum, pull, partners):
    """`partners(step)` gives each region's partner in the sync of that step."""
    x = s.copies()
    v = 0.0

    for t in s.rounds(interval):
        g = x - s.round(x, t, interval)

        partner = partners(t + interval)
        pair_g = (g + g[partner]) / 2
        pair_x = (x + x[partner]) / 2

        v = momentum * v + outer_lr * pair_g + pull * (x - pair_x)
        x = x - v

    return s.rest(x, interval), x.mean(0)


def drawn_partners(seed, num_regions):
    """The documented draw, of fragment 0."""
    rounds = all_pairs(num_regions)
    return lambda step: rounds[
        np.random.default_rng((seed, step, 0)).integers(len(rounds))
    ]


def diloco_demo(s, interval, outer_lr, beta, compress):
    x = s.copies()
    d = 0.0

    for t in s.rounds(interval):
        g = x - s.round(x, t, interval)
        d = beta * d + g

        sent = np.array(list(map(compress, d)))
        d = d - sent + sent.mean(0)

        x = x - outer_lr * (g + beta * d)

    return s.rest(x, interval), x.mean(0)


@dataclasses.dataclass
class Momenta:
    """AdamW's state of a model or several, with any number of momenta, and its step."""

    lr: float
    b1s: tuple
    weights: tuple
    b2: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    us: list | None = None
    v: np.ndarray | float = 0.0
    steps: int = 0

    def step(self, x, g):
        self.steps += 1

        us = self.us or [0.0 for _ in self.b1s]
        self.us = [b * u + (1 - b) * g for b, u in zip(self.b1s, us, strict=True)]
        self.v = self.b2 * self.v + (1 - self.b2) * g**2

        mixed = (1 - sum(self.weights)) * g
        for b, w, u in zip(self.b1s, self.weights, self.us, strict=True):
            mixed = mixed + w * u / (1 - b**self.steps)

        step = mixed / (np.sqrt(self.second_moment()) + self.eps)
        return x - self.lr * (step + self.weight_decay * x)

    def second_moment(self):
        return self.v / (1 - self.b2**self.steps)


def des_loc(s, interval, first, second, optimizer):
    """`optimizer` is the `Momenta` of all regions."""
    x = s.copies()

    for t in range(s.num_steps):
        x = optimizer.step(x, s.gradient(x, t))

        sync, left = divmod(t + 1, interval)
        if left:
            continue

        x = averaged(x)
        if sync % first == 0:
            optimizer.us = list(map(averaged, optimizer.us))
        if sync % second == 0:
            optimizer.v = averaged(optimizer.v)

        outer = x[0]

    return x, outer


def lt_admm(s, interval, rho, neighbours, compress):
    """Edge by edge, as published; `neighbours[i]` lists those of region i."""
    x = shared = s.copies()
    degrees = np.array([[len(others)] for others in neighbours])
    z = {(i, j): rho * s.params for i, others in enumerate(neighbours) for j in others}

    for t in range(s.num_steps):
        pull = [sum(z[i, j] for j in others) for i, others in enumerate(neighbours)]
        x = x - s.lr * (s.gradient(x, t) + rho * degrees * x - np.array(pull))

        if (t + 1) % interval == 0:
            shared = shared + np.array(list(map(compress, x - shared)))
            z = {(i, j): (z[i, j] - z[j, i] + 2 * rho * shared[j]) / 2 for i, j in z}

    return x, shared.mean(0)


# --- Something at every step --------------------------------------------------


def in_cosines(side, back=False):
    """The cosine transform of every chunk, in place; sizes are multiples of one."""
    return per_tensor(
        lambda x: from_chunks(spectrum(to_chunks(x, side), back), x.shape)
    )


def mean_over_senders(sent, side):
    """Of each coefficient, from what regions' messages `[M, N]` decode to."""
    coefficients = np.array(list(map(in_cosines(side), sent)))
    counts = (np.abs(coefficients) > 1e-12).sum(0)
    return in_cosines(side, back=True)(coefficients.sum(0) / np.maximum(counts, 1))


def demo(s, beta, k, side):
    """Coefficients that several regions sent are averaged over those regions."""
    x = s.params
    d = 0.0
    select = chunked(k, side, is_cosine=True)

    for t in range(s.num_steps):
        d = beta * d + s.gradient(x, t)

        sent = np.array(list(map(select, d)))
        d = d - sent

        x = x - s.lr * np.sign(mean_over_senders(sent, side))

    return s.copies(x), x


def lion(s, b1, b2, vote):
    x = s.params
    m = 0.0
    ties = 0
    for t in range(s.num_steps):
        g = s.gradient(x, t)
        direction = np.where(b1 * m + (1 - b1) * g >= 0, 1.0, -1.0).mean(0)
        m = b2 * m + (1 - b2) * g
        ties += (direction == 0).sum()
        x = x - s.lr * (np.sign(direction) if vote == "majority" else direction)

    assert ties > 10
    return s.copies(x), x


def compressed_gradients(s, compress):
    x = s.params
    senders = [compress() for _ in range(s.num_regions)]
    for t in range(s.num_steps):
        grads = s.gradient(x, t)
        sent = [c(g) for c, g in zip(senders, grads, strict=True)]
        x = x - s.lr * np.mean(sent, axis=0)
    return s.copies(x), x


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

    x = s.params
    local = s.copies()
    anchor = s.copies()
    senders = [compress() for _ in step_times]
    arrived = set()

    for tick, is_arrival, m in sorted(events):
        if not is_arrival:
            local[m] = s.step(local[m], tick - 1, m)
            continue

        x = take(x, senders[m](anchor[m] - local[m]))
        anchor[m] = local[m] = start(x)
        arrived.add(m)

    assert len(arrived) == s.num_regions
    return local, x


def delayed_nesterov(lr, momentum, count, spread):
    m = 0.0
    buffer = []

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
    nd = np.linalg.norm(d)
    nm = np.linalg.norm(m)
    if nd == 0 or nm == 0:
        return d, "keep"

    u = d / nd
    v = m / nm
    c = (u * v).sum()
    conf = nd / (nd + kappa * nm)

    if c >= keep:
        return d, "keep"
    if c < 0:
        return d - min(removal * -c * conf, most) * c * nd * v, "take off"

    share = min(turn * (1 - c) * conf, 1)
    mixed = (1 - share) * u + share * v
    return nd * mixed / np.linalg.norm(mixed), "turn"


def look_ahead(lr, momentum, rho, numbers, seen):
    """`(take, start)`; `numbers` are HeLoCo's c_ok, k_s, k_d, kappa, beta_max."""
    m = np.zeros(SIZE)

    def take(x, delta):
        nonlocal m
        pairs = zip(split(delta), split(m), strict=True)
        corrected, cases = zip(
            *(heloco_corrected(*pair, *numbers) for pair in pairs), strict=True
        )
        seen.update(cases)

        g = rho * join(corrected)
        m = momentum * m + (1 - momentum) * g
        return x - lr * (g + momentum * m)

    return take, lambda x: x - lr * momentum * m


def fragments_in_turn(
    s,
    fragments,
    interval,
    delay,
    outer_lr,
    momentum,
    merge,
    step_times=None,
    tokens=None,
    counted=None,
    phase=0,
    average=None,
):
    """Streaming: fragment j mod K starts at slot j; `merge(local, staged, outer)`.

    A fragment is a list of tensors' names. Slots come `phase` ticks before the
    multiples of theirs; `average(deltas, weights)` is of one tensor of all regions.

    With `tokens` (of one step of each region) a mean is weighted by tokens * tokens
    per step since the fragment's sync before, over the regions `counted`.
    """
    step_times = step_times or [Fraction(1)] * s.num_regions
    counted = range(s.num_regions) if counted is None else counted
    average = average or (lambda deltas, weights: weights @ deltas)
    slot = interval // len(fragments)
    ends = dict(zip(SHAPES, np.cumsum(SIZES), strict=True))

    x = s.params
    local = s.copies()
    optimizer = Nesterov(outer_lr, momentum)
    flying = []
    steps = clock(s, step_times)

    for tick in range(1, s.num_steps + 1):
        for m in [m for at, m in steps if at == tick]:
            local[m] = s.step(local[m], tick - 1, m)

        for _, tensors in [f for f in flying if f[0] + delay == tick]:
            for at, staged, delta in tensors:
                x = optimizer.step(x, delta, at)
                local[:, at] = merge(local[:, at], staged, x[at])
        flying = [f for f in flying if f[0] + delay != tick]

        if (tick + phase) % slot == 0:
            began = max(0, tick - interval)
            weights = np.isin(range(s.num_regions), counted).astype(float)
            for m, num_tokens in enumerate(tokens or ()):
                n = sum(began < at <= tick for at, who in steps if who == m)
                weights[m] *= n * num_tokens**2

            weights /= weights.sum()
            tensors = []
            for name in fragments[(tick + phase) // slot % len(fragments)]:
                at = slice(ends[name] - math.prod(SHAPES[name]), ends[name])
                staged = local[:, at].copy()
                tensors.append((at, staged, average(x[at] - staged, weights)))
            flying.append((tick, tensors))
    return local, x


def radial_directional(deltas, weights):
    """Mean length times the direction of the mean direction."""
    sizes = np.linalg.norm(deltas, axis=1)
    by = np.where(sizes > 0, sizes, 1.0)  # 1 for a delta of zeros.
    u = weights @ (deltas / by[:, None])
    return weights @ sizes * u / np.linalg.norm(u)


def async_sparta(s, interval, subset, decay, is_delayed):
    """`subset(turn)` is a mask of the entries; as in the paper, of parameters."""
    local = s.copies()
    d = np.zeros_like(s.copies())
    sent = []
    outer = local

    for turn, t in enumerate(s.rounds(interval)):
        local = s.round(local, t, interval)
        sent.append(local)

        of = turn - is_delayed
        if of >= 0:
            drawn = subset(of)
            old = sent[of]
            kept = decay if of > 0 else 0.0
            d = np.where(drawn, kept * d + (1 - kept) * (local - old), d)
            local = np.where(drawn, old.mean(0) + d, local)

        outer = local

    left = s.num_steps % interval
    return s.round(local, s.num_steps - left, left), outer.mean(0)


def loscar(s, interval, delay, mask):
    """`mask(tick)` is the round's; as in the paper, of parameters."""
    x = s.params
    local = s.copies()
    flying = []

    for tick in range(1, s.num_steps + 1):
        local = s.step(local, tick - 1)

        for _, drawn, staged in [f for f in flying if f[0] + delay == tick]:
            center = staged.mean(0)
            x = np.where(drawn, center, x)
            local = np.where(drawn, center + (local - staged), local)

        flying = [f for f in flying if f[0] + delay > tick]
        if tick % interval == 0:
            flying.append((tick, mask(tick), local))

    return local, x
