"""Goodput: formulas worked by hand, and the simulation that must agree with them."""

import math

import numpy as np
import pytest

from cocodc_jax.network.goodput import (
    Failures,
    alone,
    kept_share,
    of_steps,
    of_time,
    simulated,
    together,
)

DAY = 86_400.0


def quorum_share(failures, total, quorum):
    """Return the goodput if only time is lost, see the module."""
    a = failures.between_s / (failures.between_s + failures.repair_s)
    return sum(
        k / total * math.comb(total, k) * a**k * (1 - a) ** (total - k)
        for k in range(quorum, total + 1)
    )


def test_shares_of_the_time_by_hand():
    """F 100, R 50, s 100 ln 2: a stretch is tried 2 times, 150 s for a failure."""
    failures = Failures(100, 50)
    stretch = 100 * math.log(2)
    assert alone(failures, stretch) == pytest.approx(stretch / 150)
    assert alone(failures, 0) == pytest.approx(2 / 3)
    # Two regions in one job fail twice as often: e^{2 ln 2} - 1 = 3, 50 + 50 each time.
    assert together(failures, 2, stretch) == pytest.approx(stretch / 300)


def test_goodput_of_regions_that_all_wait_equals_a_drawn_run():
    """Drawn: all of three regions stand still while one is waited for."""
    failures = Failures(300, 40)
    rng = np.random.default_rng(0)
    wait = 15.0
    up_until = rng.exponential(300, size=3)  # Of each region's own clock of steps.
    back_at = np.zeros(3)
    seconds = steps = done = 0.0

    for _ in range(4000):
        # All clocks but that of the time stand still during a wait.
        m = int(np.argmin(up_until))
        advanced = up_until[m] - steps
        steps = up_until[m]
        seconds += advanced + wait
        back_at[m] = steps + failures.repair_s - wait
        done -= failures.repair_s - wait
        up_until[m] = back_at[m] + rng.exponential(300)

    shares = 1 + done / (3 * steps)
    assert of_steps(failures, wait) == pytest.approx(shares, rel=0.01)
    drawn = shares * steps / seconds
    assert of_time(failures, 3, wait) == pytest.approx(drawn, rel=0.03)
    assert of_steps(failures, 0) == alone(failures, 0)
    with pytest.raises(ValueError, match="wait_s=41 must be between 0 and repair_s=40"):
        of_steps(failures, 41)


def test_a_stretch_is_the_expectation_of_tries():
    """The mean time until s seconds have passed without a failure, drawn."""
    rng = np.random.default_rng(0)
    rate = 0.5
    repair = 3.0
    stretch = 2.0
    spent = []

    for _ in range(4000):
        total = 0.0
        while (up := rng.exponential(1 / rate)) < stretch:
            total += up + repair
        spent.append(total + stretch)

    expected = stretch / np.mean(spent)
    assert kept_share(rate, repair, stretch) == pytest.approx(expected, rel=0.05)


FAILURES = Failures(3600.0, 900.0)


def test_regions_that_go_on_alone_are_simulated_by_the_formula_of_one():
    drawn = simulated(FAILURES, 4, 1, 600.0, 100 * DAY)
    assert drawn == pytest.approx(alone(FAILURES, 600.0), rel=0.02)


@pytest.mark.parametrize("quorum", [1, 3, 4])
def test_a_simulated_quorum_equals_its_formula(quorum):
    drawn = simulated(FAILURES, 4, quorum, 0.0, 400 * DAY)
    assert drawn == pytest.approx(quorum_share(FAILURES, 4, quorum), rel=0.03)


def test_the_share_of_a_quorum_by_hand():
    assert quorum_share(FAILURES, 4, 1) == pytest.approx(0.8)
    assert quorum_share(FAILURES, 4, 4) == pytest.approx(0.8**4)


def test_the_same_seed_draws_the_same():
    one, other = (simulated(Failures(60, 20), 3, 2, 5, DAY, 5) for _ in range(2))
    assert one == other


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="between_s=0 must be positive"):
        Failures(0, 1)
    with pytest.raises(ValueError, match="repair_s=-1 must be finite"):
        Failures(1, -1)
    with pytest.raises(ValueError, match="quorum=5 must be between 1 and the number"):
        simulated(Failures(1, 1), 4, 5, 0, 1)
