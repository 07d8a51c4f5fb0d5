"""Names of the programs, in a checkout and installed, and the command `cocodc`.

In a checkout, `python -m experiments.train` runs a program. In a wheel the same file is
`cocodc_jax.experiments.train`, and one command runs all programs: `cocodc train`.
"""

import ast
import difflib
import importlib
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from cocodc_jax._extras import MissingExtraError, extra
from cocodc_jax.run.exits import as_a_command

IS_INSTALLED = __package__ != "experiments"


def python_m(program: str) -> list[str]:
    """Return the words that start a program, such as "train", in a new process."""
    return [sys.executable, "-m", f"{__package__}.{program}"]


def module_of(name: str) -> str:
    """Return a module's name in this installation; a wheel contains `experiments`.

    >>> module_of("experiments.train"), module_of("my.trainer")
    ('experiments.train', 'my.trainer')
    """
    package, _, rest = name.partition(".")
    return f"{__package__}.{rest}" if package == "experiments" and rest else name


def shown(text: str | None) -> str:
    """Return a text with its commands as this installation has them."""
    return as_installed(text or "") if IS_INSTALLED else text or ""


def as_installed(text: str) -> str:
    """Return a text with its commands as an installed package has them.

    >>> as_installed("python -m experiments.probe_network, as `experiments.wan`")
    'cocodc probe-network, as `cocodc wan`'
    """
    return re.sub(
        r"(?:python -m )?\bexperiments\.(\w+)",
        lambda match: f"cocodc {_command(match[1])}",
        text,
    )


def command_line(program: str, words: Sequence[str]) -> str:
    """Return the command line of a program and its flags, to record with results."""
    return f"{shown('python -m experiments.' + program)} {shlex.join(words)}".rstrip()


def programs() -> dict[str, pathlib.Path]:
    """Return the file of each program by its command."""
    here = pathlib.Path(__file__).parent
    return {
        _command(path.stem): path
        for path in sorted(here.glob("*.py"))
        if "\ncli = " in path.read_text(encoding="utf-8")
    }


def main() -> int | str | None:
    """Run the program that the command line names, or list all of them."""
    by_name = programs()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "--helpfull", "--help=all"):
        with as_a_command():
            print(_list(by_name))
        return 0

    path = by_name.get(_command(name))
    if path is None:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"; did you mean cocodc {near[0]}?" if near else ""
        print(
            f"error: unknown program {name!r}{hint}\n\n{_list(by_name)}",
            file=sys.stderr,
        )
        return 2

    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    parts = path.relative_to(pathlib.Path(__file__).parent).with_suffix("").parts
    try:
        with extra("all"):
            module = importlib.import_module(".".join((__package__ or "", *parts)))
    except MissingExtraError as error:
        return f"error: {error}"

    return module.cli()


def _command(program: str) -> str:
    return program.replace("_", "-")


def _list(by_name: Mapping[str, pathlib.Path]) -> str:
    lines = ["cocodc PROGRAM [FLAGS]; cocodc PROGRAM --help explains a program.", ""]
    for name, path in by_name.items():
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<21}{doc.splitlines()[0]}")
    return "\n".join(lines)
