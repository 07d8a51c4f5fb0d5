"""`experiments.simulate`: its files and numbers by hand, and what it refuses."""

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
SLOW = "--bandwidth_gbps=0.1"


@pytest.fixture
def simulated(tmp_path):
    """Simulates on the links of `BASE` or on others; returns the written table."""

    def found(*arguments, base=BASE):
        words = ["simulate", *base, f"--workdir={tmp_path}", *arguments]
        assert simulate.main(words) == 0
        return json.loads((tmp_path / "simulation.json").read_text())

    return found


@pytest.fixture
def planned(tmp_path, capsys):
    """Makes a plan; returns its explanation."""

    def said(*arguments, base=BASE):
        words = ["simulate", "--plan", *base, f"--workdir={tmp_path}", *arguments]
        assert simulate.main(words) == 0
        return capsys.readouterr().out

    return said


def test_a_simulation_leaves_numbers_a_timeline_and_a_plot(simulated, tmp_path, capsys):
    folder = tmp_path / "new"
    arguments = ("--method=diloco", "--sync_interval=4", "--steps=8")
    assert simulate.main(["simulate", *BASE, *arguments, f"--workdir={folder}"]) == 0

    result = json.loads((folder / "simulation.json").read_text())
    # 8 steps, twice a sync of 2 GB: 2 s and two delays.
    assert result["summary"]["sim_s"] == 8 + 2 * 2.5
    assert result["summary"]["bytes_sent_per_region"] == 4e9
    assert result["flags"]["sync_interval"] == 4
    assert [sync["merge_step"] for sync in result["syncs"]] == [4, 8]

    trace = json.loads((folder / "timeline.json").read_text())
    assert any(event.get("name") == "stall" for event in trace["traceEvents"])
    assert (folder / "timeline.png").stat().st_size > 5000
    assert "slowdown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("data_parallel", 30 * 3.5),
        ("diloco", 300 + 3 * 2.5),
        ("apart", 30),
        ("streaming_diloco", 300),
        ("cocodc", 300),
        # Signs at every step; three rounds, hidden; region 1 alone every 50 steps.
        ("distributed_lion", 30 * (1 + 4 / 32 + 0.25)),
        ("co2", 3 * 48),
        ("heloco", 150 + 3 * 4.5),
    ],
)
def test_simulated_seconds_of_each_method_by_hand(method, expected, simulated):
    assert simulated(f"--method={method}")["summary"]["sim_s"] == pytest.approx(
        expected
    )


def test_an_automatic_delay_works_with_unequal_regions(simulated):
    result = simulated(FRAGMENTS, "--delay_steps=auto", "--step_time_s=1,0.5")
    assert result["summary"]["max_delay_steps"] >= 2
    assert result["summary"]["utilization"] < 1


def test_links_come_from_a_file_or_by_name(simulated, tmp_path):
    links = tmp_path / "links.yaml"
    links.write_text(
        "{regions: [a, b, c], default: {bandwidth_gbps: 8, latency_ms: 250}}"
    )
    result = simulated("--method=diloco", f"--links={links}", base=MODEL)
    assert len(result["bytes_sent"]) == 3
    result = simulated("--world=us-east,australia", base=MODEL)
    assert len(result["bytes_sent"]) == 2


def test_seconds_to_a_target_loss_are_interpolated(simulated, tmp_path):
    curve = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "eval_loss": 4 - s / 100} for s in (0, 100, 200)]
    curve.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = (f"--loss_curve={curve}", "--target_loss=2.5")
    summary = simulated("--method=diloco", *arguments)["summary"]
    assert summary["sim_s_to_target"] == pytest.approx(152.5)


def test_a_plan_of_float32_messages_explains_and_its_flags_work(
    planned, simulated, tmp_path
):
    explanation = planned(FRAGMENTS, SLOW, "--compress=none")
    assert "tau = " in explanation
    assert "- Extrapolated, not measured: parameters 1,000,000,000 (" in explanation
    assert json.loads((tmp_path / "plan.json").read_text())["num_fragments"] >= 2

    command = explanation.splitlines()[-1].split()
    names = "method|num_fragments|sync_interval|delay_steps"
    chosen = [word for word in command if re.match(rf"--({names})=", word)]
    assert len(chosen) == 4

    result = simulated(SLOW, *chosen)
    assert result["summary"]["stall_s"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["direct", "gloo"])
