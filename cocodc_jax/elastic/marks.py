"""Marks: whether the outer models of the regions of a view are the same.

After each sync every region reports what its outer fragment has become, in a few bytes:

    bits     a hash of all bits of the fragment
    at       p . x / sqrt(n), with p random signs that all regions know
    scale    the root mean square of x

Equal hashes are equal fragments. Processors that round differently give other bits and
nearly the same projection: that is reported once, and nothing is done. Fragments differ
if their projections are further apart than `_ROUNDING` of their scale. Then the mark
that most regions are near is right, of equally many that of the coordinator, or else of
the lowest region. A region whose mark is not near it takes a copy from the others.

The factor is ours: a sum in float32 of 10^9 values is exact to about 10^-5 of it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from cocodc_jax.elastic.messages import Life, Mark, SyncId, View

_ROUNDING = 1e-4
_KEPT = 64  # Syncs whose marks are remembered.
_SENT = 4  # Marks in a heartbeat, as some are lost.


class Finding(NamedTuple):
    """What the marks of one sync show."""

    sync: SyncId
    astray: tuple[int, ...]  # The regions whose fragment differs from the right one,
    right: tuple[int, ...]  # and the others.
    is_rounding: bool = False  # Some of them differ by rounding only.


class Marks:
    """The marks of the last syncs, of all regions."""

    def __init__(self):
        self._of: collections.OrderedDict[SyncId, dict[Life, Mark]]
        self._of = collections.OrderedDict()
        self._compared: collections.deque[SyncId] = collections.deque(maxlen=_KEPT)
        self._own: collections.deque[Mark] = collections.deque(maxlen=_SENT)

    @property
    def last(self) -> tuple[Mark, ...]:
        """This region's last marks, for the others."""
        return tuple(self._own)

    def note(self, life: Life, marks: Iterable[Mark]) -> None:
        """Record this region's marks."""
        for mark in marks:
            self._own.append(mark)
            self.hear(life, (mark,))

    def hear(self, life: Life, marks: Iterable[Mark]) -> None:
        """Record marks of a life."""
        for mark in marks:
            self._of.setdefault(mark.sync, {})[life] = mark
        while len(self._of) > _KEPT:
            self._of.popitem(last=False)

    def findings(self, view: View) -> list[Finding]:
        """Return the differences in syncs whose marks have all arrived, each once."""
        findings = []
        for sync, marks in self._of.items():
            _, start_step = sync
            due = {
                (region, seat.boot)
                for region, seat in view.seats.items()
                if seat.since_step < start_step
            }
            if sync in self._compared or not due or not due <= marks.keys():
                continue

            self._compared.append(sync)
            present = {life: mark for life, mark in marks.items() if view.has(life)}
            finding = _compare(sync, present, view.epoch.coordinator)
            if finding.astray or finding.is_rounding:
                findings.append(finding)

        return findings


def _compare(sync: SyncId, marks: dict[Life, Mark], coordinator: Life) -> Finding:
    """Return which regions' fragments are right."""

    def rank(life: Life) -> tuple[int, bool, int]:
        others = sum(_is_near(mark, marks[life]) for mark in marks.values())
        return others, life == coordinator, -life[0]

    right = marks[max(marks, key=rank)]
    agreeing = [life for life, mark in marks.items() if _is_near(mark, right)]
    return Finding(
        sync,
        astray=tuple(sorted(r for r, boot in marks if (r, boot) not in agreeing)),
        right=tuple(sorted(r for r, _ in agreeing)),
        is_rounding=any(marks[life].bits != right.bits for life in agreeing),
    )


def _is_near(mark: Mark, other: Mark) -> bool:
    if mark.bits == other.bits:
        return True
    scale = max(mark.scale, other.scale)
    return abs(mark.at - other.at) <= _ROUNDING * scale
