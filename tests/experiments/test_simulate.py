import json
import math
import re

import pytest

from experiments import simulate
from experiments.simulation.described import read_curve

# 2 GB, two regions, 1 GB/s: a sync of all takes 2 s and two delays of 0.25 s, one of
# half of it (FRAGMENTS) 1 s and the delays.
MODEL = ("--params=1e9", "--bits_per_param=16", "--step_time_s=1")
BASE = (*MODEL, "--regions=2", "--bandwidth_gbps=8", "--latency_ms=250")


FRAGMENTS = "--num_fragments=2"


def run(*arguments):
    return simulate.main(["simulate", *BASE, *arguments])


def run_elsewhere(*arguments):
    """As `run`, on links that the arguments name."""
    return simulate.main(["simulate", *MODEL, *arguments])


def read(folder):
    return json.loads((folder / "simulation.json").read_text())


def test_files_and_numbers(tmp_path, capsys):
    arguments = ("--method=diloco", "--sync_interval=4", "--steps=8")
    assert run(*arguments, f"--workdir={tmp_path / 'new'}") == 0
    found = read(tmp_path / "new")
    # 8 steps, twice a sync of 2 GB: 2 s and two delays.
    assert found["summary"]["sim_s"] == 8 + 2 * 2.5
    assert found["summary"]["bytes_sent_per_region"] == 4e9
    assert found["flags"]["sync_interval"] == 4
    assert [sync["merge_step"] for sync in found["syncs"]] == [4, 8]
    trace = json.loads((tmp_path / "new" / "timeline.json").read_text())
    assert any(event.get("name") == "stall" for event in trace["traceEvents"])
    assert (tmp_path / "new" / "timeline.png").stat().st_size > 5000
    assert "slowdown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("data_parallel", 30 * 3.5),
        ("diloco", 300 + 3 * 2.5),
        ("streaming_diloco", 300),
        ("cocodc", 300),
        # Signs at every step; three rounds, hidden; region 1 alone every 50 steps.
        ("distributed_lion", 30 * (1 + 2 / 32 + 0.25)),
        ("co2", 3 * 48),
        ("heloco", 150 + 3 * 4.5),
        ("apart", 30),
    ],
)
def test_defaults_of_each_method(method, expected, tmp_path):
    assert run(f"--method={method}", f"--workdir={tmp_path}") == 0
    assert read(tmp_path)["summary"]["sim_s"] == pytest.approx(expected)


def test_delay_auto_and_unequal_regions(tmp_path):
    arguments = (
        FRAGMENTS,
        "--delay_steps=auto",
        "--step_time_s=1,0.5",
        f"--workdir={tmp_path}",
    )
    assert run(*arguments) == 0
    summary = read(tmp_path)["summary"]
    assert summary["max_delay_steps"] >= 2
    assert summary["utilization"] < 1


def test_links_from_a_file_and_by_name(tmp_path):
    links = tmp_path / "links.yaml"
    links.write_text(
        "{regions: [a, b, c], default: {bandwidth_gbps: 8, latency_ms: 250}}"
    )
    folder = f"--workdir={tmp_path}"
    assert run_elsewhere("--method=diloco", f"--links={links}", folder) == 0
    assert len(read(tmp_path)["bytes_sent"]) == 3
    assert run_elsewhere("--world=us-east,australia", folder) == 0
    assert len(read(tmp_path)["bytes_sent"]) == 2


def test_seconds_to_a_target_loss(tmp_path):
    curve = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "eval_loss": 4 - s / 100} for s in (0, 100, 200)]
    curve.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = (f"--loss_curve={curve}", "--target_loss=2.5", f"--workdir={tmp_path}")
    assert run("--method=diloco", *arguments) == 0
    assert read(tmp_path)["summary"]["sim_s_to_target"] == pytest.approx(152.5)


def test_plan_explains_and_its_flags_work(tmp_path, capsys):
    arguments = (FRAGMENTS, "--bandwidth_gbps=0.1", f"--workdir={tmp_path}")
    assert run("--plan", *arguments) == 0
    out = capsys.readouterr().out
    assert "tau = " in out
    assert "- Extrapolated, not measured: parameters 1,000,000,000 (" in out
    assert json.loads((tmp_path / "plan.json").read_text())["num_fragments"] >= 2
    chosen = out.splitlines()[-1].split()
    arguments = ("--bandwidth_gbps=0.1", "--method=cocodc", f"--workdir={tmp_path}")
    assert run(*arguments, *chosen) == 0
    assert read(tmp_path)["summary"]["stall_s"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["direct", "gloo"])
