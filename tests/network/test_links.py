import math

import numpy as np
import pytest

from cocodc_jax.network.links import Link, LinkChange, Topology, uniform


def test_rate_is_in_bytes():
    link = Link(bandwidth_gbps=8.0, latency_s=0.5)
    assert (link.bytes_per_s, link.delay_s) == (1e9, 0.5)


def test_jitter_counts_at_its_upper_end():
    assert Link(1.0, 0.5, jitter_s=0.25).delay_s == 0.75


def test_loss_bounds_a_stream_by_the_mathis_formula():
    # 1448 bytes, 0.1 s round trip, 1.5e-4 lost: 14480 * sqrt(1e4) bytes per second.
    link = Link(bandwidth_gbps=1.0, latency_s=0.05, loss=1.5e-4)
    assert link.bytes_per_s == pytest.approx(1448 / 0.1 * 100)
    # On a slow wire the wire is the bound, less what is lost.
    slow = Link(bandwidth_gbps=0.008, latency_s=0.05, loss=1.5e-4)
    assert slow.bytes_per_s == pytest.approx(1e6 * (1 - 1.5e-4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bandwidth_gbps": 0.0, "latency_s": 0.0}, "bandwidth_gbps=0.0 must be pos"),
        ({"bandwidth_gbps": 1.0, "latency_s": -1.0}, "latency_s=-1.0 must be finite"),
        ({"bandwidth_gbps": 1.0, "latency_s": math.nan}, "latency_s=nan must be"),
        ({"bandwidth_gbps": 1.0, "latency_s": 0.0, "jitter_s": -1}, "jitter_s=-1"),
        (
            {"bandwidth_gbps": 1.0, "latency_s": 0.0, "loss": 1.0},
            r"loss=1.0 must be in",
        ),
    ],
)
def test_link_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Link(**arguments)


def test_change_errors():
    with pytest.raises(ValueError, match="duration_s=inf must be positive and finite"):
        LinkChange(0.0, math.inf)
    with pytest.raises(ValueError, match="bandwidth_factor=-1 must be finite"):
        LinkChange(0.0, 1.0, bandwidth_factor=-1)


def test_topology_errors():
    link = Link(1.0, 0.0)
    with pytest.raises(ValueError, match="must be distinct names"):
        Topology(("a", "a"), ((link,) * 2,) * 2)
    with pytest.raises(ValueError, match="must be 2 rows of 2 links"):
        Topology(("a", "b"), ((link,) * 2,))
    with pytest.raises(
        ValueError, match=r"changes.target=2 must be a region id below 2"
    ):
        uniform(2, link, (LinkChange(0.0, 1.0, target=2),))
    with pytest.raises(ValueError, match="num_regions=0 must be at least 1"):
        uniform(0, link)


def test_links_change_and_come_back():
    changes = (
        LinkChange(1.0, 2.0, bandwidth_factor=0.5, source=0, target=1),
        LinkChange(2.0, 2.0, bandwidth_factor=0.0, extra_latency_s=0.25),
    )
    topology = uniform(2, Link(8.0, 0.5), changes)
    assert topology.change_times_s == (1.0, 2.0, 3.0, 4.0)
    seen = [
        (state.bytes_per_s[0, 1], state.bytes_per_s[1, 0], state.delay_s[1, 0])
        for state in map(topology.at, (0.0, 1.0, 2.5, 3.5, 4.0))
    ]
    assert seen == [
        (1e9, 1e9, 0.5),
        (5e8, 1e9, 0.5),
        (0.0, 0.0, 0.75),
        (0.0, 0.0, 0.75),
        (1e9, 1e9, 0.5),
    ]
    assert np.isinf(np.diag(topology.at(2.5).bytes_per_s)).all()


def test_subset_keeps_the_order_asked_for():
    link = Link(8.0, 0.0)
    rows = tuple(tuple(Link(8.0, 10 * i + j) for j in range(3)) for i in range(3))
    state = Topology(("a", "b", "c"), rows).at().subset((2, 0))
    assert state.delay_s.tolist() == [[0.0, 20.0], [2.0, 0.0]]
    assert link.delay_s == 0.0


def test_a_subset_keeps_its_links_and_their_changes():
    changes = (LinkChange(1.0, 2.0, source=2), LinkChange(1.0, 2.0, source=1))
    links = [[Link(1.0 + 3 * i + j, 0.1) for j in range(3)] for i in range(3)]
    rows = tuple(map(tuple, links))
    part = Topology(("a", "b", "c"), rows, changes).subset((2, 0))
    assert part.regions == ("c", "a")
    assert part.links[0][1] == links[2][0]
    assert [change.source for change in part.changes] == [0]
