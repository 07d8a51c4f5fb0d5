"""`experiments.sweep`: grids that are refused, halving, reports of rows, and a kill."""

import collections
import json
import math
import re
import tomllib

import numpy as np
import pytest

from cocodc_jax.files import UnwritableError
from experiments import sweep
from experiments.sweeps import cells, grid, reference, report, rows, schedule
from experiments.sweeps.grid import Halving, best
from experiments.sweeps.runs import Row, trained
from experiments.sweeps.schedule import Plan, Progress
from tests.waiting import wait_until

GRID = """
tuned = ["outer_lr", "outer_momentum"]

[base]
preset = "smoke"
steps = 32
delay_steps = 3
batch_per_region = 2

[groups.streaming]
method = "streaming_diloco"
compress = ["none", "ef+int4"]
outer = [
  { outer_lr = 1.0, outer_momentum = 0.0 },
  { outer_lr = 0.7, outer_momentum = 0.5 },
]

[groups.other]
method = ["diloco", "data_parallel"]
"""
HALVING = """
[halving]
rungs = [8, 16]
keep = 0.5
tuning_seeds = [7, 8]
final_seeds = [0, 1]
"""


def table(text):
    return grid.from_table(tomllib.loads(text))


def test_a_grid_is_the_product_of_its_axes_and_the_published_settings():
    parsed = table(GRID)
    assert parsed.seeds == (0,)
    published = [True, False, False] * 2 + [True] * 2
    assert [s.published for s in parsed.settings] == published
    arguments = [s.config.method.given for s in parsed.settings]
    # The first, published row has the default of Streaming DiLoCo.
    assert [values.get("outer_lr") for values in arguments[:3]] == [0.4, 1.0, 0.7]
    compressors = [values.get("compress") for values in arguments[:6]]
    assert compressors == ["none"] * 3 + ["ef+int4"] * 3

    # A base flag applies to the methods that take it.
    assert arguments[0]["delay_steps"] == 3
    assert "delay_steps" not in arguments[6]
    assert {s.config.data.batch_per_region for s in parsed.settings} == {2}
    assert len({s.key for s in parsed.settings}) == 8


def test_a_grid_may_leave_out_the_published_settings():
    without = table("published = false\n" + GRID).settings
    assert len(without) == 6
    assert [s.published for s in without] == [False] * 4 + [True] * 2


