"""The programs as commands of an installation."""

import ast
import importlib
import os
import pathlib
import subprocess
import sys

import pytest

from cocodc_jax.aot.targets import Target
from cocodc_jax.netlab import region
from experiments import (
    chaos,
    commands,
    compare_networks,
    compile,
    launch_local,
    probe_network,
)

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = commands.programs()


def test_every_program_is_listed_by_its_first_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cocodc"])
    assert commands.main() == 0
    *_, listed = capsys.readouterr().out.partition("\n\n")
    files = (ROOT / "experiments").rglob("*.py")
    assert len(PROGRAMS) == sum("\n    cli()\n" in path.read_text() for path in files)
    assert [line.split()[0] for line in listed.splitlines()] == list(PROGRAMS)
    assert "  train                Trains one model in several regions" in listed

    monkeypatch.setattr(sys, "argv", ["cocodc", "trian"])
    assert commands.main() == 2
    message = (
        "error: unknown program 'trian'; did you mean cocodc train?\n\ncocodc PROG"
    )
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("path", PROGRAMS.values(), ids=PROGRAMS)
def test_a_command_line_that_is_shown_is_one_that_can_be_pasted(path):
    """Continued lines end in a backslash, which only a raw string keeps."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert f"python -m {module}" in text
    assert not [line for line in text.splitlines() if len(line) > 88]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("simulate --help", 0, "The network\n  --regions=4"),
        ("simulate --help=all", 0, "The network\n  --regions=4"),
        ("wan --help", 0, "The links\n  --regions=2"),
        ("probe-network --help", 0, "Flags\n  --sizes_mb=16,4,1,0.1"),
        ("simulate --regions=x", 2, "error: --regions=x must be a whole number"),
    ],
)
def test_a_command_runs_the_program(words, code, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cocodc", *words.split()])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == code
    assert text in "".join(capsys.readouterr())


def test_a_missing_extra_is_one_line(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["cocodc", "compare"])
    line = "error: rich is not installed: pip install 'cocodc_jax[all]'"
    assert commands.main() == line


@pytest.mark.parametrize("name", ["simulation.json", "timeline.json", "timeline.png"])
def test_a_result_that_cannot_be_written_is_named_in_one_line(
    name, tmp_path, monkeypatch, capsys
):
    (tmp_path / name).mkdir()
    words = ["--method=diloco", "--regions=2", f"--workdir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["cocodc", "simulate", *words])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    message = f"error: {tmp_path / name} cannot be written (Is a directory)\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, message)
    assert not list(tmp_path.glob(".*"))


def test_programs_are_called_as_they_are_installed(monkeypatch):
    module = "python -m experiments.compare_networks"
    assert commands.command_line("compare_networks", ["--x"]) == f"{module} --x"
    assert commands.python_m("wan")[1:] == ["-m", "experiments.wan"]
    monkeypatch.setattr(commands, "IS_INSTALLED", True)
    assert commands.command_line("compare_networks", []) == "cocodc compare-networks"
    text = "`experiments.wan -- python -m experiments.train`"
    assert commands.shown(text) == "`cocodc wan -- cocodc train`"


@pytest.mark.parametrize(("chosen", "holds"), [(None, "1"), ("3", "3")])
def test_openblas_uses_one_thread_by_default(chosen, holds):
    name = "OPENBLAS_NUM_THREADS"
    environment = {k: v for k, v in os.environ.items() if k != name}
    environment |= {name: chosen} if chosen else {}

    # A value that is set after SciPy is loaded has no effect.
    shown = f"os.environ[{name!r}], 'scipy' in sys.modules"
    code = f"import os, sys, experiments; print({shown})"
    out = subprocess.check_output(
        [sys.executable, "-c", code], env=environment, cwd=ROOT
    )
    assert out.decode().split() == [holds, "False"]


SMOKE = ("--", "--preset=smoke", "--regions=2")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (compile, ("--target=v5e:2x2", "--preset=smoke", "--regions=2")),
        (chaos, ("--regions=2", *SMOKE[:2])),
        (compare_networks, ("--networks=100", *SMOKE)),
        (launch_local, (*SMOKE, "--workdir={}")),
        (launch_local, ("--elastic", *SMOKE, "--workdir={}")),
        (probe_network, ()),
    ],
)
def test_a_folder_that_cannot_be_created_is_named_before_the_work(
    program, words, refused, tmp_path, monkeypatch
):
    if program is probe_network:
        monkeypatch.setenv("COCODC_NUM_PROCESSES", "2")
        monkeypatch.setenv("COCODC_PROCESS_ID", "0")
        monkeypatch.setenv("COCODC_COORDINATOR_ADDRESS", "127.0.0.1:1")

    monkeypatch.setattr(region, "missing", list)
    monkeypatch.setattr(Target, "check_installed", lambda _: None)
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"

    if "--workdir={}" not in words:
        words = ("--workdir={}", *words)
    assert refused(program, *(word.format(folder) for word in words)) == (
        f"--workdir={str(folder)!r} cannot be written to (Not a directory); "
        "make room, change its permissions, or name another folder"
    )


@pytest.mark.parametrize(
    ("name", "lacks"), [("wan", "jax"), ("status", "tensorboardX")]
)
def test_programs_start_without_importing_what_they_do_not_need(name, lacks):
    code = f"import sys, experiments.{name}; print({lacks!r} in sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)
    assert out == b"False\n"
