"""Packages whose public names are imported when they are first asked for.

Who needs one part of a package then does not load the others: a relay of
`cocodc_jax.netlab` starts without JAX.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, places: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a module's `__getattr__` and `__dir__`, as PEP 562 has them.

    Names are found at `places`, MODULE or MODULE:NAME, by default those of the imports
    for type checkers.
    """
    places = typed_imports(package) if places is None else places

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = places[name].partition(":")
        found: Any = importlib.import_module(f"{package}.{module}")
        if there:
            found = getattr(found, there)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted(places)


def typed_imports(package: str) -> dict[str, str]:
    """Return the places of what a package imports under `if TYPE_CHECKING`."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    places = {}
    for node in (node for block in blocks for node in block.body):
        assert isinstance(node, ast.ImportFrom)
        module = f"{node.module}".removeprefix(package).removeprefix(".")
        for name in node.names:
            place = f"{module}:{name.name}" if module else name.name
            places[name.asname or name.name] = place
    return places


def modules_of(path: Iterable[str], packages: bool = False) -> dict[str, str]:
    """Return the places of a package's own public modules."""
    found = [m for m in pkgutil.iter_modules(path) if m.ispkg or not packages]
    return {module.name: module.name for module in found if module.name[0] != "_"}