def test_equal_settings_of_two_groups_are_one():
    """0.7 is the default of DiLoCo."""
    again = GRID + '[groups.again]\nmethod = "diloco"\nouter_lr = 0.7\n'
    assert len(table(again).settings) == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 32", "step = 32", "base: step=32: 'step' is no flag of a run; did"),
        ("steps = 32", "steps = 2.5", "base: steps=2.5 must be of type int"),
        ("steps = 32", "seed = 1", "base: seed=1 is not a flag of a row; use seeds"),
        ('"smoke"', '"tinny"', "base: preset='tinny' is unknown; use one of"),
        ("[base]", "[bases]", "grid has unknown keys ['bases']"),
        (
            "outer_lr = 1.0",
            "outer_lr = -1.0",
            "groups.streaming, row 1 (streaming: method=streaming_diloco compress=none "
            "outer_lr=-1.0 outer_momentum=0.0): ",
        ),
        (
            "outer = [",
            "outer_lr = [0.1]\nouter = [",
            "groups.streaming sets outer_lr twice in one row",
        ),
        (
            'compress = ["none", "ef+int4"]',
            "compress = []",
            "groups.streaming.compress=[] is an axis without values",
        ),
        (
            '["diloco", "data_parallel"]',
            '["diloco"]\nmixing_alpha = 0.5',
            "groups.other, row 1 (other: method=diloco mixing_alpha=0.5): "
            "mixing_alpha=0.5 has no meaning for diloco",
        ),
        ('_momentum"]', '_momentun"]', "tuned: 'outer_momentun' is no flag of a"),
        ("tuned = [", "seeds = [1, 1]\ntuned = [", "seeds=[1, 1] must be a list of"),
        (
            "tuned = [",
            "seeds = [4294967296]\ntuned = [",
            "seeds=[4294967296] must be a list of whole numbers from 0 to 4294967295,",
        ),
        ("tuned = [", "published = 5\ntuned = [", "published=5 must be true or false"),
        ("tuned = [", "tuned = 5  # ", "tuned=5 must be a list of names of flags, su"),
        ("tuned = [", 'tuned = [["x"]]  # ', "tuned: ['x'] is no flag of a run"),
        ("[base]", "[base]\nouter_lr = inf", "base: outer_lr=inf must be a finite num"),
        ('"smoke"', '["tiny"]', "base: preset=['tiny'] is unknown; use one of"),
        ("[base]", "base = 5\n[groups.empty]", "base=5 must be a table, as [base]"),
        ("[8, 16]", "[16, 8]", "rungs=[16, 8] must be increasing"),
        ("keep = 0.5", "keep = 1.0", "keep=1.0 must be in (0, 1)"),
        ("[0, 1]", "[0, 8]", "final_seeds=[0, 8] must be others than tuning_seeds"),
        ("[7, 8]", "[7, 7]", "tuning_seeds=[7, 7] must be a list of whole"),
        ("keep", "keeps", "[halving] has missing or unknown keys ['keeps']"),
        ("keep = 0.5", 'by = ["methods"]', "by: 'methods' is no flag of a run"),
        ("keep = 0.5", "by = 5", "by=5 must be a list of names of flags, such as"),
        ("keep = 0.5", "keep = true", "keep=True must be in (0, 1)"),
        ("keep = 0.5", "winners = 1.5", "winners=1.5 must be a whole number of at lea"),
        ("[8, 16]", "[4.5, 6]", "rungs=[4.5, 6] must be increasing whole numbers of"),
        ("[8, 16]", "8", "rungs=8 must be increasing whole numbers of steps"),
        ("[7, 8]", "[-1]", "tuning_seeds=[-1] must be a list of whole numbers from 0"),
        ("[7, 8]", '["a"]', "tuning_seeds=['a'] must be a list of whole numbers from"),
        ("[8, 16]", "[4, 16]", "warmup_steps=5 must be less than steps=4"),
        ("tuned = [", "seeds = [1]\ntuned = [", "seeds=[1] has no meaning beside"),
    ],
)
def test_invalid_grids_are_refused(old, new, message):
    text = GRID + HALVING * (old not in GRID or "beside" in message)
    assert old in text
    with pytest.raises(ValueError, match=re.escape(message)):
        table(text.replace(old, new, 1))


def test_the_best_of_each_key_go_on():
    halving = Halving((8, 16), (1, 2), (3,))
    losses = [[3.0, 1.0], [1.5, 1.5], [None, 0.0], [9.0, 9.0], [2.0, 2.0]]
    keys = ["a", "a", "a", "b", "a"]
    # Means 2, 1.5, infinite, 2; of equal ones the first.
    assert best(halving, 0, "pqrst", keys, losses) == ["p", "q", "s"]
    assert best(halving, 1, "pqrst", keys, losses) == ["q", "s"]
    assert halving.counts(7) == [7, 4]


def written(row, loss):
    """Return a row as it is written after training."""
    steps = row.config.run.steps
    config = row.config
    method = config.method.method
    fragments = 4 if method == "streaming_diloco" else 1
    sent = {"streaming_diloco": 100, "diloco": 300, "data_parallel": 9000}[method]
    sent /= 4 if config.method.given.get("compress") == "ef+int4" else 1
    curve = [[s, loss + 1 - s / steps, sent * s] for s in range(0, steps + 1, 8)]

    return {
        "row": row.row_id,
        "setting": row.setting.key,
        "name": row.setting.name,
        "stage": row.stage,
        "published": row.setting.published,
        "tuned": list(row.tuned),
        "method": method,
        "seed": row.seed,
        "steps": steps,
        "loss": loss,
        "bytes": sent * steps,
        "bytes_per_step": sent,
        "tokens": 1,
        "parameters": 1,
        "fragment_bytes": [sent] * fragments,
        "curve": curve,
        "config": rows.completed(config.to_json()),
    }