def test_a_plan_takes_the_collective_that_is_given(name, capsys):
    assert run("--plan", "--bandwidth_gbps=0.1", f"--collective={name}") == 0
    assert capsys.readouterr().out.rstrip().endswith(f"--collective={name}")


def test_a_plan_of_stages_says_which_site_runs_which(tmp_path, capsys):
    links = tmp_path / "links.yaml"
    # Two near, two far away: heavy activations keep each pipeline in one place.
    links.write_text(
        "{regions: [a, b, c, d], default: {bandwidth_gbps: 0.1, latency_ms: 50}, "
        "links: [{between: [a, b], bandwidth_gbps: 10}, "
        "{between: [c, d], bandwidth_gbps: 10}]}"
    )
    arguments = ("--plan", f"--links={links}", f"--workdir={tmp_path}")
    assert run_elsewhere(*arguments, "--stages=2", "--activation_mb=100") == 0
    placed = json.loads((tmp_path / "placement.json").read_text())
    pipelines = {frozenset(path) for path in zip(*placed["sites"], strict=True)}
    assert pipelines == {frozenset("ab"), frozenset("cd")}
    out = capsys.readouterr().out
    assert "- Stage 0 on a, " in out
    assert "tau = " in out
    assert run_elsewhere(*arguments, "--stages=4", "--activation_mb=100") == 0
    assert "No average is needed" in capsys.readouterr().out


def test_a_plan_of_stages_is_simulated_with_failures(capsys):
    sites = ("--plan", "--regions=4", "--bandwidth_gbps=10", "--latency_ms=0")
    job = ("--step_time_s=2,2,2,2", "--params=1e6", "--activation_mb=1e-3")
    swarm = ("--stages=2", "--swarm_s=400", "--rebalance_s=50")
    assert run(*sites, *job, *swarm, "--failures=region0@0,region1@0-20") == 0
    out = capsys.readouterr().out
    found = dict(re.findall("Batches a second (.*): ([0-9.]+[0-9])", out))
    fixed, wired, moved = (float(found[how]) for how in found)
    assert fixed <= wired <= moved
    assert "Without links and failures at most 2, region" in out
    bad = (*sites, *job, *swarm)
    for failures, why in (
        ("mars@3", " must be a site of region0, region1, region2, region3, and from"),
        (
            "region0@x",
            " must be a site of region0, region1, region2, region3, and from",
        ),
        ("region0@5-3", ": start_s=5.0 must be at least 0 and before end_s=3.0"),
    ):
        assert run(*bad, f"--failures={failures}") == 2
        told = f"error: --failures={failures}: '{failures}'{why}"
        out, error = capsys.readouterr()
        assert not out
        assert error.startswith(told)


def test_arguments_of_a_method_reach_it(tmp_path):
    folder = f"--workdir={tmp_path}"
    quarter = ("--method=diloco", "--compress=int8", folder)
    assert run(*quarter) == 0
    sent = read(tmp_path)["summary"]["bytes_sent_per_region"]
    # Gathered from two regions, three times; a scale for 256 numbers besides.
    assert sent == pytest.approx(3 * 2e9 * (1 / 4 + 4 / 1024))
    late = ("--method=decoupled_diloco", "--answer_steps=1,9", "--grace_steps=3")
    assert run(*late, "--quorum=1", folder) == 0
    assert read(tmp_path)["summary"]["max_delay_steps"] == 4
    ranks = ("--method=dilocox", "--sync_interval=20", "--rank=32", "--min_rank=4")
    assert run(*ranks, "--effective_rank=8", "--steps=100", folder) == 0
    delays = [s["merge_step"] - s["start_step"] for s in read(tmp_path)["syncs"]]
    assert delays[0] == 20
    assert delays[-1] == 5
    auto = ("--syncs_per_interval=auto", "--network_share=0.3", "--delay_steps=auto")
    assert run("--method=cocodc", *auto, "--steps=300", folder) == 0
    # 0.5 GB and two delays: a sync of 1 s, so 30 fit in 30 s of 100, 3 steps apart.
    starts = [sync["start_step"] for sync in read(tmp_path)["syncs"]]
    assert starts[-1] - starts[-2] == 3


