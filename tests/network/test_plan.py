import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodc_jax.network.links import Link, LinkChange, uniform
from cocodc_jax.network.plan import Job, make_plan
from cocodc_jax.network.world import world
from cocodc_jax.sync.schedules import adaptive, staggered

# Two regions, 1 GB/s, no delay: a ring all-reduce of b GB takes b seconds.
FAST = uniform(2, Link(8.0, 0.0))


def test_on_a_fast_network_a_plan_keeps_its_initial_values():
    # 4 fragments of 0.5 GB: T_s = 0.5 s, T_c = 1 s; 0.4 * 100 / 0.5 = 80 fit.
    plan = make_plan(FAST, Job(2e9, 1.0))
    assert (plan.num_fragments, plan.sync_interval) == (4, 100)
    assert (plan.delay_steps, plan.syncs_per_interval) == (1, 80)
    assert plan.sync_time_s == 0.5
    assert plan.utilization == 1.0
    # These are the initial values of a plan, not the user's.
    assert "K = 4 fragments, no more needed: a sync takes 0.5 s" in plan.explain()
    assert "H = 100 steps, no more needed: 4 syncs use" in plan.explain()


def test_the_worked_example_of_adaptive_transmission():
    # K 4, H 100, tau 5, gamma 0.4 give N = 8.
    plan = make_plan(FAST, Job(4 * 5e9, 1.0))
    assert (plan.delay_steps, plan.syncs_per_interval) == (5, 8)


def test_a_slow_network_raises_fragments_and_interval():
    # 80 GB: 4 fragments would take 20 s each, 8 take 10 s; 8 * 10 / 0.4 = 200 steps.
    plan = make_plan(FAST, Job(80e9, 1.0))
    assert (plan.num_fragments, plan.delay_steps) == (8, 10)
    assert (plan.sync_interval, plan.syncs_per_interval) == (200, 8)
    text = plan.explain()
    assert "K = 8 fragments instead of 4" in text
    assert "H = 200 steps instead of 100" in text


def test_an_interval_is_a_multiple_of_the_fragments():
    plan = make_plan(FAST, Job(2e9, 1.0, 6))
    assert (plan.num_fragments, plan.sync_interval) == (6, 102)
    assert "H = 102 steps instead of 100, a multiple of 6" in plan.explain()


def test_a_plan_says_that_a_network_is_too_slow():
    plan = make_plan(FAST, Job(800e9, 1.0, max_fragments=8))
    assert plan.delay_steps == 100
    message = "still takes 100 s, more than 10 steps (10 s): compress more"
    assert message in plan.explain()


def test_delay_or_bandwidth_decides_the_collective():
    far = uniform(8, Link(8.0, 1.0))
    assert make_plan(far, Job(4e3, 1.0)).collective == "pairs"
    near = uniform(8, Link(8.0, 0.0))
    assert make_plan(near, Job(4e9, 1.0)).collective == "ring"


def test_the_ring_is_named_region_by_region():
    # Round trips around this ring: 190, 120, 125, 65. Data makes six hops, so the worst
    # two in a row count twice: 500 + 310. The shorter ring by way of Europe first, 70,
    # 120, 220, 65, has 475 + 340.
    regions = ("us-east", "us-west", "asia-south", "europe-west")
    text = make_plan(world(regions, 1.0), Job(4e9, 1.0)).explain()
    order = "us-east, asia-south, europe-west, us-west"
    reverse = "us-east, us-west, europe-west, asia-south"
    assert order in text or reverse in text


@settings(deadline=None, max_examples=30)
@given(
    st.floats(1e6, 1e11),
    st.floats(0.05, 5.0),
    st.integers(1, 6),
    st.integers(1, 200),
    st.floats(0.1, 1.0),
)
def test_a_plan_keeps_its_inequalities_and_does_not_stall(
    model_bytes, step_time_s, num, interval, share
):
    job = Job(model_bytes, step_time_s, num, 32, interval, share)
    plan = make_plan(uniform(3, Link(1.0, 0.05)), job)
    assert num <= plan.num_fragments <= 32
    assert plan.sync_interval >= interval

    # A plan that either of the two methods takes.
    plan_of = (plan.sync_interval, plan.num_fragments, plan.delay_steps)
    staggered(*plan_of)
    adaptive(*plan_of, plan.syncs_per_interval)

    assert plan.delay_steps * step_time_s >= plan.sync_time_s * (1 - 1e-6)
    assert plan.delay_steps < plan.sync_interval

    used = plan.syncs_per_interval * plan.sync_time_s
    assert used <= share * plan.sync_interval * step_time_s * (1 + 1e-6)

    assert plan.num_fragments <= plan.syncs_per_interval <= plan.sync_interval
    assert plan.delay_steps == max(1, math.ceil(plan.sync_time_s / step_time_s - 1e-9))
    assert plan.utilization == pytest.approx(1.0, abs=1e-6)


def test_a_change_at_time_0_does_not_count():
    outage = LinkChange(0.0, 1.0, bandwidth_factor=0.0)
    ways = [uniform(2, Link(1.0, 0.01), changes) for changes in ((), (outage,))]
    one, other = (make_plan(way, Job(1e6, 1.0)) for way in ways)
    assert one == other


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: make_plan(uniform(1, Link(1.0, 0.0)), Job(1.0, 1.0)),
            "a plan needs at least two regions",
        ),
        (
            lambda: Job(1.0, 1.0, network_share=0),
            "network_share=0 must be in",
        ),
        (
            lambda: Job(1.0, 1.0, max_fragments=2),
            "max_fragments=2 must not be below num_fragm",
        ),
        (lambda: Job(0, 1.0), "model_bytes=0 must be positive"),
        (
            lambda: Job(1.0, 1.0, sync_interval=0),
            "sync_interval=0 must be at least 1",
        ),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