def loss_of(row):
    """Less with a larger momentum, and a share of the seed's own."""
    arguments = row.config.method.given
    gain = {None: 0.0, 0.0: 0.1, 0.5: 0.3, 0.9: 0.2}[arguments.get("outer_momentum")]
    noise = 0.1 * row.seed + (0.01 if gain == 0.3 and row.seed == 1 else 0)
    return 3.0 - gain + noise - (arguments.get("compress") == "ef+int4") * 0.05


def run_through(plan, folder):
    stages = []
    for stage in plan.stages(lambda: {row["row"]: row for row in rows.read(folder)}):
        stages.append(stage)
        for row in stage:
            rows.append(folder, written(row, loss_of(row)))
    return stages


def cells_of(folder, text=GRID):
    """Train the rows of a grid; return the cells of all that the folder has."""
    run_through(Plan(table(text)), folder)
    return cells.cells(rows.read(folder))


def seeded(seeds):
    """Return the grid with these seeds and without tuning."""
    return GRID.replace("tuned =", f"seeds = {seeds} #")


def diverge(folder, *changed):
    for row in changed:
        rows.append(folder, {**row, "loss": None, "curve": [], "diverged": "NaN"})
    return cells.cells(rows.read(folder))


@pytest.fixture
def halved(tmp_path):
    plan = Plan(table(GRID + HALVING))
    return plan, run_through(plan, tmp_path), tmp_path


def test_stages_of_a_halving(halved):
    plan, stages, folder = halved
    # Three settings a cell, two seeds; ceil(3 / 2) are left; cells of one never tune.
    assert [len(stage) for stage in stages] == [12, 8, 12]
    assert [{row.config.run.steps for row in stage} for stage in stages] == [
        {8},
        {16},
        {32},
    ]
    assert {row.seed for stage in stages[:2] for row in stage} == {7, 8}
    assert {row.seed for row in stages[2]} == {0, 1}

    # Published settings are trained with the final seeds even if they lose.
    momenta = [row.config.method.given.get("outer_momentum") for row in stages[2]]
    assert momenta == [0.9, 0.9, 0.5, 0.5] * 2 + [0.9, 0.9, None, None]

    count, cost = plan.total()
    assert count == sum(map(len, stages))
    assert cost == pytest.approx(sum(row.cost for stage in stages for row in stage))


def test_shards_share_the_settings_of_a_stage(halved):
    plan, stages, _ = halved
    for stage in stages:
        shares = [Plan(plan.grid, i, 3).own(stage) for i in (1, 2, 3)]
        ids = [row.row_id for share in shares for row in share]
        assert sorted(ids) == sorted(row.row_id for row in stage)
        for share in shares:  # All seeds of a setting, which share a program.
            assert len(share) == 2 * len({row.setting.key for row in share})


def test_progress_shows_the_time_that_is_left(halved):
    plan, stages, _ = halved
    now = [0.0]
    progress = Progress(plan, lambda: now[0])
    first, second = stages[0][:2]
    assert progress.line(first).startswith("row 1/32, rung 1: streaming: method=")
    assert "left" not in progress.line(first)

    now[0] = 10.0
    progress.trained(first)
    rest = (plan.total()[1] - first.cost) / first.cost * 10
    assert progress.line(second).endswith(
        f"{rest // 60:.0f} min {rest % 60:02.0f} s left"
    )


