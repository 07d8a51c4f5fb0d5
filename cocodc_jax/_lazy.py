"""Packages whose public names are imported when they are first asked for.

Who needs one part of a package then does not load the others: a relay of
`cocodc_jax.netlab` starts without JAX.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a module's `__getattr__` and `__dir__`, as PEP 562 has them."""

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


def modules_of(path: Iterable[str], packages: bool = False) -> dict[str, str]:
    """Return the places of a package's own public modules."""
    found = [m for m in pkgutil.iter_modules(path) if m.ispkg or not packages]
    return {module.name: module.name for module in found if module.name[0] != "_"}


def places_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return the places of names, which are given by module.

    >>> places_of({"merge": "Merge replace"})
    {'Merge': 'merge:Merge', 'replace': 'merge:replace'}
    """
    return {n: f"{module}:{n}" for module in names for n in names[module].split()}
