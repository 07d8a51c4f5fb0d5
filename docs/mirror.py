"""Print how a package's code is laid out, beside packages that read well.

    python docs/mirror.py                       # this repository, and what is installed
    python docs/mirror.py cocodc_jax/elastic    # folders or files alone

A mirror, not a limit: no test reads these numbers, and no code is to be written for
them. Bodies are those of functions and methods, without docstrings; a function inside
another one is part of its body.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import pathlib
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

# Names that say where a value came from, and not what it is.
VAGUE_NAMES = frozenset({"found", "each", "own", "told"})
UNBROKEN_LINES = 30

REPOSITORY = pathlib.Path(__file__).parent.parent
OURS = ("cocodc_jax", "experiments", "tests")
OTHERS = ("optax", "optimistix", "flax")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Body(NamedTuple):
    """The lines of one outermost function, without its docstring."""

    num_lines: int
    num_blank: int
    longest_run: int  # Lines without a blank one between them.


class Layout(NamedTuple):
    """What is counted in the files of a package."""

    num_lines: int
    bodies: list[Body]
    num_parallel: int  # Assignments such as `a, b = x, y`.
    num_vague: int  # Variables and arguments with a name of `VAGUE_NAMES`.


def measure(paths: list[pathlib.Path]) -> Layout:
    """Count the files of a package together."""
    num_lines = 0
    bodies: list[Body] = []
    num_parallel = 0
    num_vague = 0
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        lines = _marked_lines(text)
        num_lines += len(lines)
        bodies += [_body(function, lines) for function in _outermost(tree)]
        for node in ast.walk(tree):
            num_parallel += _is_parallel(node)
            num_vague += _is_vague(node)
    return Layout(num_lines, bodies, num_parallel, num_vague)


def _marked_lines(text: str) -> list[bool]:
    """Return whether each line is blank; lines inside of a string are not."""
    is_blank = [not line.strip() for line in text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            first = token.start[0]
            last = token.end[0]
            is_blank[first - 1 : last] = [False] * (last - first + 1)
    return is_blank


def _outermost(node: ast.AST) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        else:
            yield from _outermost(child)


def _body(function: Function, is_blank: list[bool]) -> Body:
    statements = function.body
    if ast.get_docstring(function) is not None:
        statements = statements[1:]
    if not statements:
        return Body(num_lines=0, num_blank=0, longest_run=0)

    lines = is_blank[statements[0].lineno - 1 : function.end_lineno]
    longest = 0
    run = 0
    for blank in lines:
        run = 0 if blank else run + 1
        longest = max(longest, run)
    return Body(num_lines=len(lines), num_blank=sum(lines), longest_run=longest)


def _is_parallel(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def _is_vague(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES
    return isinstance(node, ast.arg) and node.arg in VAGUE_NAMES


def _row(name: str, layout: Layout) -> str:
    body_lines = sum(body.num_lines for body in layout.bodies)
    num_blank = sum(body.num_blank for body in layout.bodies)
    unbroken = sum(body.longest_run >= UNBROKEN_LINES for body in layout.bodies)
    lengths = sorted(body.num_lines for body in layout.bodies)
    longest_but_5_percent = lengths[int(0.95 * (len(lengths) - 1))]
    cells = (
        f"{100 * num_blank / max(body_lines, 1):.1f}",
        f"{1000 * layout.num_parallel / layout.num_lines:.1f}",
        f"{layout.num_vague}",
        f"{unbroken}",
        f"{longest_but_5_percent}",
        f"{layout.num_lines:,}",
    )
    return f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells)


def _files(name: str) -> list[pathlib.Path]:
    """Return a folder's files, or those of an installed package, tests left out."""
    folder = pathlib.Path(name)
    if not folder.exists():
        folder = REPOSITORY / name
    if not folder.exists():
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return []
        folder = pathlib.Path(spec.origin).parent
    if folder.is_file():
        return [folder]
    paths = sorted(folder.rglob("*.py"))
    if name in OTHERS:
        paths = [path for path in paths if not path.stem.endswith("_test")]
    return paths


def main(names: list[str]) -> None:
    """Print one row a package."""
    if not names:
        folders = sorted(
            path.relative_to(REPOSITORY).as_posix()
            for path in (REPOSITORY / OURS[0]).iterdir()
            if path.is_dir() and path.name != "__pycache__"
        )
        names = [*folders, *OURS, *OTHERS]

    titles = ("blank %", "parallel", "vague names", "unbroken", "95 %", "lines")
    print(f"{'':<28}" + "".join(f"{title:>12}" for title in titles))
    for name in names:
        if paths := _files(name):
            print(_row(name, measure(paths)))
    print(
        "\nblank %: of the lines of bodies. parallel: `a, b = x, y` in 1,000 lines.\n"
        f"vague names: variables called {', '.join(sorted(VAGUE_NAMES))}.\n"
        f"unbroken: bodies with {UNBROKEN_LINES} lines or more without a blank one.\n"
        "95 %: lines that 95 of 100 bodies have at most."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