def test_table_is_printed_side_by_side(monkeypatch, capsys):
    published = simulate.published
    entries = {("1B", "streaming"): published.PUBLISHED_GBPS["1B", "streaming"]}
    monkeypatch.setattr(published, "PUBLISHED_GBPS", entries)
    assert simulate.main(["simulate", "--table"]) == 0
    out = capsys.readouterr().out
    assert "1.53/1.39 = 1.10" in out
    assert "(published 10.4)" in out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--bandwidth_gbps=-1", "--bandwidth_gbps=-1.0 must be positive and finite"),
        ("--latency_ms=-3", "flag --latency_ms=-3: -3.0 is not"),
        ("--latency_ms=nan", "--latency_ms=nan must be finite"),
        ("--jitter_ms=inf", "--jitter_ms=inf must be finite"),
        ("--frontier=x", "--frontier=x needs --plan too"),
        ("--stages=2", "--stages=2 needs --plan too"),
        ("--max_fragments=2", "--max_fragments=2 needs --plan too"),
        ("--failures=a@3", "--failures=a@3 needs --plan too"),
        ("--repair_s=3", "--repair_s=3.0 needs --hours_between_failures too"),
        ("--least_regions=2", "--least_regions=2 needs --hours_between_failures too"),
        ("--loss_key=loss", "--loss_key=loss needs --loss_curve too"),
        ("--links=l.yaml", "--regions=2 has no meaning with --links; leave it out"),
        ("--world=us-east,asia", "--regions=2 has no meaning with --world; leave i"),
        ("--table", "--regions=2 has no meaning with --table; leave it out"),
        ("--loss=1.5", "--loss=1.5 must be in [0, 1)"),
        ("--regions=0", "flag --regions=0: 0 is not a positive integer"),
        ("--method=gossip", "flag --method=gossip: value should be one of"),
        ("--methd=diloco", "Unknown command line flag 'methd'. Did you mean: method"),
        ("--collective=star", "flag --collective=star: value should be one of"),
        ("--delay_steps=-1", "--delay_steps=-1 must be a whole number or 'auto'"),
        ("--delay_steps=101", "--delay_steps=101 is longer than sync_interval=100"),
        ("--num_fragments=3", "--sync_interval=100 is not a multiple of num_fragments"),
        ("--syncs_per_interval=9", "--syncs_per_interval=9 has no meaning for stream"),
        ("--rank=9", "--rank=9 has no meaning for streaming_diloco; leave it out"),
        ("--effective_rank=9", "--effective_rank=9.0 has no meaning for streaming_di"),
        ("--method=snoo", "--regions=2 must be 1 for method='snoo'"),
        ("--compress=zip", "--compress='zip'"),
        ("--step_time_s=1,2,3", "--step_time_s=1,2,3 must be one number or one for"),
        ("--step_time_s=x", "--step_time_s=x must be numbers"),
        ("--step_time_s=0", "--step_time_s=0 must be positive"),
        ("--params=0", "--params=0.0 must be positive"),
        ("--sync_interval=0", "flag --sync_interval=0: 0 is not a positive integer"),
        ("--loss_curve=/no/such", "--loss_curve=/no/such needs --target_loss too"),
        ("--target_loss=2", "--target_loss=2.0 needs --loss_curve too"),
        ("extra", "unexpected argument 'extra'; flags begin"),
    ],
)
def test_bad_flags_are_one_line(flag, message, capsys):
    assert run(flag) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--links=/no/l.yaml",), "--links=/no/l.yaml: No such file or directory"),
        (("--links=l", "--world=w"), "--world=w has no meaning with --links; leave"),
        (("--links=l", "--bandwidth_gbps=1"), "--bandwidth_gbps=1.0 has no meaning w"),
        (("--world=mars", "--bandwidth_gbps=1"), "--world=mars: region 'mars' is unk"),
        (("--world=asia", "--latency_ms=9"), "--latency_ms=9.0 has no meaning with"),
        (("--world=asia", "--loss=0.1"), "--loss=0.1 has no meaning with --world; "),
        (("--loss_curve=c", "--target_loss=nan"), "--target_loss=nan must be finite"),
    ],
)
def test_bad_flags_of_links_and_losses(flags, message, capsys):
    assert run_elsewhere(*flags) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--frontier=/no", "--frontier=/no: No such file or directory"),
        (
            "--method=diloco",
            "--method=diloco has no meaning with --plan; leave it out",
        ),
        (
            "--delay_steps=3",
            "--delay_steps=3 has no meaning with --plan; leave it out",
        ),
        ("--sharing=fifo", "--sharing=fifo has no meaning with --plan; leave it out"),
        (
            "--host_mb_per_s=0.001",
            "--host_mb_per_s=0.001 has no meaning with --plan; leave it out",
        ),
        ("--steps=9", "--steps=9 has no meaning with --plan; leave it out"),
        (
            "--hours_between_failures=9",
            "--hours_between_failures=9.0 has no meaning with --plan; leave it out",
        ),
        (
            "--step_time_s=1,2,3",
            "--step_time_s=1,2,3 must be one number or one for each of 2 regions",
        ),
        ("--swarm_s=9", "--swarm_s=9.0 needs --stages of 2 or more"),
        ("--rebalance_s=9", "--rebalance_s=9.0 needs --swarm_s too"),
        ("--failures=region0@1", "--failures=region0@1 needs --swarm_s too"),
        ("--stages=2", "--stages=2 needs --activation_mb too"),
        ("--activation_mb=1", "--activation_mb=1.0 needs --stages of 2 or more"),
    ],
)
def test_bad_flags_of_a_plan(flag, message, capsys):
    assert run("--plan", flag) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["activation_mb", "swarm_s", "rebalance_s"])
