"""Print the size of the package's import graph, folder by folder.

    python docs/import_graph.py [FOLDER ...]

A file is a room, an import between two files of a folder is an arrow, and the longest
chain of imports is the number of floors. `A+B` counts two folders as one.
"""

import ast
import functools
import pathlib
import sys

PACKAGE = pathlib.Path(__file__).parent.parent / "cocodc_jax"
FOLDERS = ("core", "exchange", "program", "sharding", "train", "elastic", "sync")
ALL = "core+exchange+program"
_TYPED = "TYPE_CHECKING"


def graph(folders: str) -> tuple[dict[str, set[str]], int]:
    """Return the modules that each module imports, and the lines of all files."""
    paths = [p for name in folders.split("+") for p in (PACKAGE / name).glob("*.py")]
    texts = {
        f"cocodc_jax.{p.parent.name}.{p.stem}": p.read_text()
        for p in paths
        if p.stem != "__init__"
    }

    arrows: dict[str, set[str]] = {}
    for module, text in texts.items():
        names = set()
        tree = ast.parse(text)

        # Imports for types are no arrows: they do not happen at run time.
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == _TYPED)
        ]

        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module}
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        arrows[module] = (names & texts.keys()) - {module}

    return arrows, sum(text.count("\n") for text in texts.values())


def floors(arrows: dict[str, set[str]]) -> int:
    """Return the number of files in the longest chain of imports."""

    @functools.cache
    def height(module: str) -> int:
        return 1 + max(map(height, arrows[module]), default=0)

    return max(map(height, arrows))


def main(folders: list[str]) -> None:
    """Print a table."""
    print(f"{'folder':24}{'rooms':>7}{'floors':>8}{'arrows':>8}{'lines':>8}")
    for name in folders or [*FOLDERS, ALL]:
        arrows, lines = graph(name)
        num = sum(map(len, arrows.values()))
        print(f"{name:24}{len(arrows):7}{floors(arrows):8}{num:8}{lines:8}")


if __name__ == "__main__":
    main(sys.argv[1:])
