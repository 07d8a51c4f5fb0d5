"""Regions that are killed: verdicts on made-up records, and on a real run."""

import json
import signal
import subprocess
import sys
import time

import pytest

from cocodc_jax.netlab import children
from cocodc_jax.run.config import flags
from experiments import chaos
from experiments.faults import kills, scenarios


def write(folder, name, lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_up(tmp_path, steps=(1, 2, 3, 7, 8), digest="a", back_at=6, dead_after_s=0.0):
    """Two regions of eight steps; the second one was dead from step 3 to 6."""
    for region, done in enumerate((range(1, 9), steps)):
        folder = tmp_path / f"region_{region}"
        write(folder, "metrics.jsonl", [{"kind": "train", "step": s} for s in done])
        join = {"from_peer": False, "step": 0, "time": 0, "seconds": {"let_in": 0.5}}
        joins = [join]

        if region:
            joins.append({**join, "from_peer": True, "step": back_at, "time": 20})
        write(folder, "joins.jsonl", joins)
        sync = {"fragment": 0, "start_step": 6, "digest": digest if region else "a"}
        write(folder, "syncs.jsonl", [sync])
        (folder / "summary.json").write_text(json.dumps({"eval_loss_outer": 2.0}))

    kill = {"region": 1, "was_in": True, "coordinated": False, "time": 12}
    judgement = kills.judge(
        tmp_path, 2, 8, [kill], seconds=20, dead_after_s=dead_after_s
    )
    return judgement | {"kills_asked": 1}


def test_a_run_that_keeps_the_promises_is_good(tmp_path):
    result = made_up(tmp_path)
    assert result["goodput"] == 13 / 16
    assert result["gaps_in_steps"] == result["merges_compared"] == 1
    assert result["seconds_from_kill_to_return"] == [8]

    # 8 of the two regions' 40 seconds are an outage.
    assert result["goodput_simulated"] == pytest.approx(0.8)
    assert kills.is_good(result | {"unbroken_loss": 2.05}, 2, 0.1)
    assert not kills.is_good(result | {"unbroken_loss": 2.2}, 2, 0.1)
    assert not kills.is_good(result, 3, 0.1)
    assert not kills.is_good(result | {"kills_asked": 2}, 2, 0.1)


def test_simulated_goodput_leaves_out_steps_while_all_regions_wait(tmp_path):
    """For 6 of the outage's 8 s the other region waits: 2 of 40 - 2 * 6 + 6 s are lost.

    A formula in which the others go on at once gave 0.84 where 0.96 was measured.
    """
    result = made_up(tmp_path, dead_after_s=6)
    assert result["goodput_simulated"] == pytest.approx(32 / 34)


@pytest.mark.parametrize(
    ("at", "gap"), [(5, "region 1: step 3 to 5"), (3, "region 1: step 3 to 3")]
)
def test_lost_and_repeated_steps_of_a_survivor_are_found(tmp_path, at, gap):
    result = made_up(tmp_path, steps=(1, 2, 3, at, 7, 8))
    assert result["gaps_unexplained"] == [gap]
    assert not kills.is_good(result, 2, 1)


def test_regions_that_differ_are_found(tmp_path):
    result = made_up(tmp_path, digest="b")
    assert result["merges_that_differ"] == {"(0, 6)": {"a": [0], "b": [1]}}
    assert not kills.is_good(result, 2, 1)


def test_a_cut_line_is_passed_over(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": \n{"a": 2}\n{"a"')
    assert kills.lines(path) == [{"a": 1}, {"a": 2}]


def test_the_unbroken_run_has_no_flags_of_elastic_regions():
    started_with = [
        "--regions=4",
        "--exchange=elastic",
        "--dead_after_s=8",
        "--outer_digests",
    ]
    flags.define()
    flags.parse(["chaos", *kills.unbroken_flags([*started_with, "--step_seconds=0.2"])])
    config = flags.config()

    assert config.run.exchange == "outer"
    assert config.run.step_seconds == 0
    assert flags.elastic().place(config.run.exchange, 4) is None


def child(program):
    return [sys.executable, "-S", "-c", program]


# JAX runs in this process; in the program it does not.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('much'); sys.exit('error: no room')", "ended with 1: no r"),
        ("print('stopped at step 8')", "ended with 0: stopped at step 8"),
    ],
)
def test_an_unbroken_run_that_fails_is_reported_with_its_last_line(
    program, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(kills.commands, "python_m", lambda _: child(program))

    with pytest.raises(ValueError, match=f"the unbroken run {message}"):
        kills.unbroken_loss([], tmp_path)


def test_a_region_that_refuses_its_flags_ends_the_run(tmp_path):
    programs = "import time; time.sleep(60)", "print('error: no'); raise SystemExit(2)"
    regions = [
        children.Region(child(program), tmp_path / f"{number}.log")
        for number, program in enumerate(programs)
    ]
    hit = kills.Chaos(tmp_path, regions)

    message = f"region 1 ended with exit code 2, see {tmp_path / '1.log'}: error: no"
    with pytest.raises(kills.RefusedError, match=message):
        hit.run(1, 8, seed=0, gap_s=1, restart_s=1)
    assert regions[1].lives == 1
    assert not regions[0].is_running


def test_a_region_that_ends_again_and_again_is_given_up(tmp_path, capsys):
    program = child("import sys; sys.exit('no room')")
    hit = kills.Chaos(tmp_path, [children.Region(program, tmp_path / "0.log")])

    message = (
        "region 0 ended 5 times before it took part: at last it ended with exit code "
        "1, .*: no room"
    )
    with pytest.raises(kills.RefusedError, match=message):
        hit.run(0, 8, seed=0, gap_s=1, restart_s=0)

    assert hit.regions[0].lives == 5
    assert (
        capsys.readouterr().err.count("region 0 by itself ended with exit code 1") == 5
    )
    end = {"region": 0, "took_part": False}
    assert [end | {"ended": x["ended"]} for x in hit.ends] == hit.ends
    assert kills.lines(tmp_path / kills.ENDS_FILE) == hit.ends


def test_a_region_that_starts_during_a_stop_is_stopped_too(tmp_path):
    class Late(children.Region):
        def start(self):
            hit.stop(0)
            super().start()

    program = child("import time; time.sleep(60)")
    hit = kills.Chaos(tmp_path, [Late(program, tmp_path / "0.log")])
    begin_s = time.monotonic()
    hit.run(0, 8, seed=0, gap_s=1, restart_s=1)
    assert time.monotonic() - begin_s < 30
    assert hit.regions[0].code == 128 + signal.SIGTERM


@pytest.mark.slow
def test_no_region_is_killed_before_every_region_takes_part(tmp_path):
    def region(number):
        folder = tmp_path / f"region_{number}"
        folder.mkdir()
        joins = str(folder / kills.JOINS_FILE)
        program = (
            'import time; time.sleep(0.7); line = f\'{{"time": {time.time()}, '
            f"\"epoch\": 0}}}}\\n'; open({joins!r}, 'a').write(line); time.sleep(6)"
        )
        return children.Region(child(program), tmp_path / f"{number}.log")

    hit = kills.Chaos(tmp_path, [region(0), region(1)])
    hit.run(3, 8, seed=0, gap_s=0.1, restart_s=0)
    assert [kill["was_in"] for kill in hit.kills] == [True] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regions=1"], "--regions=1 leaves no region when one is killed; use 2 or"),
        (["--kills=-1"], "--kills=-1 must be 0 or more"),
        (["--regions=2", "--scenario=link"], "--regions=2 is too few for --scenario=l"),
        (["--regions=1", "--scenario=cut"], "--regions=1 is too few for --scenario=cu"),
        (["--gap_s=nan"], "--gap_s=nan must be 0 or more, and finite"),
        (["--tolerance=-1"], "--tolerance=-1.0 must be 0 or more, and finite"),
        (["--scenario=cut", "--kills=3"], "--kills=3 has no meaning with --scenario;"),
        (["--at_s=9"], "--at_s=9.0 has no meaning without --scenario; leave it out"),
        (["--", "--regions=3"], "--regions=3 after -- is decided here; leave it out,"),
        (
            ["--scenario=cut", "--regions=3", "--", "--via=x"],
            "--via=x after -- is decided here; leave it out",
        ),
        (["--", "--log_every=3"], "--log_every=3 after -- is decided here; leave it o"),
        (["--", "--exchange=outer"], "--exchange='outer' is not how elastic regions"),
        (["--", "--method=mla"], "--exchange='elastic' is not possible for method='ml"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(words, message, refused, tmp_path):
    chaos_flags = [
        f"--workdir={tmp_path / 'run'}",
        *words,
        *["--"] * ("--" not in words),
    ]
    assert refused(chaos, *chaos_flags, "--preset=smoke").startswith(message)
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_scenario_that_is_over_is_refused(refused, tmp_path):
    (tmp_path / scenarios.RESULT_FILE).write_text("{}")
    words = [f"--workdir={tmp_path}", "--regions=3", "--scenario=cut"]
    error = refused(chaos, *words, "--", "--preset=smoke")
    assert "has the result of a scenario; name another" in error


@pytest.mark.slow
@pytest.mark.parametrize("has_ports", [True, False])
def test_regions_are_killed_and_no_work_is_lost(tmp_path, has_ports):
    command = [
        sys.executable,
        "-m",
        "experiments.chaos",
        "--regions=3",
        "--kills=2",
        "--gap_s=6",
        f"--workdir={tmp_path}",
        "--",
        "--preset=smoke",
        "--steps=240",
        "--step_seconds=0.25",
        "--eval_batches=6",
        "--eval_every=0",
    ]
    command += [] if has_ports else [f"--via={tmp_path}/messages"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "chaos.json").read_text())
    assert result["kills"] == 2
    assert result["merges_compared"] > 50
