import inspect
import itertools

import pytest

from cocodc_jax.network.links import LinkChange
from cocodc_jax.network.world import (
    load_changes,
    load_topology,
    parse_topology,
    world,
    world_regions,
)

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
    topology = world(world_regions(), 2.0)
    delay = topology.at().delay_s
    assert (delay == delay.T).all()
    assert (
        topology.links[0][1].latency_s == 0.0325
    )  # us-east, us-west: 65 ms there and back
    off_diagonal = [delay[i, j] for i, j in itertools.permutations(range(9), 2)]
    assert min(off_diagonal) == 0.0125  # the two European regions
    assert max(off_diagonal) == 0.165  # Singapore, Sao Paulo


def test_world_keeps_the_order_asked_for():
    topology = world(("asia-northeast", "us-east"), 1.0)
    assert topology.regions == ("asia-northeast", "us-east")
    assert topology.links[0][1].latency_s == 0.075


def test_unknown_region():
    with pytest.raises(ValueError, match="region 'mars' is unknown; known are"):
        world(("mars",), 1.0)


def test_file_is_read_as_documented(tmp_path):
    path = tmp_path / "links.yaml"
    path.write_text(TABLE)
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
    ],
)
def test_bad_tables(table, message):
    with pytest.raises(ValueError, match=message):
        parse_topology(table)


def test_bad_file_is_named_on_one_line(tmp_path):
    path = tmp_path / "links.yaml"
    path.write_text("regions: [a\nlinks: ]")
    with pytest.raises(ValueError, match="links.yaml: ") as error:
        load_topology(path)
    assert "\n" not in str(error.value)


def test_changes_are_read_as_documented(tmp_path):
    path = tmp_path / "schedule.yaml"
    path.write_text(
        inspect.cleandoc(load_changes.__doc__ or "")
        .partition("```yaml")[2]
        .partition("```")[0]
    )
    names = ("region0", "region1", "region2")
    assert load_changes(path, names) == (
        LinkChange(20, 5, 0),
        LinkChange(40, 30, 0.1, source=0, target=2),
        LinkChange(40, 30, 0.1, source=2, target=0),
        LinkChange(60, 10, extra_latency_s=0.08, source=1),
    )
    for text, message in (
        ("{start_s: 1}", "changes={'start_s': 1} must be a list"),
        ("[{start_s: 1, for_s: 2}]", "unknown key 'for_s'"),
        ("[{start_s: 1, duration_s: 2, from: x}]", "region 'x' is not among"),
        ("[", "while parsing"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"schedule\.yaml: ") as raised:
            load_changes(path, names)
        assert message in str(raised.value)
