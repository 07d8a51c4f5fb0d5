"""Every method over a simulated network, read off the method itself."""

import numpy as np
import pytest

from cocodc_jax import methods
from cocodc_jax.network import exchanges
from cocodc_jax.network.collectives import collective_cost
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.network.simulator import simulate_method
from cocodc_jax.network.workload import Workload
from cocodc_jax.network.world import world

LINK = Link(bandwidth_gbps=8.0, latency_s=0.05)


def simulated(name, num_steps=None, step_time_s=None, **arguments):
    method = methods.get(name, **arguments)
    num_regions = method.num_regions or 4
    num = method.num_fragments
    share = exchanges.message_share(method)
    work = Workload(
        (4e9 / num * share,) * num,
        step_time_s or (1.0,) * num_regions,
        answer_share=1 / share,
    )
    schedule = exchanges.schedule_of(method)
    steps = num_steps or (3 * schedule.sync_interval if schedule else 10)

    return simulate_method(uniform(num_regions, LINK), work, method, steps)


@pytest.mark.parametrize("slowest_s", [1.0, 2.5])
@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_is_simulated(name, slowest_s):
    num_regions = methods.get(name).num_regions or 4
    steps_s = (1.0, slowest_s, 1.5, 1.0)[:num_regions]
    timeline = simulated(name, step_time_s=steps_s)
    ends = timeline.num_steps * np.array(timeline.step_time_s) + timeline.stall_s
    np.testing.assert_allclose(timeline.times_s(timeline.num_steps), ends)
    sends = name not in ("apart", "snoo", "gpa")
    assert (max(timeline.bytes_sent) > 0) == sends
    assert bool(timeline.syncs) == (name != "apart")

    for sync in timeline.syncs:
        assert sync.start_s <= sync.arrival_s <= sync.merge_s + 1e-9


def test_an_exchange_at_every_step_blocks_every_step():
    timeline = simulated("data_parallel", 5)
    cost = collective_cost(uniform(4, LINK).at(), "ring", 4e9)
    assert timeline.sim_s == pytest.approx(5 * (1 + cost.seconds))


def test_messages_have_the_bytes_of_their_parameters():
    share = {n: exchanges.message_share(methods.get(n)) for n in methods.METHODS}

    assert share["data_parallel"] == share["cocodc"] == share["heloco"] == 1
    assert share["noloco"] == 2  # Parameters and pseudo-gradients.
    assert share["distributed_lion"] == pytest.approx(1 / 32, rel=1e-3)  # One bit.
    assert share["des_loc"] == pytest.approx(1 + 1 / 3 + 1 / 6)
    assert share["mt_dao"] == pytest.approx(1 + 2 / 3 + 1 / 6)  # Two momenta.

    int8 = exchanges.message_share(methods.get("diloco", compress="int8"))
    assert int8 == pytest.approx(1 / 4 + 4 / 1024)  # A scale for 256 numbers
    assert share["sparseloco"] < 0.02  # 14 bits for 128 of 4096


def test_encoded_messages_are_gathered_and_others_summed():
    gathered = {n for n in methods.METHODS if exchanges.is_gathered(methods.get(n))}
    assert gathered == {
        "sparseloco",
        "muloco",
        "qsparse",
        "dilocox",
        "demo",
        "diloco_demo",
        "distributed_lion",
        "dct_threshold",
    }

    assert exchanges.crossing(methods.get("diloco")) == "ring"
    assert exchanges.crossing(methods.get("sparseloco")) == "gather"
    assert exchanges.crossing(methods.get("sparseloco"), "tree") == "tree"


def test_pairs_cost_one_message_there_and_one_back_at_once():
    state = uniform(4, LINK).at()
    cost = exchanges.in_pairs(state, 1e9)
    assert cost.seconds == pytest.approx(1.05)
    assert cost.bytes_sent == (1e9,) * 4
    # Of three regions one stays alone, each as often as the others.
    odd = exchanges.in_pairs(uniform(3, LINK).at(), 3e9)
    assert odd.bytes_sent == pytest.approx((2e9,) * 3)
    assert exchanges.in_pairs(uniform(1, LINK).at(), 1e9).seconds == 0


def test_messages_to_neighbours_on_a_ring_go_one_after_the_other():
    cost = exchanges.to_neighbours(uniform(4, LINK).at(), 1e9)

    assert cost.seconds == pytest.approx(2.05)  # One line out for both messages.
    assert cost.bytes_sent == (2e9,) * 4


def test_each_of_two_regions_has_one_neighbour():
    assert exchanges.to_neighbours(uniform(2, LINK).at(), 1e9).bytes_sent == (1e9,) * 2
    assert exchanges.to_neighbours(uniform(1, LINK).at(), 1e9).seconds == 0


def test_the_graph_decides_how_messages_cross():
    assert exchanges.crossing(methods.get("lt_admm")) is exchanges.to_neighbours
    complete = methods.get("lt_admm", graph="complete")
    assert exchanges.crossing(complete) == "gather"


def test_one_ring_costs_a_ring_all_reduce_and_a_line_bounds_several():
    state = uniform(5, LINK).at()
    ring = collective_cost(state, "ring", 5e9)
    one = exchanges.by_rings(1)(state, 5e9)
    two = exchanges.by_rings(2)(state, 5e9)
    assert one.seconds == pytest.approx(ring.seconds)
    assert one.bytes_sent == ring.bytes_sent

    # Each link carries half, but the line of a region all of it.
    assert two.seconds == pytest.approx(ring.seconds)
    assert two.bytes_sent == pytest.approx(ring.bytes_sent)

    wide = world(("us-east", "us-west", "asia-south", "europe-west"), 8.0).at()
    assert exchanges.by_rings(2)(wide, 4e9).transfer_s < ring.transfer_s


def test_a_slow_region_that_syncs_alone_delays_no_other():
    timeline = simulated("delayed_nesterov", 200, (1.0, 1.0, 1.0, 4.0))
    assert timeline.stall_s[0] == 0
    # There and back 2 (4 + 0.05) s, after 50 steps of the fastest each.
    assert timeline.stall_s[1:] == pytest.approx((4 * 8.1, 4 * 8.1, 4 * 8.1))


@pytest.mark.parametrize("name", ["noloco", "multi_ring", "heloco"])
def test_a_collective_is_refused_for_methods_without_a_choice(name):
    with pytest.raises(ValueError, match=f"collective='tree' .*'{name}'"):
        exchanges.crossing(methods.get(name), "tree")
