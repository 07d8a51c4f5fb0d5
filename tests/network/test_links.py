"""Links by hand, as they change, from tables, and of the world."""

import inspect
import itertools
import math

import numpy as np
import pytest

from cocodc_jax.network.links import Link, LinkChange, Topology, uniform
from cocodc_jax.network.world import (
    REGIONS,
    load_changes,
    load_topology,
    parse_topology,
    world,
)


def test_the_rate_is_in_bytes_and_jitter_counts_at_its_upper_end():
    link = Link(bandwidth_gbps=8.0, latency_s=0.5)
    assert (link.bytes_per_s, link.delay_s) == (1e9, 0.5)
    assert Link(1.0, 0.5, jitter_s=0.25).delay_s == 0.75


def test_loss_bounds_a_stream_by_the_mathis_formula():
    # 1448 bytes, 0.1 s round trip, 1.5e-4 lost: 14480 * sqrt(1e4) bytes per second.
    link = Link(bandwidth_gbps=1.0, latency_s=0.05, loss=1.5e-4)
    assert link.bytes_per_s == pytest.approx(1448 / 0.1 * 100)
    # On a slow link its rate is the bound, less the lost share.
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
def test_wrong_arguments_are_named(make, message):
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
    usual = (1e9, 1e9, 0.5)
    out = (0.0, 0.0, 0.75)
    assert seen == [usual, (5e8, 1e9, 0.5), out, out, usual]
    assert np.isinf(np.diag(topology.at(2.5).bytes_per_s)).all()


def test_changes_move_the_rate_of_a_lossy_link():
    changes = (LinkChange(0.0, 1.0, 0.1), LinkChange(1.0, 1.0, extra_latency_s=0.1))
    lossy = uniform(2, Link(1.0, 0.05, loss=0.001), changes)
    narrow = Link(0.1, 0.05, loss=0.001)
    far = Link(1.0, 0.15, loss=0.001)
    rates = [lossy.at(t).bytes_per_s[0, 1] for t in (0.5, 1.5)]
    assert rates == pytest.approx([narrow.bytes_per_s, far.bytes_per_s])


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


TABLE = """
regions: [paris, tokyo, dallas]
default: {bandwidth_gbps: 1, latency_ms: 60, jitter_ms: 2, loss: 0}
links:
  - {between: [paris, tokyo], latency_ms: 110}
  - {from: dallas, to: tokyo, bandwidth_gbps: 0.5}
changes:
  - {start_s: 60, duration_s: 5, bandwidth_factor: 0}
  - {between: [paris, tokyo], start_s: 90, duration_s: 30, extra_latency_ms: 40}
"""


def test_world_is_symmetric_and_complete():
    topology = world(REGIONS, 2.0)
    delay = topology.at().delay_s
    assert (delay == delay.T).all()
    # us-east, us-west: 65 ms there and back.
    assert topology.links[0][1].latency_s == 0.0325
    off_diagonal = [delay[i, j] for i, j in itertools.permutations(range(9), 2)]
    assert min(off_diagonal) == 0.0125  # the two European regions
    assert max(off_diagonal) == 0.165  # Singapore, Sao Paulo


def test_world_has_the_regions_and_the_order_asked_for():
    topology = world(("asia-northeast", "us-east"), 1.0)
    assert topology.regions == ("asia-northeast", "us-east")
    assert topology.links[0][1].latency_s == 0.075
    with pytest.raises(ValueError, match="region 'mars' is unknown; known are"):
        world(("mars",), 1.0)


def test_file_is_read_as_documented(tmp_path):
    path = tmp_path / "links.yaml"
    path.write_text(TABLE, encoding="utf-8-sig")

    topology = load_topology(path)
    links = topology.links
    assert topology.regions == ("paris", "tokyo", "dallas")
    assert [links[0][1].latency_s, links[1][0].latency_s] == [0.11, 0.11]
    assert [links[2][1].bandwidth_gbps, links[1][2].bandwidth_gbps] == [0.5, 1.0]
    assert links[0][2].delay_s == 0.062

    ends = [(c.source, c.target) for c in topology.changes]
    assert ends == [(None, None), (0, 1), (1, 0)]
    assert topology.at(62).bytes_per_s[0, 1] == 0
    assert topology.at(95).delay_s[1, 0] == pytest.approx(0.152)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1], "topology=.* must be a table"),
        ({"regions": ["a"], "lnks": []}, "topology: unknown key 'lnks'"),
        ({"regions": "a"}, "regions='a' must be a list"),
        ({"regions": ["a", "b"]}, "link a to b: bandwidth_gbps=None must be a number"),
        (
            {"regions": ["a", "b"], "default": {"bandwidth_gbps": 1, "latency_ms": -1}},
            "link a to b: latency_s=-0.001 must be finite",
        ),
        ({"regions": ["a", "b"], "links": [{"from": "a"}]}, "must name two regions"),
        (
            {"regions": ["a", "b"], "links": [{"from": "a", "to": "c"}]},
            "links: region 'c' is not among",
        ),
        (
            {"regions": ["a", "b"], "links": [{"between": ["a", "a"]}]},
            "between=.* must name two regions",
        ),
        ({"regions": [1, 2], "links": [{"from": 1, "to": 1}]}, "must name two regions"),
    ],
)
def test_a_table_that_makes_no_links_is_named(table, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(table)


@pytest.mark.parametrize("content", [b"regions: [a\nlinks: ]", b"\xff\xfe\x00"])
def test_bad_file_is_named_on_one_line(content, tmp_path):
    path = tmp_path / "links.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="links.yaml: ") as error:
        load_topology(path)
    assert "\n" not in str(error.value)


def test_changes_are_read_as_documented(tmp_path):
    path = tmp_path / "schedule.yaml"
    documented = inspect.cleandoc(load_changes.__doc__ or "")
    path.write_text(documented.partition("```yaml")[2].partition("```")[0])

    names = ("region0", "region1", "region2")
    assert load_changes(path, names) == (
        LinkChange(20, 5, 0),
        LinkChange(40, 30, 0.1, source=0, target=2),
        LinkChange(40, 30, 0.1, source=2, target=0),
        LinkChange(60, 10, extra_latency_s=0.08, source=1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{start_s: 1}", "changes={'start_s': 1} must be a list"),
        ("[{start_s: 1, for_s: 2}]", "unknown key 'for_s'"),
        ("[{start_s: 1, duration_s: 2, from: x}]", "region 'x' is not among"),
        ("[", "while parsing"),
    ],
)
def test_a_file_that_holds_no_changes_is_named(tmp_path, text, message):
    path = tmp_path / "schedule.yaml"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"schedule\.yaml: ") as raised:
        load_changes(path, ("region0", "region1"))
    assert message in str(raised.value)
