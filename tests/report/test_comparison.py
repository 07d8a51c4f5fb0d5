"""A comparison worked by hand, and the page that shows it."""

import dataclasses
import html.parser
import re

import pytest

from cocodc_jax.report import page
from cocodc_jax.report.comparison import (
    Run,
    compare,
    eval_curve,
    loss_at_bytes,
    spread,
    steps_to_loss,
)
from tests.report.made_up import run


def evaluated(method, seed, points, **summary):
    records = [
        {"kind": "eval", "step": s, "eval_loss": x, "bytes_sent_per_region": s}
        for s, x in points
    ]
    known = {
        "method": method,
        "seed": seed,
        "eval_loss": points[-1][1],
        "eval_perplexity": 2.0,
        "eval_loss_outer": 1.0,
        "bytes_sent_per_region": 10,
        "stall_seconds": 0.0,
        "exposed_share": 0.125,
        "tokens_per_second": 5.0,
        "goodput": 0.75,
        "seconds": 1.0,
        "correction_ratio": None,
        "region_drift": 0.1,
        "outer_bytes": 64,
    }

    return Run(method, seed, records, known | summary)


def test_steps_to_loss_is_linear_between_evaluations():
    one = evaluated("a", 0, [(10, 4.0), (20, 3.0), (40, 2.0)])
    assert steps_to_loss(one, 3.5) == 15.0
    assert steps_to_loss(one, 2.25) == 35.0
    assert steps_to_loss(one, 5.0) == 10.0
    assert steps_to_loss(one, 1.9) is None


def test_loss_at_bytes_is_linear_and_of_the_last_evaluation_there():
    pairs = [(10, 4.0), (20, 3.5), (20, 3.0), (40, 2.0)]
    assert loss_at_bytes(pairs, 10) == 4.0
    assert loss_at_bytes(pairs, 15) == 3.75
    assert loss_at_bytes(pairs, 20) == 3.0
    assert loss_at_bytes(pairs, 25) == 2.75
    assert loss_at_bytes(pairs, 40) == 2.0

    assert loss_at_bytes(pairs, 41) is None  # Sends less.
    assert loss_at_bytes(pairs, 9) is None  # Before the first evaluation.

    assert loss_at_bytes(evaluated("a", 0, pairs), 30) == 2.5


def test_curve_keeps_the_steps_all_seeds_have():
    curve = eval_curve(
        [evaluated("a", 0, [(10, 4.0), (20, 3.0)]), evaluated("a", 1, [(20, 2.0)])]
    )
    assert curve.steps.tolist() == [20]
    assert (curve.mean[0], curve.low[0], curve.high[0]) == (2.5, 2.0, 3.0)
    with pytest.raises(ValueError, match="no evaluated step in common"):
        eval_curve([evaluated("a", 0, [(1, 1.0)]), evaluated("a", 1, [(2, 1.0)])])


def test_comparison_by_hand():
    runs = [
        evaluated("slow", 0, [(10, 4.0), (20, 2.0)], bytes_sent_per_region=100),
        evaluated("slow", 1, [(10, 4.0), (20, 2.0)], bytes_sent_per_region=100),
        evaluated("fast", 0, [(10, 2.0), (20, 1.0)], correction_ratio=0.5),
        evaluated("fast", 1, [(10, 2.0), (20, 1.5)], correction_ratio=0.7),
    ]

    comparison = compare(runs)
    assert comparison["target_loss"] == 2.0
    slow = comparison["methods"]["slow"]
    fast = comparison["methods"]["fast"]
    assert fast["eval_loss"] == {"mean": 1.25, "half_range": 0.25}
    assert fast["correction_ratio"]["mean"] == pytest.approx(0.6)
    assert slow["correction_ratio"] is None

    assert (slow["steps_to_target"], fast["steps_to_target"]) == (20.0, 10.0)
    assert fast["ratios"] == {"bytes": 0.1, "steps_to_target": 0.5}
    assert slow["seeds"] == [0, 1]


@pytest.fixture
def of_unequal_bytes():
    """Runs of three methods; `evaluated` sends a byte a step."""
    return [
        evaluated("long", 0, [(10, 4.0), (30, 2.0)]),
        evaluated("long", 1, [(20, 3.0), (40, 2.0)]),
        evaluated("short", 0, [(10, 4.0), (20, 3.0)]),
        evaluated("short", 1, [(10, 4.0), (24, 3.0)]),
        evaluated("none", 0, [(0, 4.0), (0, 3.0)]),
        evaluated("none", 1, [(0, 4.0), (0, 3.0)]),
    ]