def test_columns_have_student_intervals_and_steps_to_the_reference(halved):
    plan, _, folder = halved
    of_rows = cells.cells(rows.read(folder), plan.to_json()["chosen"])

    assert [cell.label for cell in of_rows] == [
        "streaming_diloco H 16 tau 3 float32",
        "streaming_diloco H 16 tau 3 ef+int4",
        "diloco H 16 float32",
        "data_parallel float32",
    ]
    assert [cell.tried for cell in of_rows] == [3, 3, 0, 0]
    assert of_rows[0].tuning_steps == 3 * 2 * 8 + 2 * 2 * 16

    columns = of_rows[1].columns
    assert columns["tuned"].values == {"outer_lr": 0.7, "outer_momentum": 0.5}
    assert columns["published"].values == {"outer_lr": 0.4, "outer_momentum": 0.9}

    ours = np.array([2.65, 2.76])
    theirs = np.array([2.8, 2.9])
    # Student's t of two seeds is Cauchy's distribution.
    quantile = math.tan(math.pi * (0.975 - 0.5))
    half = quantile * ours.std(ddof=1) / math.sqrt(2)
    assert columns["tuned"].loss.mean == pytest.approx(ours.mean())
    assert columns["tuned"].loss.half == pytest.approx(half)

    held = reference.find(of_rows, "method=streaming_diloco,compress=none").columns
    less = cells.difference(columns["tuned"], held["published"])
    half = quantile * (ours - theirs).std(ddof=1) / math.sqrt(2)
    assert (less.mean, less.half) == pytest.approx(((ours - theirs).mean(), half))

    # Loss falls by 1 in 32 steps: 0.15 and 0.14 less are 4.8 and 4.48 steps earlier.
    steps = cells.steps_to(columns["tuned"], held["published"])
    assert steps.mean == pytest.approx(32 * (1 - 0.145))
    assert cells.steps_to(of_rows[3].columns["published"], columns["tuned"]) is None


def test_without_halving_the_best_is_marked(tmp_path):
    of_rows = cells_of(tmp_path)
    assert of_rows[0].columns["tuned"].chosen_here

    text = report.Report(of_rows, reference.find(of_rows, None)).markdown("COMMAND")
    assert "| 2.700* |" in text

    assert [cell.tried for cell in of_rows] == [3, 3, 0, 0]
    assert of_rows[0].tuning_steps == 3 * 32

    assert text.startswith("Loss after 32 steps, nats per token of held-out text, mean")
    assert "mean of 1 seed with its 95 % interval (Student). The reference" in text
    assert "chosen by these very seeds" in text


def test_the_report_names_the_frontier(halved, call, refused, monkeypatch):
    _, _, folder = halved
    monkeypatch.setenv("COLUMNS", "120")
    (folder / "halving.json").write_text(json.dumps(halved[0].to_json()))
    words = ["--report", f"--workdir={folder}", "--reference=method=data_parallel"]
    out, err = call(sweep, *words)

    assert not err
    assert "streaming_diloco H 16 tau 3 ef+int4" in out

    monkeypatch.setenv("COLUMNS", "80")
    narrow = call(sweep, *words)[0].split()
    assert set(re.findall(r"\d\.\d{3}", out)) <= set(narrow)

    text = (folder / "report.md").read_text()
    # Streaming in int4 sends least and is best, so it alone is on the frontier.
    assert text.count("| **") == 1
    assert "| **streaming_diloco** | ef+int4 | 16 | 3 |" in text
    assert "reference" in text
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")

    made = json.loads((folder / "cells.json").read_text())
    assert [cell["is_best"] for cell in made["cells"]] == [False, True, False, False]
    assert made["cells"][1]["columns"]["tuned"]["curve"][-1] == [
        32,
        pytest.approx(2.705),
        800,
    ]
    assert not (folder / "networks.json").exists()

    refusals = (
        ("method=cocodc", "--reference='method=cocodc' is no cell"),
        (
            "method=streaming_diloco",
            "is 2 cells of these rows; give flags of one: streaming_diloco H 16",
        ),
        ("sync_intervall=None", "sync_intervall"),
    )

    for wanted, message in refusals:
        assert message in refused(sweep, *words[:2], f"--reference={wanted}")

    (folder / "halving.json").write_text('{"chosen": ["of another version"]}')
    why = "halving.json chose settings that no row has"
    assert why in refused(sweep, *words)


