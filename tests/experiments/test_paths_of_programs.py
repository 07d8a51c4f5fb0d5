"""Every flag that is a path takes ~ for the home folder, in all programs."""

import importlib
import pathlib
import re

import absl.flags
import pytest

from cocodc_jax.run.config import flags
from experiments import commands, program

# How the help of a flag begins that names a file or a folder.
IS_PATH = re.compile(
    r"(With \S+: |Default: )*"
    r"(shared )?(folder|file|grid file|yaml|cells\.json|metrics\.jsonl|workdir)\b",
    re.IGNORECASE,
)
AT = "/home/me/x"


def flags_of(name, path, monkeypatch):
    """Return the flags that a program defines."""
    below = path.relative_to(pathlib.Path(commands.__file__).parents[1])
    module = importlib.import_module(".".join(below.with_suffix("").parts))
    paths = []
    of_runs = absl.flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", of_runs)
    own_flags = program.own_flags

    def record(*table, **bounds):
        paths.append(own_flags(*table, **bounds))
        return paths[-1]

    monkeypatch.setattr(program, "own_flags", record)
    if hasattr(module, "define"):
        module.define()
    else:
        with pytest.raises(SystemExit):
            module.main([name, "--help"])

    return [values[flag] for values in (of_runs, *paths) for flag in values]


@pytest.mark.parametrize("name", commands.programs())
def test_paths_of_a_program_have_a_home(name, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    path_flags = flags_of(name, commands.programs()[name], monkeypatch)
    paths = [flag for flag in path_flags if IS_PATH.match(flag.help)]

    for flag in paths:
        assert flag.parser.parse("~/x") == AT, flag.name
        assert flag.parser.parse("gs://bucket/~") == "gs://bucket/~"

    kinds = {flag.name: getattr(flag.parser, "kind", None) for flag in path_flags}
    known = {name for name, kind in kinds.items() if kind is pathlib.Path}
    assert known == {flag.name for flag in paths}