def test_losses_are_compared_at_the_bytes_of_the_method_that_sends_least(
    of_unequal_bytes,
):
    """Among its seeds the one that sends least counts."""
    comparison = compare(of_unequal_bytes)
    assert comparison["equal_bytes_method"] == "short"
    assert comparison["equal_bytes"] == 20

    losses = {n: row["loss_at_equal_bytes"] for n, row in comparison["methods"].items()}
    assert losses["long"] == {"mean": 3.0, "half_range": 0.0}
    assert losses["short"]["mean"] == pytest.approx((3.0 + 4.0 - 10 / 14) / 2)
    assert losses["none"] is None
    assert comparison["methods"]["long"]["evaluated_bytes"] == [20, 30]


def test_losses_are_compared_at_the_bytes_of_the_target(of_unequal_bytes):
    comparison = compare(of_unequal_bytes, "long")

    assert comparison["equal_bytes_method"] == "long"
    assert comparison["equal_bytes"] == 30
    assert comparison["methods"]["long"]["loss_at_equal_bytes"]["mean"] == 2.25
    assert comparison["methods"]["short"]["loss_at_equal_bytes"] is None


def test_without_a_target_that_sends_another_method_gives_the_bytes(of_unequal_bytes):
    assert compare(of_unequal_bytes, "none")["equal_bytes_method"] == "short"
    assert compare(of_unequal_bytes[-2:])["equal_bytes"] is None


def test_a_seed_that_misses_the_target_is_counted():
    runs = [
        evaluated("a", 0, [(10, 3.0), (20, 1.0)]),
        evaluated("a", 1, [(10, 3.0), (20, 2.0)]),
    ]

    row = compare(runs)["methods"]["a"]
    assert (row["seeds_at_target"], row["steps_to_target"]) == (1, 17.5)

    # The other reaches it with both seeds, and has nothing to be compared with.
    runs += [dataclasses.replace(run, method="b") for run in runs[:1] * 2]
    other = compare(runs, "a")["methods"]["b"]
    assert (other["seeds_at_target"], other["steps_to_target"]) == (2, 17.5)
    assert row["ratios"]["steps_to_target"] is None
    assert other["ratios"]["steps_to_target"] is None


def test_spread_of_something_missing_is_none():
    assert spread([1.0, None]) is None
    assert spread([]) is None


class Checker(html.parser.HTMLParser):
    """Notes tags that are closed out of order, and every address."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self):
        super().__init__()
        self.open = []
        self.sources = []
        self.cells = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "small"):
            self.cells.append(data)


def render(runs):
    text = page.render(
        compare(runs),
        {"A <caption>": b"\x89PNG"},
        command="python -m x --a='<b>'",
        config={"key": "</pre><script>"},
        machine="Some machine.",
        winner="<b> wins.",
        settings={"<run>": {"H": "4", "compressor": "<sign>"}},
        versions="jax <1>; today.",
    )
    checker = Checker()
    checker.feed(text)
    assert not checker.open

    return text, checker


def test_page_is_valid_and_fetches_nothing():
    runs = [run(m, s) for m in ("data_parallel", "diloco", "cocodc") for s in (0, 1)]
    text, checker = render(runs)

    assert all(
        source.startswith("data:image/png;base64,") for source in checker.sources
    )

    assert "<script" not in text
    assert not re.search(r"https?://", text)
    assert "cocodc" in checker.cells
    assert any(cell.startswith("±") for cell in checker.cells)
    assert "<details>\n<summary>Configuration" in text


def test_page_explains_missing_losses_and_steps():
    """Evaluations without a loss at equal bytes, or without the target."""
    runs = [
        evaluated("target", 0, [(10, 4.0), (20, 2.0)]),
        evaluated("little", 0, [(5, 4.0), (10, 3.0)]),
        evaluated("much", 0, [(30, 3.0), (60, 1.0)]),
    ]

    rows = page.results(compare(runs, "target")).split("<tr>")[2:]
    cells = [re.findall(r"<td[^>]*><div>(.*?)</div>", row)[2:4] for row in rows]
    less = "<small>sends less</small>"
    later = "<small>from 30 B</small>"
    assert cells == [["20", "2.0000"], ["<small>never</small>", less], ["45", later]]

    note = page.results_note(compare(runs, "target"))
    assert "a loss of 2.0000, the last of target, linear" in note
    assert "Loss at 20 B: when a region has sent what target sends" in note

    alone = compare([evaluated("apart", 0, [(0, 4.0), (0, 2.0)])])
    assert "loss at" not in page.results(alone)
    assert "Loss at" not in page.results_note(alone)


def test_page_escapes_names_configurations_and_captions():
    text, checker = render([run("<i>mine</i>")])
    # A row of each of two tables.
    assert "".join(checker.cells).count("<i>mine</i>") == 2
    assert "&lt;i&gt;mine&lt;/i&gt;" in text
    assert "&lt;/pre&gt;&lt;script&gt;" in text
    assert "A &lt;caption&gt;" in text