def test_the_report_ranks_methods_by_time_to_the_reference_loss_on_each_network(
    halved, call, refused
):
    """By hand: a direct exchange takes 2 (M - 1) b / M / rate and four latencies."""
    _, _, folder = halved
    words = ["--report", f"--workdir={folder}", "--reference=method=data_parallel"]
    _, err = call(sweep, *words, "--networks=10x50,10000x10", "--step_seconds=0.5")
    assert not err
    arrivals = json.loads((folder / "networks.json").read_text())["arrivals"]
    at = {(a["cell"], a["column"], a["mbit"]): a["seconds"] for a in arrivals}
    parallel = ("data_parallel float32", "published")

    for mbit, latency_s in ((10, 0.05), (10_000, 0.01)):
        sync_s = 6 * 9000 / 4 / (mbit * 1e6 / 8) + 4 * latency_s
        assert at[*parallel, mbit] == pytest.approx(32 * (0.5 + sync_s), rel=1e-2)

    # A quarter fewer steps, for its lower loss; few bytes and no stall.
    streaming = ("streaming_diloco H 16 tau 3 ef+int4", "published", 10_000)
    assert at[streaming] == pytest.approx(32 * 0.75 * 0.5, rel=0.01)
    text = (folder / "report.md").read_text()
    assert "| 10 Mbit/s, 50 ms | streaming_diloco" in text
    assert "| 10 Gbit/s, 10 ms |" in text
    error = refused(sweep, *words, "--networks=fast")
    assert error.startswith("--networks='fast' names 'fast'; use all, or")


def test_the_report_lists_a_seed_that_diverged(tmp_path):
    cells_of(tmp_path)
    of_rows = diverge(tmp_path, rows.read(tmp_path)[-1])
    text = report.Report(of_rows, reference.find(of_rows, "method=diloco")).markdown("")
    assert "diverged (seed 0)" in text
    assert len(rows.read(tmp_path)) == 8


def test_a_cell_with_a_diverged_seed_is_not_compared(tmp_path):
    of_rows = cells_of(tmp_path, seeded([0, 1]))
    of_rows = diverge(tmp_path, of_rows[0].columns["published"].rows[1])
    bad, good = (cell.columns["published"] for cell in of_rows[:2])

    assert cells.difference(bad, good) is None
    assert cells.difference(good, bad) is None
    assert cells.steps_to(bad, good) is None
    assert cells.steps_to(good, bad) is None
    assert cells.difference(good, good).mean == 0


def test_a_report_of_runs_that_all_diverged_has_no_figures(tmp_path):
    cells_of(tmp_path)
    of_rows = diverge(tmp_path, *rows.read(tmp_path))
    text = report.Report(of_rows, of_rows[0]).markdown("")
    assert text.startswith("Every run diverged.\n\n| method |")


def test_a_sweep_that_tunes_nothing_has_one_column(tmp_path):
    plain = seeded([0, 1]).replace("outer = [", "outer = [ {}, ")
    of_rows = cells_of(tmp_path, plain)
    assert [list(cell.columns) for cell in of_rows] == [["published"]] * 8
    assert of_rows[1].label.endswith("outer_lr=1.0 outer_momentum=0.0")
    made = report.Report(of_rows, reference.find(of_rows, "method=diloco"))
    assert made.heads()[-3:] == ["loss", "less the reference", "steps to its loss"]
    assert len(made.lines()[0]) == len(made.heads())
    assert len(made.short_lines()[0]) == 1 + len(made.short_heads())


def test_a_row_that_a_kill_cut_off_is_dropped(tmp_path):
    setting = table(GRID).settings[0]
    a, c = (
        written(Row(setting, seed=seed, stage="final", tuned=()), 1.0)
        for seed in (0, 1)
    )
    rows.append(tmp_path, a)

    with (tmp_path / rows.FILE).open("ab") as file:
        file.write(b'{"row": "b", "lo')
    assert rows.read(tmp_path) == [a]
    rows.append(tmp_path, c)
    assert rows.read(tmp_path) == [a, c]
    (tmp_path / "rows-other.jsonl").write_text(f"{json.dumps(a)}\n3\n")

    with pytest.raises(ValueError, match=r"rows-other.jsonl, line 2 is no row"):
        rows.read(tmp_path)