def test_a_plan_takes_the_collective_that_is_given(name, planned):
    explanation = planned(SLOW, f"--collective={name}", "--compress=none")
    assert f"All-reduce as {name}, " in explanation


def test_a_plan_of_stages_assigns_stages_to_sites(planned, tmp_path):
    links = tmp_path / "links.yaml"
    # Two near, two far away: heavy activations keep each pipeline in one place.
    links.write_text(
        "{regions: [a, b, c, d], default: {bandwidth_gbps: 0.1, latency_ms: 50}, "
        "links: [{between: [a, b], bandwidth_gbps: 10}, "
        "{between: [c, d], bandwidth_gbps: 10}]}"
    )
    base = (*MODEL, f"--links={links}", "--activation_mb=100")

    explanation = planned("--stages=2", base=base)
    placed = json.loads((tmp_path / "placement.json").read_text())
    pipelines = {frozenset(path) for path in zip(*placed["sites"], strict=True)}
    assert pipelines == {frozenset("ab"), frozenset("cd")}
    assert "- Stage 0 on a, " in explanation
    assert "tau = " in explanation
    assert "No average is needed" in planned("--stages=4", base=base)


SWARM = (
    "--regions=4",
    "--bandwidth_gbps=10",
    "--latency_ms=0",
    "--step_time_s=2,2,2,2",
    "--params=1e6",
    "--activation_mb=1e-3",
    "--stages=2",
    "--swarm_s=400",
    "--rebalance_s=50",
)


def test_a_plan_of_stages_is_simulated_with_failures(planned):
    explanation = planned(*SWARM, "--failures=region0@0,region1@0-20")
    rates = dict(re.findall("Batches a second (.*): ([0-9.]+[0-9])", explanation))
    fixed, wired, moved = (float(rates[how]) for how in rates)
    assert fixed <= wired <= moved
    assert "Without links and failures at most 2, region" in explanation


SITES = " must be a site of region0, region1, region2, region3, and from"


@pytest.mark.parametrize(
    ("failures", "why"),
    [
        ("mars@3", SITES),
        ("region0@x", SITES),
        ("region0@5-3", ": start_s=5.0 must be at least 0 and before end_s=3.0"),
    ],
)
def test_invalid_failures_are_refused(failures, why, refused):
    error = refused(simulate, "--plan", *BASE, *SWARM, f"--failures={failures}")
    assert error.startswith(f"--failures={failures}: '{failures}'{why}")


def test_compress_reaches_the_simulated_messages(simulated):
    sent = simulated("--method=diloco", "--compress=int8")["bytes_sent"][0]
    # Gathered from two regions, three times, with a scale for 256 numbers.
    assert sent == pytest.approx(3 * 4e9 * (1 / 4 + 4 / 1024))


def test_answers_and_grace_set_the_simulated_delay(simulated):
    late = ("--answer_steps=1,9", "--grace_steps=3", "--quorum=1")
    result = simulated("--method=decoupled_diloco", *late)
    assert result["summary"]["max_delay_steps"] == 4


def test_an_effective_rank_shortens_the_simulated_rounds(simulated):
    ranks = ("--sync_interval=20", "--rank=32", "--min_rank=4", "--effective_rank=8")
    syncs = simulated("--method=dilocox", *ranks, "--steps=100")["syncs"]
    delays = [sync["merge_step"] - sync["start_step"] for sync in syncs]
    assert (delays[0], delays[-1]) == (20, 5)


def test_a_network_share_sets_the_simulated_slots(simulated):
    auto = ("--syncs_per_interval=auto", "--network_share=0.3", "--delay_steps=auto")
    syncs = simulated("--method=cocodc", *auto, "--steps=300")["syncs"]
    # 0.5 GB and two delays: a sync of 1 s, so 30 fit in 30 s of 100, 3 steps apart.
    assert syncs[-1]["start_step"] - syncs[-2]["start_step"] == 3


