"""Claims: valid files, verdicts from intervals, the page, a run of its own."""

import json
import pathlib

import pytest

from cocodc_jax.run.config import flags
from experiments import claims
from experiments.checking import claim, measures, table, verdicts
from experiments.sweeps.cells import Interval

ROOT = pathlib.Path(__file__).parents[2]
GOOD = """
claim = "A needs 20 % fewer steps than B."
source = "arXiv 2501.00001"
title = "A"
seen = "abstract"
scale = "150M parameters"
setting = "small"
commands = ["sweep --grid=g.toml --workdir=DIR"]
minutes = 1

[[parts]]
what = "tuned"
measure = "fewer_steps"
results = "grid.json"
method = "method=diloco"
baseline = "method=data_parallel"
at_least = 20.0
"""


def column(method, losses, curves, seeds=(0, 1, 2)):
    """One cell of a cells.json, evaluated at steps 100 and 200."""
    config = {"run": {"steps": 200}, "method": {"method": method, "outer_lr": 0.7}}
    return {
        "flags": {"method": method},
        "columns": {
            "tuned": {
                "seeds": list(seeds),
                "diverged": [],
                "losses": losses,
                "curves": curves,
                "curve": [[100, 0.0, 0], [200, 0.0, 0]],
                "bytes_per_step": 10.0 if method == "diloco" else 40.0,
                "config": config,
            }
        },
    }


@pytest.fixture
def results(tmp_path):
    """B ends at 2, which A passes after 150, 160 and 170 of 200 steps."""
    curves = [[2.5, 1.5], [2.6, 1.6], [2.7, 1.7]]
    a = column("diloco", [1.5, 1.6, 1.7], curves)
    b = column("data_parallel", [2.0, 2.0, 2.0], [[3.0, 2.0]] * 3)
    (tmp_path / "grid.json").write_text(json.dumps({"cells": [a, b]}))
    return measures.Results(tmp_path)


@pytest.fixture
def written(tmp_path):
    """Write a claim, with lines replaced."""

    def write(*replaced, text=GOOD):
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "one.toml"
        path.write_text(text)
        return path

    return write


def test_every_claim_is_valid_and_checked_by_committed_results():
    checked = [table.check(one, measures.Results()) for one in claim.read_all()]
    assert len(checked) > 20
    assert sum(table.counts(checked).values()) == len(checked)

    for row in checked:
        assert row.claim.claim.endswith("."), row.claim.name
        for words in row.claim.commands:
            assert (ROOT / f"experiments/{words[0]}.py").exists(), words
            for word in words:
                if word.startswith("--grid="):
                    assert (ROOT / word.removeprefix("--grid=")).exists(), word


