"""The examples for clusters, as far as they can be checked without one."""

import json
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from cocodc_jax.methods import METHODS
from cocodc_jax.run.config.flags import ELASTIC, PROCESSES
from cocodc_jax.run.config.presets import PRESETS
from cocodc_jax.run.config.train_config import LEAVES
from cocodc_jax.run.live_metrics import METRICS

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "launch"
FILES = ("slurm.sbatch", "slurm_region.sbatch", "kubernetes.yaml", "tpu_pod.sh")


@pytest.mark.parametrize("name", [x for x in FILES if x != "kubernetes.yaml"])
def test_scripts_are_shell(name):
    words = ["bash", "-n", FOLDER / name]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_flags_are_those_of_train(name):
    text = (FOLDER / name).read_text()
    commands = text[text.index("experiments.train") :]
    flags = dict(re.findall(r"^\s*(?:- )?--(\w+)=(\S+)", commands, re.MULTILINE))
    flags |= dict(re.findall(r" --(preset|method|regions|exchange)=(\w+)", commands))
    flag_names = {"preset", "workdir", *PROCESSES, *ELASTIC, *LEAVES}

    for flag in ("preset", "method", "regions", "num_processes", "workdir"):
        assert flag in flags
    shell = {"signal", "zone", "worker", "command", "label"}  # of other programs
    assert set(flags) - shell <= flag_names
    preset = PRESETS[flags["preset"]]
    assert flags["method"] in METHODS
    known = {k: v for k, v in flags.items() if k in ("method", "exchange")}
    preset.replace(**known, regions=int(flags["regions"]))


@pytest.mark.parametrize("name", FILES)
def test_launch_files_install_the_extras_of_the_programs(name):
    """The core is JAX and Optax alone: without [all] no program starts."""
    extras = re.search(r"pip install -e \S+?\[(\S+)\]`", (FOLDER / name).read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is not None
    assert "all" in extras[1].split(",")
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])


def kubernetes():
    """Return the service, the job, its pod and the flags of its container."""
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [word[2:] for word in container["command"] if word.startswith("--")]
    return service, job, pod, dict(word.split("=") for word in words)


def test_the_kubernetes_service_selects_the_pods_of_the_job():
    service, job, pod, _ = kubernetes()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]


def test_kubernetes_flags_name_the_processes_of_the_job():
    _, job, pod, flags = kubernetes()
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"

    count = int(flags["num_processes"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == count
    assert int(flags["regions"]) % count == 0
    assert flags["coordinator_address"] == f"{name}-0.{pod['subdomain']}:9876"
    assert flags["process_id"] == "$(JOB_COMPLETION_INDEX)"


def test_the_kubernetes_workdir_is_in_a_volume():
    _, _, pod, flags = kubernetes()
    (container,) = pod["containers"]
    mounts = [m["mountPath"] for m in container["volumeMounts"]]
    assert any(flags["workdir"].startswith(f"{path}/") for path in mounts)


def test_the_dashboard_shows_every_metric_and_no_other():
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    panels = dashboard["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]
    ]
    assert set(re.findall(r"cocodc_\w+", " ".join(queries))) == {
        metric.name for metric in METRICS
    }

    guide = (ROOT / "docs/guides/monitoring.md").read_text()
    assert {metric.name for metric in METRICS} <= set(re.findall(r"cocodc_\w+", guide))

    labels = set(re.findall(r"{{(\w+)}}", json.dumps(dashboard)))
    assert labels <= {"region", "process", *(x for m in METRICS for x in m.labels)}

    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