def test_numbers_of_stages_are_positive(name, value, capsys):
    given = {"activation_mb": 5, "swarm_s": 60, "rebalance_s": 9} | {name: value}
    words = [f"--{name}={value}" for name, value in given.items()]
    assert run("--plan", "--stages=2", *words) == 2
    told = f"error: --{name}={value} must be positive and finite\n"
    assert capsys.readouterr() == ("", told)


def test_workdir_that_is_a_file(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("")
    assert run(f"--workdir={path}") == 2
    assert capsys.readouterr().err.startswith(f"error: --workdir={path}: ")


def test_goodput_and_a_link_that_becomes_slow(tmp_path, capsys):
    """A failure every 100 s, 25 s to repair; the link from b to a at a tenth."""
    links = tmp_path / "links.yaml"
    links.write_text(
        """
regions: [a, b, c]
default: {bandwidth_gbps: 8, latency_ms: 10}
changes:
  - {start_s: 30, duration_s: 1000, bandwidth_factor: 0.1, from: b, to: a}
"""
    )
    arguments = (
        f"--links={links}",
        "--params=1e8",
        "--method=diloco",
        "--sync_interval=4",
        "--steps=80",
        f"--hours_between_failures={100 / 3600}",
        "--repair_s=25",
        "--checkpoint_s=10",
        f"--workdir={tmp_path}",
    )
    assert run_elsewhere(*arguments) == 0
    assert "link from b to a" in capsys.readouterr().out
    found = read(tmp_path)
    assert found["faulty"][0]["kind"] == "link"
    summary = found["summary"]
    rate = 3 / 100
    one = 10 / (math.expm1(10 * rate) * (1 / rate + 25)) * summary["utilization"]
    assert summary["goodput_together"] == pytest.approx(one)
    assert one < summary["goodput_alone"] < 0.8 * summary["utilization"]
    assert run("--hours_between_failures=-1") == 2
    assert "--hours_between_failures=-1.0" in capsys.readouterr().err
    for flag, message in (
        ("--least_regions=3", "3 must be at most the number of regions, 2"),
        ("--checkpoint_s=nan", "nan must be finite"),
    ):
        assert run("--hours_between_failures=1", flag) == 2
        name = flag.partition("=")[0]
        assert capsys.readouterr().err == f"error: {name}={message}\n"


def test_curves_are_read(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    lines.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "loss": 9}\n')
    assert read_curve(lines) == [(1.0, 3.0)]
    assert read_curve(lines, "loss") == [(2.0, 9.0)]
    pairs = tmp_path / "curve.json"
    pairs.write_text("[[1, 3], [2, 2.5]]")
    assert read_curve(pairs) == [(1.0, 3.0), (2.0, 2.5)]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "eval_lo')
    assert read_curve(path) == [(1.0, 3.0)]


def test_bad_curves_name_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl has no line with both 'step'"):
        read_curve(path)
    path.write_text("[1, 2]")
    with pytest.raises(
        ValueError, match="metrics.jsonl is not a loss curve: TypeError"
    ):
        read_curve(path)
    path.write_text('{"step": 1, "eval_lo\n{"step": 2}\n')
    with pytest.raises(
        ValueError, match="not a loss curve: .*metrics.jsonl, line 1 is n"
    ):
        read_curve(path)
    path.write_text("[[1, 2.0], [1, 1.0]]")
    with pytest.raises(ValueError, match="loss curve steps must increase"):
        read_curve(path)