def test_rows_of_two_texts_are_refused(tmp_path):
    """As of two machines with other files at the same path."""
    first, second = (
        written(Row(table(GRID).settings[0], seed=seed, stage="final", tuned=()), 1.0)
        for seed in (0, 1)
    )
    rows.append(tmp_path, first | {"text": "text-1, bytes"})
    rows.append(tmp_path, second)  # Of an earlier version.
    rows.check_texts(rows.read(tmp_path))
    rows.append(tmp_path, second | {"text": "text-1, bytes"})
    rows.check_texts(rows.read(tmp_path))
    rows.append(tmp_path, second | {"text": "text-2, bytes"})

    message = r"is another text \(text-2, bytes\) than that of row .* \(text-1, bytes\)"
    with pytest.raises(ValueError, match=message):
        rows.check_texts(rows.read(tmp_path))


def test_a_row_that_cannot_be_written_names_its_file(tmp_path):
    (tmp_path / rows.FILE).mkdir()
    with pytest.raises(UnwritableError, match=r"rows.jsonl cannot be written \(Is a d"):
        rows.append(tmp_path, {})


def test_a_row_may_have_an_infinite_limit(tmp_path):
    parsed = table(GRID.replace("outer = [", "exclude_above = inf\nouter = ["))
    row = written(Row(parsed.settings[0], seed=0, stage="final", tuned=()), 1.0)
    rows.append(tmp_path, row)
    assert rows.read(tmp_path) == [row]


def test_rungs_count_for_the_cells_of_their_steps(halved):
    plan, _, folder = halved
    longer = Row(
        plan.grid.settings[0].at(48), seed=0, stage="final", tuned=plan.grid.tuned
    )
    rows.append(folder, written(longer, 2.0))
    of_rows = cells.cells(rows.read(folder), plan.to_json()["chosen"])
    assert [cell.tried for cell in of_rows] == [3, 3, 0, 0, 0]


def test_the_report_marks_rows_of_other_steps_and_seeds(tmp_path):
    for method, steps, seeds in (("diloco", 32, [0, 1]), ("data_parallel", 48, [0])):
        base = (
            seeded(seeds).partition("[groups.streaming]")[0].replace("32", str(steps))
        )
        of_rows = cells_of(tmp_path, f'{base}[groups.other]\nmethod = "{method}"\n')

    text = report.Report(of_rows, of_rows[0]).markdown("")
    assert text.startswith("Loss after 32 steps, nats per token of held-out text, mean")
    assert "mean of 2 seeds with its 95 % interval (Student), but where other" in text
    assert text.count("(48 steps, 1 seed) |") == 1
    assert text.count(" seed)") == 1


def report_of(folder, text):
    """Return the report's table as a grid sees the rows of a folder."""
    of_rows = cells.cells(schedule.assign(rows.read(folder), table(text)))
    return report.Report(of_rows, reference.find(of_rows, None)).lines()


def test_rows_of_a_smaller_grid_have_their_role_in_the_grown_one(tmp_path):
    """A run with one seed that is then extended gives what one run of all gives."""
    grown = GRID + "[halving]\nrungs = [8]\ntuning_seeds = [7]\nfinal_seeds = [0, 1]"
    first = seeded([0])
    (tmp_path / "fresh").mkdir()
    (tmp_path / "grown").mkdir()
    run_through(Plan(table(grown)), tmp_path / "fresh")
    for text in (first, grown):
        run_through(Plan(table(text)), tmp_path / "grown")
    assert report_of(tmp_path / "grown", grown) == report_of(tmp_path / "fresh", grown)


def test_a_row_of_a_rung_may_be_a_final_one(tmp_path):
    halving = "[halving]\nrungs = [8, 32]\ntuning_seeds = [7]\nfinal_seeds = [0, 1]"
    run_through(Plan(table(GRID + halving)), tmp_path)
    plain = GRID.replace("tuned =", "seeds = [7]\ntuned =")
    of_rows = cells.cells(schedule.assign(rows.read(tmp_path), table(plain)))
    assert 7 in [row["seed"] for row in of_rows[0].columns["tuned"].rows]