def test_the_page_shows_what_the_program_computes(capsys):
    """The page has no verdict of its own: its table is that of `--markdown`."""
    page = (ROOT / "docs/results/claims.md").read_text()
    checked = [table.check(one, measures.Results()) for one in claim.read_all()]
    for head in table.sections(checked):
        assert f"## {head}\n" in page
        assert f'Markdown(tables["{head}"])' in page
    assert not any(f"**{verdict}**" in page for verdict in verdicts.VERDICTS)

    assert claims.main(["claims", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed == table.page(checked)
    for row in checked:
        assert row.claim.claim in printed
        assert row.claim.is_tried == (f"`{row.claim.name}`" in printed)


def test_a_gain_is_measured_seed_by_seed(results, written):
    row = table.check(claim.read(written()), results)
    assert row.measured[0].mean == pytest.approx(20)
    assert row.measured[0].half == pytest.approx(12.42, abs=0.01)
    assert row.verdict == verdicts.HELD

    swapped = ("method=diloco", "method=tmp"), ("=data_parallel", "=diloco")
    row = table.check(
        claim.read(written(*swapped, ("method=tmp", "method=data_parallel"))), results
    )

    # B needs 200 steps for what A has after 150, 160, 170.
    mean = 100 * (3 - 200 / 150 - 200 / 160 - 200 / 170) / 3
    assert row.measured[0].mean == pytest.approx(mean)
    assert row.verdict == verdicts.NOT


def test_losses_of_the_outer_parameters_count_if_a_claim_asks_for_them(
    results, written
):
    path = results.folder / "grid.json"
    cells = json.loads(path.read_text())
    cells["cells"][0]["columns"]["tuned"]["curves_outer"] = [[2.25, 1.75]] * 3
    path.write_text(json.dumps(cells))
    of_outer = written(("at_least = 20.0", "of_outer = true\nat_least = 20.0"))

    row = table.check(claim.read(of_outer), results)
    assert row.measured[0].mean == pytest.approx(25)  # 2 is passed at step 150 of 200.


def test_a_file_without_losses_of_the_outer_parameters_is_refused(results, written):
    of_outer = written(("at_least = 20.0", "of_outer = true\nat_least = 20.0"))
    with pytest.raises(ValueError, match="grid.json has no losses of outer parameters"):
        table.check(claim.read(of_outer), results)


def test_the_page_has_the_note_of_a_claim(results, written):
    path = written(("minutes = 1", 'minutes = 1\nnote = "Four rounds."'))
    row = table.check(claim.read(path), results)
    assert "Four rounds." in table.page([row])


@pytest.mark.parametrize(
    ("measure", "mean"),
    [
        ("more_loss", -0.4),
        ("less_loss", 0.4),
        ("lower_loss", 20.0),
        ("fewer_bytes", 4.0),
        ("fewer_bytes_to_loss", 5.0),  # 20 % fewer steps.
    ],
)
def test_each_measure_has_its_figure(measure, mean, results, written):
    path = written(("fewer_steps", measure))
    row = table.check(claim.read(path), results)
    assert row.measured[0].mean == pytest.approx(mean)


def test_a_file_without_curves_of_seeds_has_the_interval_of_its_losses(results):
    cells = json.loads((results.folder / "grid.json").read_text())
    for cell, loss in zip(cells["cells"], ([2.6, 1.6], [3.0, 2.0]), strict=True):
        tuned = cell["columns"]["tuned"]
        del tuned["curves"]
        tuned["curve"] = [[100, loss[0], 0], [200, loss[1], 0]]

    (results.folder / "grid.json").write_text(json.dumps(cells))
    flags_of = {"method": "method=diloco", "baseline": "method=data_parallel"}
    steps = measures.MEASURES["fewer_steps"].of(
        results, results="grid.json", **flags_of
    )
    loss = measures.MEASURES["less_loss"].of(results, results="grid.json", **flags_of)

    assert steps.mean == pytest.approx(20)
    # A curve that falls by 1 in half of the steps: 0.1 nats are 5 % of them.
    assert steps.half == pytest.approx(50 * loss.half)


def test_simulated_measures_by_hand():
    """A message of 0.32 s after 16 steps of 0.02 s; an all-reduce of 0.32 s a step."""
    network = {"parameters": 1e6, "sync_interval": 16, "step_s": 0.02, "gbps": 0.1}
    of = measures.MEASURES

    assert of["utilization"].of(None, **network).mean == pytest.approx(50, rel=0.01)

    # Four regions send 3/4 of a message twice, two regions half of it: 0.48 s.
    four = of["utilization"].of(None, **network, num_regions=4)
    assert four.mean == pytest.approx(40, rel=0.01)

    opened = of["utilization"].of(None, **network, num_regions=4, setup_s=0.2)
    assert opened.mean == pytest.approx(32, rel=0.01)

    hidden = of["utilization"].of(None, **network, num_fragments=4, delay_steps=4)
    assert hidden.mean == pytest.approx(100)

    faster = of["faster"].of(None, **network, bits=1).mean
    assert faster == pytest.approx((0.02 + 0.32) / 0.02, rel=0.05)


def test_gaps_and_rises_between_files(results):
    """Gaps of -25, -20 and -15 % become -7.5, -10 and -12.5; then B rises by 0.3."""
    cells = json.loads((results.folder / "grid.json").read_text())
    a = cells["cells"][0]["columns"]["tuned"]
    b = cells["cells"][1]["columns"]["tuned"]
    a["losses"] = [1.85, 1.8, 1.75]
    (results.folder / "closer.json").write_text(json.dumps(cells))
    words = {"method": "method=diloco", "baseline": "method=data_parallel"}
    of = measures.MEASURES
    gap = of["smaller_gap"].of(
        results, results="closer.json", other_results="grid.json", **words
    )

    assert gap.mean == pytest.approx(100 * (1.6 / 2 - 1.8 / 2))

    b["losses"] = [2.3, 2.3, 2.3]
    (results.folder / "larger.json").write_text(json.dumps(cells))
    rise = of["smaller_rise"].of(
        results, results="closer.json", larger_results="larger.json", **words
    )
    assert rise == Interval(pytest.approx(0.3), pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize(
    ("rule", "interval", "verdict"),
    [
        ({"at_least": 0}, (0.1, 0.2), verdicts.OPEN),
        ({"at_least": 0}, (0.3, 0.2), verdicts.HELD),
        ({"at_least": 0}, (-0.3, 0.2), verdicts.NOT),
        ({"at_least": 0}, (-0.1, 0.2), verdicts.OPEN),
        ({"at_most": 0.02}, (0.01, 0.01), verdicts.HELD),
        ({"at_most": 0.02}, (0.02, 0.01), verdicts.OPEN),
        ({"at_most": 0.02}, (0.05, 0.01), verdicts.NOT),
        ({"at_most": 3}, (2.7, None), verdicts.HELD),
        ({"near": [28, 4]}, (27.0, 2.0), verdicts.HELD),
        ({"near": [28, 4]}, (24.0, 2.0), verdicts.OPEN),
        ({"near": [28, 4]}, (20.0, 2.0), verdicts.NOT),
    ],
)
def test_verdicts_of_intervals(rule, interval, verdict):
    assert verdicts.Rule.from_table(rule).verdict(Interval(*interval)) == verdict


def test_no_verdict_follows_from_one_seed(results, written):
    path = results.folder / "grid.json"
    cells = json.loads(path.read_text())
    for cell in cells["cells"]:
        column = cell["columns"]["tuned"]
        for name in ("seeds", "losses", "curves"):
            column[name] = column[name][:1]
    path.write_text(json.dumps(cells))

    with pytest.raises(ValueError, match=r"seeds \[0\] in common; a claim needs two"):
        table.check(claim.read(written()), results)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (('seen = "abstract"', 'seen = "rumour"'), "seen='rumour' is unknown; use one"),
        (("minutes = 1", 'minutes = "1"'), "minutes='1' must be a number"),
        (("scale =", "scales ="), "scales is an unknown key; did you mean scale?"),
        (('setting = "small"', ""), "setting is missing"),
        (("fewer_steps", "fewer"), "part 1: measure='fewer' is unknown; use one of"),
        (
            ("method =", "methods ="),
            "part 1: measure='fewer_steps': missing a required",
        ),
        (("at_least = 20.0", ""), r"part 1: rules are \[\]; a part has one of"),
        (("at_least = 20.0", "near = 20.0"), "near=20.0 must be .figure, margin."),
        (("minutes = 1", 'minutes = 1\nwhy = "no"'), "why has no meaning beside parts"),
        (
            ("sweep --grid", "bench --grid"),
            "commands has 'bench --grid=g.toml .*begins",
        ),
        (
            ('measure = "fewer_steps"\nresults = "grid.json"', 'measure = "faster"'),
            "part 1: measure='faster': got an unexpected|missing a required",
        ),
        (("[[parts]]", "[[parts"), "is no TOML"),
    ],
)
def test_a_claim_that_is_not_valid_is_refused_in_one_line(replaced, message, written):
    with pytest.raises(ValueError, match=message) as error:
        claim.read(written(replaced))
    assert "\n" not in str(error.value)
    assert "one.toml" in str(error.value)


RUN = GOOD.partition("what =")[0] + 'what = "measured"\n'
RUN_OF_CHAOS = {
    "goodput": 0.90,
    "goodput_simulated": 0.94,
    "merges_that_differ": [],
    "gaps_unexplained": [3, 5],
}
RUN_OF_NETWORKS = {
    "rows": [
        {
            "method": method,
            "measured": {"slowdown": slowdown},
            "simulated_over_measured": {"step_s": ratio},
        }
        for method, slowdown, ratio in [("diloco", 1.25, 0.9), ("co2", 4.0, 1.05)]
    ]
}


@pytest.mark.parametrize(
    ("part", "run", "mean"),
    [
        ('measure = "goodput_off"', RUN_OF_CHAOS, 4.0),
        ('measure = "faults_in_records"', RUN_OF_CHAOS, 2.0),
        ('measure = "step_time_off"', RUN_OF_NETWORKS, 10.0),
        ('measure = "slowest"\nmethods_here = ["diloco"]', RUN_OF_NETWORKS, 80.0),
    ],
)
def test_measures_of_a_run_have_their_figures(part, run, mean, results, written):
    (results.folder / "run.json").write_text(json.dumps(run))
    text = f'{RUN}{part}\nresults = "run.json"\nat_most = 1'
    row = table.check(claim.read(written(text=text)), results)
    assert row.measured[0].mean == pytest.approx(mean)
    assert row.measured[0].half is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ('measure = "goodput_off"', "claim one, measured: its results have no 'goodp"),
        (
            'measure = "slowest"\nmethods_here = ["noloco"]',
            "'noloco'. has no method of",
        ),
    ],
)
def test_results_without_a_measured_value_are_refused(part, message, results, written):
    (results.folder / "run.json").write_text(json.dumps(RUN_OF_NETWORKS))
    text = f'{RUN}{part}\nresults = "run.json"\nat_most = 1'
    with pytest.raises(ValueError, match=message):
        table.check(claim.read(written(text=text)), results)