@pytest.mark.parametrize(("flags", "message"), [
    ("--bandwidth_gbps=-1", "--bandwidth_gbps=-1.0 must be positive and finite"),
    ("--latency_ms=-3", "--latency_ms=-3 must be at least 0"),
    ("--latency_ms=nan", "--latency_ms=nan must be finite"),
    ("--jitter_ms=inf", "--jitter_ms=inf must be finite"),
    ("--frontier=x", "--frontier=x needs --plan too"),
    ("--repair_s=3", "--repair_s=3.0 needs --hours_between_failures too"),
    ("--loss_key=loss", "--loss_key=loss needs --loss_curve too"),
    ("--links=l.yaml", "--regions=2 has no meaning with --links; leave it out"),
    ("--world=us-east,asia", "--regions=2 has no meaning with --world; leave i"),
    ("--loss=1.5", "--loss=1.5 must be in [0, 1)"),
    ("--regions=0", "--regions=0 must be at least 1"),
    ("--method=gossip", "--method=gossip must be one of "),
    ("--methd=diloco", "Unknown command line flag 'methd'. Did you mean: method"),
    ("--delay_steps=-1", "--delay_steps=-1 must be a whole number or 'auto'"),
    ("--delay_steps=101", "--delay_steps=101 is longer than sync_interval=100"),
    ("--num_fragments=3", "--sync_interval=100 is not a multiple of num_fragments"),
    ("--syncs_per_interval=9", "--syncs_per_interval=9 has no meaning for stream"),
    ("--effective_rank=9", "--effective_rank=9.0 has no meaning for streaming_di"),
    ("--effective_rank=nan", "--effective_rank=nan must be positive and finite"),
    ("--effective_rank=-1", "--effective_rank=-1.0 must be positive and finite"),
    ("--method=snoo", "--regions=2 must be 1 for method='snoo'"),
    ("--method=decoupled_diloco --quorum=5", "--regions=2 must be at least 5 for "),
    ("--method=decoupled_diloco --grace_steps=5",
     "--grace_steps=5 needs --answer_steps too"),
    ("--workdir=gs://bucket/x", "--workdir='gs://bucket/x' is in a bucket"),
    ("--workdir=/dev/null", "--workdir='/dev/null' is a file; name a folder"),
    ("--compress=zip", "--compress='zip'"),
    ("--step_time_s=1,2,3", "--step_time_s=1,2,3 must be one number or one for"),
    ("--step_time_s=x", "--step_time_s=x must be numbers"),
    ("--step_time_s=0", "--step_time_s=0 must be positive"),
    ("--params=0", "--params=0.0 must be positive"),
    ("--loss_curve=/no/such", "--loss_curve=/no/such needs --target_loss too"),
    ("--target_loss=2", "--target_loss=2.0 needs --loss_curve too"),
    ("extra", "unexpected argument 'extra'; flags begin"),
    ("--hours_between_failures=-1", "--hours_between_failures=-1.0"),
    ("--hours_between_failures=1 --least_regions=3",
     "--least_regions=3 must be at most the number of regions, 2"),
    ("--hours_between_failures=1 --checkpoint_s=nan",
     "--checkpoint_s=nan must be finite"),
    ("--plan --sharing=fifo", "--sharing=fifo has no meaning with --plan; leave i"),
    ("--plan --frontier=/no", "--frontier=/no: No such file or directory"),
    ("--plan --step_time_s=1,2,3",
     "--step_time_s=1,2,3 must be one number or one for each of 2 regions"),
    ("--plan --swarm_s=9", "--swarm_s=9.0 needs --stages of 2 or more"),
    ("--plan --rebalance_s=9", "--rebalance_s=9.0 needs --swarm_s too"),
    ("--plan --failures=region0@1", "--failures=region0@1 needs --swarm_s too"),
    ("--plan --compress=int4", "--compress=int4 is what --plan chooses; leave it out"),
    ("--plan --sync_interval=9",
     "--sync_interval=9 is for plans of float32 messages; add --compress=none"),
    ("--plan --stages=2", "--stages=2 needs --activation_mb too"),
    ("--plan --activation_mb=1", "--activation_mb=1.0 needs --stages of 2 or more"),
])  # fmt: skip
def test_wrong_flags_are_refused_in_a_line(flags, message, refused):
    assert refused(simulate, *BASE, *flags.split()).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--links=/no/l.yaml", "--links=/no/l.yaml: No such file or directory"),
        ("--links=l --world=w", "--world=w has no meaning with --links; leave"),
        ("--links=l --bandwidth_gbps=1", "--bandwidth_gbps=1.0 has no meaning w"),
        ("--world=mars --bandwidth_gbps=1", "--world=mars: region 'mars' is unk"),
        ("--world=asia --latency_ms=9", "--latency_ms=9.0 has no meaning with"),
        ("--world=asia --loss=0.1", "--loss=0.1 has no meaning with --world; "),
        ("--loss_curve=c --target_loss=nan", "--target_loss=nan must be finite"),
    ],
)
def test_wrong_flags_of_links_and_losses_are_refused_in_a_line(flags, message, refused):
    assert refused(simulate, *MODEL, *flags.split()).startswith(message)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["activation_mb", "swarm_s", "rebalance_s"])