def test_winners_of_an_abandoned_halving_do_not_count(halved, call):
    _, _, folder = halved
    (folder / "halving.json").write_text('{"chosen": []}')
    (folder / "grid.toml").write_text(GRID.replace("tuned =", "seeds=[0, 1]\ntuned ="))
    words = [f"--workdir={folder}", "--reference=method=data_parallel"]
    call(sweep, "--report", *words)
    made = json.loads((folder / "cells.json").read_text())
    assert made["cells"][0]["columns"]["tuned"]["chosen_here"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--grid=None is missing; name a grid file"),
        ("--grid=missing.toml", "--grid=missing.toml cannot be read (No such"),
        ("--grid={grid} --shard=3/2", "--shard='3/2' must be i/n with"),
        ("--report", "--workdir='"),
        ("--report --only=method=x", "--only='method=x' is no final row of workdir='"),
        ("--grid={grid} --workdir={grid}", "--workdir='{grid}' is a file;"),
        (
            "--grid={grid} --workdir=/proc/no",
            "--workdir='/proc/no' cannot be written to (No such file or direct",
        ),
        (
            "--grid={grid} --reference=method=cocodc",
            "--reference='method=cocodc' is no setting of the grid; give flags "
            "of one as --list shows them, such as method=streaming_diloco,sync_interv",
        ),
        (
            "--grid={grid} --reference_column=best",
            "--reference_column='best' is unknown; use one of ['published', 't",
        ),
        (
            "--grid={grid} --only=method=cocodc",
            "--only='method=cocodc' is no setting of the grid; give flags of",
        ),
        ("--grid={grid} --networks=fast", "--networks='fast' names 'fast'"),
        ("--grid={grid} --step_seconds=nan", "--step_seconds=nan must be"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(words, message, refused, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    words = words.format(grid=path).split()
    error = refused(sweep, f"--workdir={tmp_path / 'out'}", *words)
    assert error.startswith(message.format(grid=path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('dataset = "text:/no/such"', "/no/such does not exist"),
        ("eval_batches = 40000", "eval_batches=40000: num_batches=40000"),
        ("batch_per_region = 100000", " is too small: region 0 of 4 has"),
        ('init_from = "/no/such"', "init_from='/no/such'"),
    ],
)
def test_data_are_opened_before_the_first_row_trains(
    base, message, refused, call, corpus, tmp_path
):
    pairs = (flag[2:].partition("=") for flag in corpus)
    data = "\n".join(f'{name} = "{value}"' for name, _, value in pairs)
    start = GRID.partition("[groups")[0].replace("batch_per_region = 2", data)
    groups = f'[groups.a]\nmethod = "diloco"\n[groups.b]\nmethod = "diloco"\n{base}\n'
    (tmp_path / "grid.toml").write_text(start + groups)

    words = [f"--grid={tmp_path}/grid.toml", f"--workdir={tmp_path}/out"]
    assert message in refused(sweep, *words)

    assert not list((tmp_path / "out").iterdir())
    call(sweep, *words, "--list")  # Which opens none.


def test_a_fragment_that_never_arrived_has_the_mean_bytes_of_the_others():
    row = Row(table(GRID).settings[0], seed=0, stage="final", tuned=())
    summary = collections.defaultdict(lambda: 1)

    def bytes_of(sent):
        return trained(row, row.config.model, summary, [], [], sent)["fragment_bytes"]

    assert bytes_of({0: 4.0, 2: 8.0}) == [4, 6, 8, 6]
    assert bytes_of({}) == []


def test_only_selects_rows_by_their_flags(halved, call, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID, encoding="utf-8-sig")  # As some editors write it.
    words = ["--only=compress=ef+int4,outer_lr=1.0"]
    out, _ = call(sweep, f"--grid={path}", "--list", *words)
    assert [line.split(":")[0] for line in out.splitlines()[:-1]] == ["streaming"]

    _, _, folder = halved
    (folder / "halving.json").write_text(json.dumps(halved[0].to_json()))
    words = ["--only=method=streaming_diloco", "--report", f"--workdir={folder}"]
    call(sweep, *words)
    made = json.loads((folder / "cells.json").read_text())["cells"]
    assert [cell["flags"]["compress"] for cell in made] == ["none", "ef+int4"]

    # Rungs, of fewer steps, count.
    tried = [(cell["tried"], cell["tuning_steps"]) for cell in made]
    call(sweep, "--only=method=streaming_diloco,steps=32", *words[1:])
    made = json.loads((folder / "cells.json").read_text())["cells"]
    assert [(cell["tried"], cell["tuning_steps"]) for cell in made] == tried

    # Of two cells of the folder, one is the reference: the other is left out.
    words = ["--only=compress=ef+int4", "--reference=method=streaming_diloco"]
    call(sweep, f"--grid={path}", "--report", f"--workdir={folder}", *words)
    made = json.loads((folder / "cells.json").read_text())
    assert [cell["flags"]["method"] for cell in made["cells"]] == ["streaming_diloco"]


def test_a_reference_must_be_one_cell_of_the_grid_or_of_its_rows():
    plan = Plan(table(GRID))
    reference.check("method=diloco,sync_interval=16", "tuned", plan, [])
    rates = "method=streaming_diloco,compress=none,outer_lr="  # A cell has its first.
    reference.check(rates + "0.4", "tuned", plan, [])

    with pytest.raises(ValueError, match="outer_lr=0.7' is no setting of the grid"):
        reference.check(rates + "0.7", "tuned", plan, [])
    plain = Plan(table(seeded([3])))
    reference.check("method=diloco,seed=3", "published", plain, [])

    with pytest.raises(ValueError, match="reference_column='tuned' is of grids that"):
        reference.check(None, "tuned", plain, [])
    row = written(
        Row(plan.grid.settings[-1], seed=0, stage="final", tuned=("outer_lr",)), 1.0
    )

    with pytest.raises(ValueError, match="reference='method=data_parallel,seed=0' is"):
        reference.check("method=data_parallel,seed=0", "published", plain, [])
    reference.check("method=data_parallel,seed=0", "tuned", plain, [row])
    # A setting with some of its rows is one cell.
    row = written(Row(plain.grid.settings[-1], seed=3, stage="final", tuned=()), 1.0)
    reference.check("method=data_parallel", "published", plain, [row])

    both = "'method=streaming_diloco' is 4 cells; say as well .* or compress .none, ef"
    with pytest.raises(ValueError, match=both):
        reference.check("method=streaming_diloco", "published", plain, [])


@pytest.mark.slow
def test_a_killed_sweep_goes_on(command, call, corpus, tmp_path):
    """Finished rows are not run again; an unfinished one resumes."""
    (dataset, data_dir) = (flag.partition("=")[2] for flag in corpus)
    path = tmp_path / "grid.toml"
    folder = tmp_path / "out"
    path.write_text(
        f"""
        seeds = [0, 1]
        [base]
        preset = "smoke"
        steps = 96
        eval_every = 48
        checkpoint_every = 16  # Of whole records: one length of a scan.
        sync_interval = 48  # Two in all: too few for a plot of the timeline.
        num_layers = 1
        devices = 1
        dataset = "{dataset}"
        data_dir = "{data_dir}"
        [groups.plain]
        method = "diloco"
        """
    )
    words = [f"--grid={path}", f"--workdir={folder}"]
    process = command(sweep.__name__, *words)

    def is_half_done():
        done = rows.read(folder) if folder.exists() else []
        return done and any((folder / "runs").glob("*/checkpoints/16"))

    try:
        wait_until(lambda: is_half_done() or process.poll() is not None)
    finally:
        process.kill()
        process.communicate()

    (first,) = rows.read(folder)
    out, _ = call(sweep, *words)
    written = rows.read(folder)
    assert written[0] == first
    assert [row["seed"] for row in written] == [0, 1]
    assert "row 2/2, final: plain: method=diloco, seed 1" in out
    assert "seed 0" not in out
    assert [step for step, _, _ in written[1]["curve"]] == [48, 96]
    assert written[1]["bytes"] == 96 // 48 * 4 * written[1]["parameters"]
    assert not any((folder / "runs").iterdir())

    before = (folder / rows.FILE).read_bytes()
    words[0] = f"--grid={folder / 'grid.toml'}"  # Which the sweep has written itself.
    call(sweep, *words)
    assert (folder / rows.FILE).read_bytes() == before
    assert (folder / "report.md").exists()