def test_a_claim_that_is_not_tried_has_a_reason(written):
    text = GOOD.partition("setting")[0]
    with pytest.raises(
        ValueError, match=r"why is missing \(a claim without parts says"
    ):
        claim.read(written(text=text))
    row = table.check(claim.read(written(text=text + 'why = "a cluster"\n')), None)
    assert row.verdict == verdicts.NOT_TRIED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only=cocodc_step"], "is no claim; did you mean cocodc_steps?"),
        (["--run"], "--run needs --only=NAME"),
        (["--run", "--only=covenant", "--workdir=x"], "cannot be tried here: It needs"),
        (["--run", "--only=kills"], "workdir=None is missing"),
        (["--workdir=x"], "--workdir=x has a meaning with --run only"),
        (["--only=kills", "--results=nowhere"], "'chaos_members.json' is missing"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        claims.main(["claims", *words])
    assert end.value.code == flags.USAGE_ERROR
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_claim_is_run_again_and_its_result_checked(
    results, written, tmp_path, monkeypatch, capsys
):
    """The commands get the folder, and the file that they write is checked."""
    path = written(("at_least = 20.0", "at_least = 60.0"))
    monkeypatch.setattr(claim, "FOLDER", path.parent)
    monkeypatch.setattr(claim.read_all, "__defaults__", (path.parent,))
    new = json.loads((results.folder / "grid.json").read_text())
    new["cells"][0]["columns"]["tuned"]["curves"] = [[1.9, 1.0]] * 3
    ran = []

    def run(command):
        ran.append(command[2:])
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new/cells.json").write_text(json.dumps(new))
        return 0

    monkeypatch.setattr(claims.children, "run", run)
    words = ["--only=one", f"--results={results.folder}"]
    assert claims.main(["claims", *words]) == 0
    assert "one: held in part" in capsys.readouterr().out
    assert (
        claims.main(["claims", *words, "--run", f"--workdir={tmp_path / 'new'}"]) == 0
    )
    assert "+50.0 ± 0.0 % of steps saved" in capsys.readouterr().out
    assert ran == [
        ["experiments.sweep", "--grid=g.toml", f"--workdir={tmp_path / 'new'}"]
    ]

    monkeypatch.setattr(claims.children, "run", lambda command: 75)
    assert (
        claims.main(["claims", *words, "--run", f"--workdir={tmp_path / 'new'}"]) == 75
    )