def test_numbers_of_stages_are_positive(name, value, refused):
    flags = {"activation_mb": 5, "swarm_s": 60, "rebalance_s": 9} | {name: value}
    words = [f"--{name}={value}" for name, value in flags.items()]
    error = refused(simulate, "--plan", "--stages=2", *BASE, *words)
    assert error == f"--{name}={value} must be positive and finite"


def test_goodput_counts_failures_and_a_slow_link_is_named(simulated, tmp_path, capsys):
    """A failure every 100 s, 25 s to repair; the link from b to a at a tenth."""
    links = tmp_path / "links.yaml"
    links.write_text("""
regions: [a, b, c]
default: {bandwidth_gbps: 8, latency_ms: 10}
changes:
  - {start_s: 30, duration_s: 1000, bandwidth_factor: 0.1, from: b, to: a}
""")
    failing = (f"--hours_between_failures={100 / 3600}", "--repair_s=25")
    result = simulated(
        f"--links={links}",
        "--params=1e8",
        "--method=diloco",
        "--sync_interval=4",
        "--steps=80",
        *failing,
        "--checkpoint_s=10",
        base=MODEL,
    )

    assert "link from b to a" in capsys.readouterr().out
    assert result["faulty"][0]["kind"] == "link"

    summary = result["summary"]
    rate = 3 / 100
    one = 10 / (math.expm1(10 * rate) * (1 / rate + 25)) * summary["utilization"]
    assert summary["goodput_together"] == pytest.approx(one)
    assert one < summary["goodput_alone"] < 0.8 * summary["utilization"]


def test_loss_curves_are_read(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    # The last line is being written.
    lines.write_text('{"step": 1, "eval_loss": 3.0}\n{"step": 2, "loss": 9}\n{"step"')
    assert read_curve(lines) == [(1.0, 3.0)]
    assert read_curve(lines, "loss") == [(2.0, 9.0)]
    pairs = tmp_path / "curve.json"
    pairs.write_text("[[1, 3], [2, 2.5]]")
    assert read_curve(pairs) == [(1.0, 3.0), (2.0, 2.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n', "metrics.jsonl has no line with both 'step'"),
        ("[1, 2]", "metrics.jsonl is not a loss curve: TypeError"),
        (
            '{"step": 1, "eval_lo\n{"step": 2}\n',
            "not a loss curve: .*metrics.jsonl, line 1 is n",
        ),
        ("[[1, 2.0], [1, 1.0]]", "loss curve steps must increase"),
    ],
)
def test_bad_curves_name_the_file(text, message, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_curve(path)
