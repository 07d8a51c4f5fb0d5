"""Packages whose public names are imported when they are first asked for.

Who needs one part of a package then does not load the others: a relay of
`cocodc_jax.netlab` starts without JAX.
"""

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import Any


def attach(
    package: str, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, as PEP 562 has them.

    Its names are those that it imports for type checkers, which are also its `__all__`,
    and these modules.
    """
    named = typed_imports(package)
    places = named | {name: name for name in modules}
    if named:
        vars(sys.modules[package])["__all__"] = sorted(named)

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
    """Return MODULE or MODULE:NAME of what a package imports for type checkers."""
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


def modules_of(path: Iterable[str], packages: bool = False) -> list[str]:
    """Return the names of a package's own public modules."""
    found = [m.name for m in pkgutil.iter_modules(path) if m.ispkg or not packages]
    return [name for name in found if name[0] != "_"]
