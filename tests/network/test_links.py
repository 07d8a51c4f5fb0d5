import math

import numpy as np
import pytest

from cocodc_jax.network.links import Link, LinkChange, Topology, uniform


def test_the_rate_is_in_bytes_and_jitter_counts_at_its_upper_end():
    link = Link(bandwidth_gbps=8.0, latency_s=0.5)
    assert (link.bytes_per_s, link.delay_s) == (1e9, 0.5)
    assert Link(1.0, 0.5, jitter_s=0.25).delay_s == 0.75


def test_loss_bounds_a_stream_by_the_mathis_formula():
    # 1448 bytes, 0.1 s round trip, 1.5e-4 lost: 14480 * sqrt(1e4) bytes per second.
    link = Link(bandwidth_gbps=1.0, latency_s=0.05, loss=1.5e-4)
    assert link.bytes_per_s == pytest.approx(1448 / 0.1 * 100)
    # On a slow wire the wire is the bound, less what is lost.
    slow = Link(bandwidth_gbps=0.008, latency_s=0.05, loss=1.5e-4)
    assert slow.bytes_per_s == pytest.approx(1e6 * (1 - 1.5e-4))


LINK = Link(1.0, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0.0, 0.0), "bandwidth_gbps=0.0 must be positive and finite"),
        (lambda: Link(1.0, -1.0), "latency_s=-1.0 must be finite and not negative"),
        (lambda: Link(1.0, math.nan), "latency_s=nan must be"),
        (lambda: Link(1.0, 0.0, jitter_s=-1), "jitter_s=-1"),
        (lambda: Link(1.0, 0.0, loss=1.0), r"loss=1.0 must be in"),
        (lambda: LinkChange(0.0, math.inf), "duration_s=inf must be positive and fini"),
        (lambda: LinkChange(0.0, 1.0, -1), "bandwidth_factor=-1 must be finite"),
        (lambda: Topology(("a", "a"), ((LINK,) * 2,) * 2), "must be distinct names"),
        (lambda: Topology(("a", "b"), ((LINK,) * 2,)), "must be 2 rows of 2 links"),
        (
            lambda: uniform(2, LINK, (LinkChange(0.0, 1.0, target=2),)),
            r"changes.target=2 must be a region id below 2",
        ),
        (lambda: uniform(0, LINK), "num_regions=0 must be at least 1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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


def test_a_subset_keeps_its_order_its_links_and_their_changes():
    changes = (LinkChange(1.0, 2.0, source=2), LinkChange(1.0, 2.0, source=1))
    rows = tuple(tuple(Link(8.0, 10 * i + j) for j in range(3)) for i in range(3))
    topology = Topology(("a", "b", "c"), rows, changes)
    part = topology.subset((2, 0))
    assert part.regions == ("c", "a")
    assert part.links[0][1] == rows[2][0]
    assert [change.source for change in part.changes] == [0]
    for state in (topology.at().subset((2, 0)), part.at()):
        assert state.delay_s.tolist() == [[0.0, 20.0], [2.0, 0.0]]
