"""Plans of faults: one seed is one story, regions without a model live through it."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from cocodc_jax.elastic import objects
from cocodc_jax.netlab import children
from experiments import chaos
from experiments.faults import judged, plans, story
from experiments.faults.network import Network, pairs_of
from experiments.faults.plans import Fault, Plan

MINE = {"kill": 3, "freeze": 3, "clock": 2, "folder": 3, "second_life": 2}

# A region that merges with the others until it is asked to stop.
REGION = """
import json, pathlib, signal, sys, time
folder, others = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
clock = time.monotonic()
while True:
    time.sleep(0.05)
    at = int(20 * time.monotonic())
    line = {"fragment": 0, "start_step": at, "apply_step": at, "regions": [0, 1],
            "digest": "same"}
    with open(folder / "syncs.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    first = folder.parent.parent / folder.name
    if "life_" in str(folder):  # A newer life; the first one ends once it sees it.
        (first / "newer").touch()
    elif (folder / "newer").exists():
        print("error: a newer life of this region takes part")
        sys.exit(3)
"""

# JAX runs in this process; in the regions it does not.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


@pytest.fixture
def teller(tmp_path, monkeypatch):
    def make(plan):
        made = story.Teller(plan, [], tmp_path)

        def life(region, workdir):
            folder = workdir / f"region_{region}"
            made.folders.append(folder)
            command = [sys.executable, "-S", "-c", REGION, str(folder), ""]
            process = children.Region(command, tmp_path / f"{region}.log")
            return story._Life(process, folder, plan.regions)

        monkeypatch.setattr(made, "_life", life)
        return made

    return make


def test_a_seed_decides_the_faults_of_a_plan():
    plan = Plan(seed=3, via=True, faults=MINE)
    assert plan.story() == Plan(seed=3, via=True, faults=MINE).story()
    assert plan.story() != Plan(seed=4, via=True, faults=MINE).story()

    kinds = [fault.kind for fault in plan.story()]
    assert {kind: kinds.count(kind) for kind in MINE} == MINE
    assert [fault.number for fault in plan.story()] == [*range(13)]

    cuts = Plan(faults={"cut": 40}).story()
    assert {fault.detail for fault in cuts} == {"apart", "one way"}
    assert {len(fault.regions) for fault in cuts if fault.detail == "apart"} == {1, 2}
    assert all(fault.seconds > 0 for fault in cuts)


def test_a_cut_separates_the_regions_it_names():
    assert pairs_of("one way", (2, 0), 4) == {(2, 0)}
    apart = {(0, 1), (0, 2), (1, 0), (2, 0)}
    assert pairs_of("apart", (0,), 3) == apart


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "is no TOML"),
        ("faults = {}", "faults has none"),
        ("faults = {kill = -1}", "faults.kill=-1 must be 0 or more"),
        ("faults = {fire = 1}", "faults has 'fire'; use kill, freeze"),
        ("fault = {kill = 1}", "has 'fault'; it may have seed, regions, via"),
        ("regions = 1\nfaults = {kill = 1}", "regions=1 must be 2 to 64"),
        ("regions = '4'\nfaults = {kill = 1}", "regions='4' is of another kind"),
        ("min_regions = 5\nfaults = {kill = 1}", "min_regions=5 must be 1 to 4"),
        ("hang_s = 0\nfaults = {kill = 1}", "hang_s=0 must be above 0"),
        ("faults = {second_life = 1}", "faults.second_life needs via = true"),
        ("via = true\nfaults = {cut = 1}", "faults.cut needs sockets"),
        ("program = 1\nfaults = {kill = 1}", "program=1 is of another kind"),
    ],
)
def test_an_invalid_plan_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="plan=.*plan.toml") as raised:
        plans.read(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value).removesuffix("\n") or "TOML" in message


def test_a_missing_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none' cannot be read: No such file"):
        plans.read(tmp_path / "none")


def test_cuts_of_the_network_need_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="run it as root"):
        Plan(faults={"cut": 1}).check_possible()


@pytest.mark.parametrize("name", ["no_such.trainer", "experiments.no_such", "a..b"])
def test_a_missing_program_is_refused(name):
    plan = Plan(program=name, faults={"kill": 1})
    with pytest.raises(ValueError, match=f"program='{name}' is no module that"):
        plan.check_possible()


def test_a_plan_runs_a_program_of_its_own(tmp_path):
    plan = plans.read(pathlib.Path(plans.__file__).with_name("plain_loop.toml"))
    plan.check_possible()
    assert (plan.num_faults, plan.faults) == (20, {"kill": 20})

    teller = story.Teller(plan, ["--step_seconds=1"], tmp_path)
    teller._addresses = ("host:1", "host:2")
    words = teller._life(1, tmp_path).process._command
    at = words.index("experiments.faults.plain_loop")
    assert words[at + 1] == "--step_seconds=1"
    assert words[-1] == "--region_id=1"
    assert not any(word.startswith("--exchange") for word in words)


@pytest.mark.parametrize("name", ["sockets.toml", "folder.toml"])
def test_the_plans_that_come_with_the_package_can_be_read(name):
    path = chaos.__file__.removesuffix("chaos.py") + f"faults/{name}"
    assert plans.read(path).num_faults >= 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kills=3"], "--kills=3 has no meaning with --plan; say it in the plan"),
        (["--seed=3"], "--seed=3 has no meaning with --plan; say it in the plan"),
        (["--", "--via=x"], "--via=x after -- is decided here; leave it out"),
        (["--", "--regions=2"], "--regions=2 after -- is decided here; leave it out"),
        (["--", "--method=mla"], "--exchange='elastic' is not possible for method='ml"),
    ],
)
def test_flags_that_a_plan_decides_are_refused(words, message, refused, tmp_path):
    (tmp_path / "plan.toml").write_text("faults = {kill = 1}")

    chaos_flags = [
        f"--plan={tmp_path}/plan.toml",
        f"--workdir={tmp_path / 'run'}",
        *words,
    ]
    chaos_flags += ["--"] * ("--" not in words)

    assert refused(chaos, *chaos_flags, "--preset=smoke").startswith(message)
    assert not (tmp_path / "run").exists()


def test_regions_survive_the_faults_of_a_plan(teller, tmp_path):
    plan = Plan(regions=2, hang_s=20.0, via=True, gap_s=0.1, faults={"kill": 1})
    faults = [
        Fault(0, "kill", 0.1, 0.2, (0,)),
        Fault(1, "freeze", 0.1, 0.5, (1,)),
        Fault(2, "second_life", 0.1, 0.3, (1,)),
        Fault(3, "kill", 0.1, 0.1, (1,)),
    ]
    tells = teller(plan)
    outcomes = tells.tell(faults)

    assert [outcome["kind"] for outcome in outcomes] == [fault.kind for fault in faults]
    assert all(outcome["merged_after_s"] is not None for outcome in outcomes)
    assert outcomes[1]["lasted_s"] >= 0.5
    assert list(outcomes[2]["ended"]) == ["first"]
    assert outcomes[2]["ended"]["first"].endswith(
        "a newer life of this region takes part"
    )
    assert [stop["code"] for stop in tells.stops] == [75, 75]
    assert not tells.ends

    # The second life is the region's from then on, also after a kill.
    assert tells._lives[1].folder == tmp_path / "life_2" / "region_1"
    assert tells._lives[1].process.lives == 2


def test_a_region_that_ends_is_restarted_and_one_that_hangs_is_reported(
    teller, monkeypatch
):
    monkeypatch.setattr(story, "_STOP_S", 1.0)
    tells = teller(Plan(regions=2, hang_s=1.0, faults={"kill": 1}))

    def freeze(fault):
        tells._lives[0].process.processes[0].kill()  # As if it had ended by itself.
        tells._wait(1.0)
        tells._lives[1].process.processes[0].send_signal(19)
        return {}

    tells._freeze = freeze
    (outcome,) = tells.tell([Fault(0, "freeze", 0.1, 0.1, (1,))] * 3)
    assert outcome["merged_after_s"] is None
    assert [end["region"] for end in tells.ends] == [0]
    # It is killed, as it did not stop in time.
    assert None in [stop["code"] for stop in tells.stops]


@pytest.mark.parametrize("detail", plans.FOLDER_FAULTS)
def test_harm_to_a_folder_is_undone_where_it_lasts(tmp_path, detail):
    folder = tmp_path / "messages"
    folder.mkdir()
    key = b"k" * 32
    start = "000-00000000000000000007-0000000001-2"
    name = f"{start}-{objects.tag(key, start)}"
    (folder / name).write_bytes(b"x" * 100)

    with story._folder_fault(detail, folder, key):
        there = {p.name: p for p in folder.iterdir()} if folder.exists() else {}

        if detail == "away":
            assert not folder.exists()
        elif detail == "emptied":
            assert not there
        elif detail == "garbled":
            assert (folder / name).read_bytes() != b"x" * 100
        else:
            assert len(there) >= 16
            assert there[name].is_fifo() == (detail == "pipes")
            for other in there:
                start, _, tag = other.rpartition("-")
                is_opened = tag == objects.tag(key, start)
                assert is_opened == (detail == "pipes" or other == name)

    left = [path.name for path in folder.iterdir()]
    assert left == ([name] if detail in ("strangers", "away", "garbled") else [])


def records(folder, digest, regions, own_start=1):
    folder.mkdir(parents=True)
    sync = {"fragment": 0, "start_step": own_start, "apply_step": 4}
    lines = [{**sync, "digest": digest, "regions": regions}]
    lines.append({**sync, "start_step": 9, "digest": digest, "regions": []})
    (folder / "syncs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')


def test_merges_are_compared_within_a_part(tmp_path):
    folders = [tmp_path / f"region_{r}" for r in range(4)]
    for region, folder in enumerate(folders):
        part = [0, 1] if region < 2 else [2, 3]
        records(folder, str(region // 2), part)

    parts = Plan(min_regions=1, faults={"kill": 1})
    judgement = judged.judge(parts, folders)
    assert (judgement["merges_compared"], judgement["merges_that_differ"]) == (2, {})
    # With more than half of the regions there is one part only.
    judgement = judged.judge(Plan(faults={"kill": 1}), folders)
    assert list(judgement["merges_that_differ"]) == ["(0, 1)"]
    assert judgement["steps_done"] == [1] * 4


FAULT = {"kind": "kill", "detail": "", "lasted_s": 1.0, "merged_after_s": 2.0}
STOP = {"region": 0, "code": 75, "seconds": 1.5}
RESULT = {
    "command": "chaos",
    "plan": {"via": False, "regions": 2, "seed": 1, "hang_s": 9.0},
    "planned": 1,
    "seconds": 5.0,
    "cores": 2,
    "hangs": [],
    "merges_compared": 3,
    "merges_that_differ": {},
    "two_lives": [],
    "returns_from_a_peer": 1,
    "returns_with_own_work": 0,
    "steps_done": [4, 3],
    "last_step": 4,
    "stops": [STOP],
    "faults": [FAULT],
    "ended_by_themselves": [],
}


def test_a_report_of_a_run_that_held():
    page = judged.report(RESULT | {"held": judged.is_good(RESULT)})

    assert page.startswith("# Chaos: what is promised held\n")
    assert "| kill | 1 | 1.0 to 1.0 | 2.0, 2.0 |" in page
    assert "7 of 8 steps were done (0.875)" in page


def test_a_report_says_that_a_plan_ended_early():
    early = RESULT | {"planned": 2, "held": False}
    assert judged.report(early).startswith("# Chaos: what is promised held until")


@pytest.mark.parametrize(
    "change",
    [
        {"hangs": [FAULT]},
        {"two_lives": [FAULT]},
        {"merges_that_differ": {"(0, 1)": {}}},
        {"planned": 2},
        {"stops": [{**STOP, "code": 137}]},
    ],
)
def test_a_result_with_a_broken_promise_is_not_good(change):
    assert not judged.is_good(RESULT | change)


def test_a_shifted_clock_changes_the_time_of_day_only(tmp_path):
    (tmp_path / "prints.py").write_text(
        "import time\nprint(time.time(), time.time_ns() // 10**9, time.monotonic())\n"
    )
    (tmp_path / "seconds").write_text("-3600.5")
    command = [sys.executable, "-m", "experiments.faults.shifted"]
    command += [str(tmp_path / "seconds"), "prints"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    seconds, whole, monotonic = map(float, done.stdout.split())

    assert abs(seconds - time.time() + 3600.5) < 60
    assert abs(whole - seconds) < 2
    assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are for root")
def test_a_network_is_cut_in_one_direction_and_mended():
    send = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "s.sendto(sys.argv[2].encode(), (sys.argv[1], 9876))"
    )
    hear = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "s.bind(('', 9876)); s.settimeout(20); print('ready', flush=True);"
        "print(s.recv(9).decode(), flush=True)"
    )
    python = [sys.executable, "-S", "-c"]

    with Network(2) as network:
        hearing = subprocess.Popen(
            [*network.inside(1), *python, hear], stdout=subprocess.PIPE, text=True
        )
        assert hearing.stdout.readline() == "ready\n"
        host = network.addresses[1].partition(":")[0]
        network.cut({(0, 1)})
        subprocess.run([*network.inside(0), *python, send, host, "lost"], check=False)
        network.mend()
        subprocess.run([*network.inside(0), *python, send, host, "heard"], check=True)
        assert hearing.communicate(timeout=30)[0] == "heard\n"
