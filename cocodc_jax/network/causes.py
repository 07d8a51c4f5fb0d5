"""Explains bad cells of the matrix of pairs (row sends, column receives) by causes.

By as few as do, the one that explains most first:

    most of a row       the sender        most of the row and of the column   the region
    most of a column    the receiver      most of every row and column    the network
    a cell by itself    the link

Where two groups of at least two regions each have nothing but bad cells between them,
the network is cut in two: a partition.
"""

from __future__ import annotations

import numpy as np

_ALONE = 4.0  # times as late as any other
_LEAST_CELLS = 5  # of three regions, one of which did not come


def alone(late: np.ndarray) -> np.ndarray:
    """Tell which cell of the matrix of pairs is late as no other one is."""
    found = np.zeros(late.shape, bool)
    if np.isfinite(late).sum() < _LEAST_CELLS:
        return found
    known = np.where(np.isnan(late), 0.0, late)
    first = np.unravel_index(np.argmax(known), known.shape)
    rest = known.copy()
    rest[first] = 0.0
    found[first] = known[first] > _ALONE * rest.max()
    return found


def explain(
    bad: np.ndarray, unknown: np.ndarray | None = None
) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
    """Explain bad cells of the matrix of pairs by as few causes as do.

    >>> bad = np.zeros((4, 4), bool)
    >>> bad[1] = [True, False, True, True]
    >>> bad[2, 3] = True
    >>> [(kind, where) for kind, where, _ in explain(bad)]
    [('sender', (1,)), ('link', (2, 3))]
    """
    num = len(bad)
    there = ~(np.eye(num, dtype=bool) if unknown is None else unknown)
    np.fill_diagonal(there, False)
    left, lines = bad & there, []
    if not left.any():
        return []
    if part := _cut_off(left):
        return [("partition", part, left)]
    shares = [left.sum(axis) > there.sum(axis) / 2 for axis in (0, 1)]
    if num > 2 and np.all(shares):
        return [("network", (), left)]
    while True:
        candidates = []
        for i in range(num):
            for kind, cells in (("sender", np.s_[i, :]), ("receiver", np.s_[:, i])):
                count = int(left[cells].sum())
                if count > 1 and 2 * count > there[cells].sum():
                    candidates.append((count, kind, i, cells))
        if not candidates:
            break
        _, kind, i, cells = max(candidates, key=lambda found: found[0])
        line = np.zeros_like(left)
        line[cells] = left[cells]
        left = left & ~line
        lines.append((kind, i, line))
    found = []
    for kind, i, line in lines:
        other = [x for x in lines if x[1] == i and x[0] != kind]
        if not other:
            found.append((kind, (i,), line))
        elif kind == "sender":
            found.append(("region", (i,), line | other[0][2]))
    for i, j in np.argwhere(left):
        cell = np.zeros_like(left)
        cell[i, j] = True
        found.append(("link", (int(i), int(j)), cell))
    return found


def _cut_off(bad: np.ndarray) -> tuple[int, ...]:
    """Return the smaller of two groups with only bad cells between them, () if none is.

    Each has at least two regions; of equal ones it is that without region 0.
    """
    num = len(bad)
    group = {0}
    joined = ~(bad & bad.T)
    while more := {
        j for i in group for j in range(num) if joined[i, j] and j not in group
    }:
        group |= more
    rest = sorted(set(range(num)) - group)
    inside = joined[np.ix_(rest, rest)]
    is_one = len(rest) > 1 and bool(
        (np.linalg.matrix_power(inside.astype(int), len(rest)) > 0).all()
    )
    if len(group) < 2 or not is_one:
        return ()
    return tuple(min(rest, sorted(group), key=len))
