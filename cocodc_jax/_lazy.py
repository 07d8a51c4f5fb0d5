"""Packages whose public names are imported when they are first used.

Code that needs one part of a package then does not load the others: a relay of
`cocodc_jax.netlab` starts without JAX. The package `lazy_loader` does the same, but the
core would need a third package beside JAX and Optax, and would hold the names twice: in
a call or a stub, and for type checkers.
"""

import ast
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def attach(
    package: str, modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`, see PEP 562.

    Its names are those that it imports for type checkers, which are also its `__all__`,
    and the package's modules, which are listed when they are first needed.
    """
    exported = typed_imports(package)
    if exported:
        vars(sys.modules[package])["__all__"] = sorted(exported)

    @functools.cache
    def places() -> dict[str, str]:
        return exported | {name: name for name in modules}

    def load(name: str) -> Any:
        place = exported.get(name) or places().get(name)
        if place is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")

        module, _, attribute = place.partition(":")
        value: Any = importlib.import_module(f"{package}.{module}")
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(places())


def typed_imports(package: str) -> dict[str, str]:
    """Return the imports of a package for type checkers, as MODULE or MODULE:NAME."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body]

    places = {}
    for node in imports:
        assert isinstance(node, ast.ImportFrom)
        module = f"{node.module}".removeprefix(package).removeprefix(".")
        for name in node.names:
            place = f"{module}:{name.name}" if module else name.name
            places[name.asname or name.name] = place

    return places


def modules_of(path: Iterable[str], packages: bool = False) -> Iterator[str]:
    """Yield the names of a package's own public modules."""
    for module in pkgutil.iter_modules(path):
        is_wanted = module.ispkg or not packages
        if is_wanted and not module.name.startswith("_"):
            yield module.name
