"""All runs of a few regions with few faults hold the invariants; see `explorer.py`.

Longer: `python -m tests.program.elastic.explorer --members=3 --faults=2`.
"""

import pytest

from cocodc_jax.elastic.messages import Beat
from cocodc_jax.elastic.protocol import Member
from tests.program.elastic.explorer import Broken, explore


@pytest.mark.parametrize(
    ("num", "rounds", "min_regions", "every"),
    [(2, 6, 1, 6), (2, 5, 2, 6), (3, 4, 2, 16)],
)
def test_every_run_with_one_fault_holds(num, rounds, min_regions, every):
    explored, is_all = explore(num, 1, rounds, min_regions, every=every)
    assert is_all
    assert explored.ends > 20 * num


learn_of_own_lives = Member._learn_of_own_lives


def the_newer_ends_too(self, message, now):
    """As `Member._learn_of_own_lives`, but a life with a seat also ends a newer one."""
    learn_of_own_lives(self, message, now)
    seat = isinstance(message, Beat) and message.view.seats.get(self.region)
    if seat and seat.boot < self.boot:
        self.is_superseded = True
        self.why_left = "an older life takes part"


@pytest.mark.parametrize(
    ("where", "name", "instead", "broken"),
    [
        (Member, "_learn_of_own_lives", lambda self, message, now: None, "all go on"),
        (Member, "_learn_of_own_lives", the_newer_ends_too, "one life"),
        (Member, "_ask", lambda self, now: None, "all go on"),
        (Member, "_count_promise", lambda *_: None, "all go on"),
    ],
)
def test_the_explorer_finds_the_fault_of_a_protocol_without_a_rule(
    monkeypatch, where, name, instead, broken
):
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(Broken, match=broken):
        explore(2, 1, 6)


def test_the_explorer_finds_a_view_of_too_few_regions(monkeypatch):
    init = Member.__init__

    def careless(self, *args):
        init(self, *args)
        self._min = 1

    monkeypatch.setattr(Member, "__init__", careless)
    with pytest.raises(Broken, match="enough"):
        explore(2, 1, 6, min_regions=2)
