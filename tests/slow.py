"""Cases that stand beside others like them carry the marker `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, `slow` but for the quick ones.

    Args:
      cases: the value of the argument, or a tuple of the values of several.
      quick: the cases that every run of the tests has.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"quick={unknown} are no cases"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
